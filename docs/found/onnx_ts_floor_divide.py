"""torch.onnx (TorchScript): `floor_divide` of negative integers truncates.

-7 // 2 is -4 in PyTorch and -3 in the file. The dynamo exporter is right. Floats are wrong, too. Control: positive
numbers agree.
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


class Divide(torch.nn.Module):
    def forward(self, x, y):
        return torch.floor_divide(x, y)


def error(module, *inputs):
    right = module(*inputs).double()
    file = io.BytesIO()
    torch.onnx.export(module.eval(), inputs, file, dynamo=False, opset_version=17)
    session = onnxruntime.InferenceSession(file.getvalue())
    names = [x.name for x in session.get_inputs()]
    found = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})[0]
    return ((torch.from_numpy(found).double() - right).abs().max() / right.abs().max()).item()


torch.manual_seed(0)
x, y = torch.tensor([-7, 7, -5, 9]), torch.tensor([2, 2, 3, -4])
wrong, control = error(Divide(), x, y), error(Divide(), x.abs(), y.abs())
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
