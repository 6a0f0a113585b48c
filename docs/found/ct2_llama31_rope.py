"""CTranslate2: the RoPE scaling of Llama 3.1 has no effect on the CPU.

The converter writes type "llama3", factor, low and high factors, but the logits are those of a model without
scaling (second control). Control: `rope_type="default"` agrees.
Published: meta-llama/Llama-3.1-8B, Llama-3.2-1B, 3B, Llama-3.3-70B; at their size the long wavelengths are 8 (32)
times too short from the first tokens on.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.24.0",
#     "ctranslate2==4.8.5",
# ]
# ///

from tiny import ctranslate2, error, report

llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
llama3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500000.0}
common = dict(stored={"rope_theta": 10000.0})
wrong = error(ctranslate2, "Llama", **common, rope_parameters=llama3)
control = error(ctranslate2, "Llama", **common)
report(wrong, control)
