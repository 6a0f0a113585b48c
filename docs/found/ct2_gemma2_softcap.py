"""CTranslate2: Gemma 2 runs without soft-capping.

`Gemma2Loader` reads neither `attn_logit_softcapping` nor `final_logit_softcapping`, and the runtime has no such
operation. Control: both `None` agrees.
Published: google/gemma-2-2b, 9b, 27b (50.0 and 30.0).
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

common = dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=64)
wrong = error(ctranslate2, "Gemma2", **common, attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
control = error(ctranslate2, "Gemma2", **common, attn_logit_softcapping=None, final_logit_softcapping=None)
report(wrong, control)
