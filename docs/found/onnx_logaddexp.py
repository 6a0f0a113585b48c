"""torch.onnx (dynamo): `logaddexp` is log(exp(x) + exp(y)).

The maximum is not taken out: arguments above 88 give infinity, below -104 minus infinity. Control: arguments near 0
agree.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.15.0",
#     "onnxruntime==1.32.0",
#     "onnx==1.23.2",
#     "onnxscript==0.7.2",
# ]
# ///

import io

import onnxruntime
import torch


class Add(torch.nn.Module):
    def forward(self, x, y):
        return torch.logaddexp(x, y)


def error(module, *inputs):
    right = module(*inputs).double()
    file = io.BytesIO()
    torch.onnx.export(module.eval(), inputs, file, dynamo=True)
    session = onnxruntime.InferenceSession(file.getvalue())
    names = [x.name for x in session.get_inputs()]
    found = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})[0]
    return ((torch.from_numpy(found).double() - right).abs().max() / right.abs().max()).item()


torch.manual_seed(0)
x, y = torch.rand(9) + 1, torch.rand(9) + 1
wrong, control = error(Add(), x * 100, y * 100), error(Add(), x, y)
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
