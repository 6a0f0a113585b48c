"""mlx-lm: `use_sliding_window` of Qwen 2 and Qwen 3 is ignored.

`mlx_lm/models/qwen3.py` and `qwen2.py` read neither `use_sliding_window` nor `max_window_layers`. Control:
`use_sliding_window=False` agrees. No message.
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

common = dict(head_dim=16, stored={"rope_theta": 10000.0})
wrong = error(mlx, "Qwen3", **common, use_sliding_window=True, sliding_window=8, max_window_layers=1)
control = error(mlx, "Qwen3", **common, use_sliding_window=False)
report(wrong, control)
