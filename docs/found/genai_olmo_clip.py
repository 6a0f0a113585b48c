"""onnxruntime-genai's builder: `clip_qkv` of OLMo is ignored.

The word is in no builder. Control: `clip_qkv=None`, with the norm of genai_olmo_norm.py in place, agrees.
Published: allenai/OLMo-7B-0424-hf (8.0).
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.24.0",
#     "onnxruntime-genai==0.18.0",
#     "onnxruntime==1.32.0",
#     "onnx==1.23.2",
#     "onnx-ir==1.1.0",
# ]
# ///

import torch
from tiny import error, genai, report


def rms(model):
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "OlmoLayerNorm":
            norm = torch.nn.RMSNorm(64, eps=1e-6, elementwise_affine=False)
            model.set_submodule(name, norm)


common = dict(reference=rms)
wrong = error(genai, "Olmo", **common, clip_qkv=0.5)
control = error(genai, "Olmo", **common, clip_qkv=None)
report(wrong, control)
