"""onnxruntime-genai's builder: OLMo gets an RMS norm in place of LayerNorm.

`OLMoModel` never sets `layernorm_attrs["simple"] = False`: the file has SimplifiedLayerNormalization, which does
not subtract the mean. Control: transformers with RMS norms (epsilon 1e-6) in place of its LayerNorms agrees with
the engine.
Published: allenai/OLMo-1B-hf, OLMo-7B-hf, OLMo-7B-0424-hf, OLMo-7B-0724-hf, all of them from the first token on.
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


wrong = error(genai, "Olmo")
control = error(genai, "Olmo", reference=rms)
report(wrong, control)
