"""mlx-lm: `clip_qkv` of OLMoE is ignored.

`mlx_lm/models/olmoe.py` has no `clip_qkv`: queries, keys and values are not clipped. Control: `clip_qkv=None`
agrees. No message.
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

common = dict(num_experts=4, num_experts_per_tok=2)
wrong = error(mlx, "Olmoe", **common, clip_qkv=0.5)
control = error(mlx, "Olmoe", **common, clip_qkv=None)
report(wrong, control)
