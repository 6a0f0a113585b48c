"""onnxruntime-genai's builder: `attention_factor` of YaRN is ignored.

`make_mscale` is called with factor, mscale and mscale_all_dim alone. Control: without the field (and
`truncate=False`, genai_qwen3_yarn.py) both agree.
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
wrong = error(genai, "Qwen3", **common, rope_parameters=yarn(truncate=False, attention_factor=1.5))
control = error(genai, "Qwen3", **common, rope_parameters=yarn(truncate=False))
report(wrong, control, most=1e-5)
