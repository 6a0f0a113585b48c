"""CTranslate2: `scale_attn_by_inverse_layer_idx` of GPT-2 is ignored.

The loader of GPT-2 does not read the field; layer i divides its scores by i + 1. Control: `False` agrees.
Published: stanford-crfm/alias-gpt2-small-x21, battlestar-gpt2-small-x49, ... (all ten GPT-2 of Mistral, Stanford).
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

common = dict(sizes=dict(vocab_size=260, n_embd=64, n_layer=4, n_head=4, n_positions=128))
wrong = error(ctranslate2, "GPT2", **common, scale_attn_by_inverse_layer_idx=True)
control = error(ctranslate2, "GPT2", **common, scale_attn_by_inverse_layer_idx=False)
report(wrong, control)
