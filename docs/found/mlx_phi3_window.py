"""mlx-lm: the sliding window of Phi-3 is ignored.

`mlx_lm/models/phi3.py` reads no `sliding_window`. Control: `sliding_window=None` agrees.
Published: microsoft/Phi-3-mini-4k-instruct (window 2047, context 4096); wrong from token 2048 on.
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

common = dict(stored={"rope_theta": 10000.0, "rope_scaling": None})
wrong = error(mlx, "Phi3", **common, sliding_window=8)
control = error(mlx, "Phi3", **common, sliding_window=None)
report(wrong, control)
