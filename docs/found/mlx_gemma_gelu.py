"""mlx-lm: Gemma 1 runs the exact GELU in place of the tanh approximation.

Gemma is trained with `gelu_pytorch_tanh` (transformers corrected this in March 2024, also for configurations that
say "gelu"). `mlx_lm/models/gemma.py` calls `nn.gelu`.
Control: transformers with the exact GELU agrees with mlx-lm.
Published: google/gemma-2b, gemma-7b, codegemma-7b, gemma-1.1-*.
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

import torch
from tiny import error, mlx, report


def exact(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()


common = dict(head_dim=16)
wrong = error(mlx, "Gemma", **common)
control = error(mlx, "Gemma", **common, reference=exact)
report(wrong, control, most=5e-6)
