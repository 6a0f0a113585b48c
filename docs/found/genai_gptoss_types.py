"""onnxruntime-genai's builder: `layer_types` of GPT-OSS is ignored.

The parity of the layer decides which layers have a window. Control: [sliding, full] agrees, [full, sliding] does
not.
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

common = dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
wrong = error(genai, "GptOss", **common, layer_types=["full_attention", "sliding_attention"])
control = error(genai, "GptOss", **common, layer_types=["sliding_attention", "full_attention"])
report(wrong, control)
