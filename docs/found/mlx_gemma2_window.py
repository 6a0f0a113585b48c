"""mlx-lm: Gemma 2 has no sliding window.

`mlx_lm/models/gemma2.py` reads no `sliding_window`: one mask, causal alone, serves all layers. Every second layer
of Gemma 2 has a window.
Control: a window that is longer than the prompt agrees.
Published: google/gemma-2-2b, 9b, 27b (window 4096, context 8192); wrong from token 4097 on.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.24.0",
#     "mlx-lm==0.32.2",
#     "mlx[cpu]==0.32.4",
# ]
# ///

from tiny import error, mlx, report

common = dict(head_dim=16, query_pre_attn_scalar=16)
wrong = error(mlx, "Gemma2", **common, sliding_window=8)
control = error(mlx, "Gemma2", **common, sliding_window=64)
report(wrong, control)
