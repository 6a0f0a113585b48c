"""torch.onnx (TorchScript): `index_put(accumulate=True)` adds once where an index occurs twice.

Control: distinct indices agree.
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


class Put(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows = torch.tensor(rows)

    def forward(self, x):
        return torch.ones(5, 7).index_put((self.rows,), x[: len(self.rows)], accumulate=True)


def error(module, *inputs):
    right = module(*inputs).double()
    file = io.BytesIO()
    torch.onnx.export(module.eval(), inputs, file, dynamo=False, opset_version=17)
    session = onnxruntime.InferenceSession(file.getvalue())
    names = [x.name for x in session.get_inputs()]
    found = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})[0]
    return ((torch.from_numpy(found).double() - right).abs().max() / right.abs().max()).item()


torch.manual_seed(0)
x = torch.randn(5, 7)
wrong, control = error(Put([0, 0, 2]), x), error(Put([0, 1, 2]), x)
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
