"""torch.onnx (dynamo): `divisor_override` of AvgPool2d is ignored.

The file has an AveragePool that divides by the size of the kernel. No message. Control: without it both agree.
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


def error(module, *inputs):
    right = module(*inputs).double()
    file = io.BytesIO()
    torch.onnx.export(module.eval(), inputs, file, dynamo=True)
    session = onnxruntime.InferenceSession(file.getvalue())
    names = [x.name for x in session.get_inputs()]
    found = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})[0]
    return ((torch.from_numpy(found).double() - right).abs().max() / right.abs().max()).item()


torch.manual_seed(0)
x = torch.randn(2, 4, 13, 11)
wrong, control = error(torch.nn.AvgPool2d(3, 2, divisor_override=5), x), error(torch.nn.AvgPool2d(3, 2), x)
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
