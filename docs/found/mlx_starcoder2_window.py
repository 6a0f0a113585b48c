"""mlx-lm: the sliding window of StarCoder2 is ignored.

`mlx_lm/models/starcoder2.py` reads no `sliding_window`. Control: `sliding_window=None` agrees but for the GELU
(mlx_starcoder2_gelu.py).
Published: bigcode/starcoder2-3b, 7b, 15b (window 4096, context 16384); wrong from token 4097 on.
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

common = dict(stored={"rope_theta": 10000.0})
wrong = error(mlx, "Starcoder2", **common, sliding_window=8)
control = error(mlx, "Starcoder2", **common, sliding_window=None)
report(wrong, control)
