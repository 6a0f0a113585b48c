"""mlx-lm: StarCoder2 runs the exact GELU in place of the tanh approximation.

`hidden_act` is `gelu_pytorch_tanh`; `mlx_lm/models/starcoder2.py` calls `nn.gelu` and reads no `hidden_act`.
Control: a checkpoint with `hidden_act="gelu"` agrees to 1e-6.
Published: bigcode/starcoder2-3b, 7b, 15b.
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

common = dict(sliding_window=None, stored={"rope_theta": 10000.0})
wrong = error(mlx, "Starcoder2", **common, hidden_act="gelu_pytorch_tanh")
control = error(mlx, "Starcoder2", **common, hidden_act="gelu")
report(wrong, control, most=5e-6)
