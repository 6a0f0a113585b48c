"""torch.onnx (TorchScript): cosine similarity clamps the product of the norms.

PyTorch takes x y / (max(|x|, eps) max(|y|, eps)), the file x y / max(|x| |y|, eps): vectors of norm 1e-6 get 0 in
place of their cosine. Control: vectors of norm 1 agree.
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


class Cosine(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.cosine_similarity(x, x.flip(0))


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
wrong, control = error(Cosine(), x * 1e-6), error(Cosine(), x)
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control < 1e-5 and not wrong <= 10 * control):
    raise SystemExit("does not reproduce")
