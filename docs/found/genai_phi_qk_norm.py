"""onnxruntime-genai's builder: `qk_layernorm` of Phi is ignored.

Queries and keys are not normalized; the weights of both norms are left out without a message. Control:
`qk_layernorm=False` agrees but for epsilon (genai_phi_eps.py).
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

from tiny import error, genai, report

common = dict(hidden_size=128)
wrong = error(genai, "Phi", **common, qk_layernorm=True)
control = error(genai, "Phi", **common, qk_layernorm=False)
report(wrong, control)
