"""torch: batch_norm in training, bfloat16 on the CPU, is off by more than two units in the last place.

The result of `nn.BatchNorm1d(n).bfloat16().train()` should be the float64 result, rounded once: at most 0.5 units
of bfloat16 (2 ** -8 relative to the power of two). The kernel keeps mean and inverse deviation in bfloat16.
Control: float32 weights and statistics with a bfloat16 input (mixed) are exact.
torch.float16 is the same.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.15.0",
# ]
# ///

import torch


def units(module, x):
    right = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
    found = module(x)
    spacing = 2.0 ** (right.abs().log2().floor() - 7)
    large = right.abs() > 1  # a value near 0 is a difference, whose units say nothing
    return ((found.double() - right).abs() / spacing)[large].max().item()


torch.manual_seed(0)
x = (torch.randn(512, 64) + 3).bfloat16()
wrong, control = units(torch.nn.BatchNorm1d(64).bfloat16(), x), units(torch.nn.BatchNorm1d(64), x)
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e} (units of bfloat16)")
if not (control < 0.6 and wrong > 2):
    raise SystemExit("does not reproduce")
