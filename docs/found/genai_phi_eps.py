"""onnxruntime-genai's builder: epsilon 1e-6 in place of 1e-5 for models without `rms_norm_eps`.

`base.py`: `epsilon = config.rms_norm_eps if hasattr(config, "rms_norm_eps") else 1e-06`. Phi has `layer_norm_eps`,
Nemotron `norm_eps`. Control: a checkpoint with `layer_norm_eps=1e-6` agrees.
Published: microsoft/phi-1, phi-1_5, phi-2 (1e-5); nvidia/Minitron-4B-Base, 8B (`norm_eps` 1e-5).
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

common = dict(hidden_size=128, std=0.01)
wrong = error(genai, "Phi", **common, layer_norm_eps=1e-5)
control = error(genai, "Phi", **common, layer_norm_eps=1e-6)
report(wrong, control, most=1e-5)
