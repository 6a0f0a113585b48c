"""onnxruntime-genai's builder: the ramp of YaRN is not rounded to whole elements.

transformers (and the paper's code) take the floor and the ceiling of both ends unless `truncate` is false. Control:
`truncate=False` agrees. `attention_factor` is ignored besides: genai_yarn_factor.py.
Published: Qwen/Qwen3-* and Qwen/Qwen2.5-* with the YaRN of their cards (factor 4, 32768).
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

from tiny import error, genai, report, yarn

common = dict(head_dim=128, num_attention_heads=2, num_key_value_heads=1)
wrong = error(genai, "Qwen3", **common, rope_parameters=yarn())
control = error(genai, "Qwen3", **common, rope_parameters=yarn(truncate=False))
report(wrong, control, most=1e-5)
