"""torch.onnx (dynamo): `scatter_reduce` with "mean" exports something else.

The file does not divide by the number of values that meet in a place. Control: "sum" agrees.
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


class Scatter(torch.nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.index = how, torch.tensor([[0, 1, 0, 2, 1, 0, 0], [0, 1, 2, 0, 1, 1, 0]])

    def forward(self, x):
        return torch.full((3, 7), 0.5).scatter_reduce(0, self.index, x, self.how)


def error(module, *inputs):
    right = module(*inputs).double()
    file = io.BytesIO()
    torch.onnx.export(module.eval(), inputs, file, dynamo=True)
    session = onnxruntime.InferenceSession(file.getvalue())
    names = [x.name for x in session.get_inputs()]
    found = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})[0]
    return ((torch.from_numpy(found).double() - right).abs().max() / right.abs().max()).item()


torch.manual_seed(0)
x = torch.randn(2, 7)
wrong, control = error(Scatter("mean"), x), error(Scatter("sum"), x)
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
