"""mlx-lm: GPTBigCode runs the exact GELU in place of the tanh approximation.

`activation_function` is `gelu_pytorch_tanh`; `mlx_lm/models/gpt_bigcode.py` calls `nn.gelu`. Control: a checkpoint
with `activation_function="gelu"` agrees to 1e-6.
Published: bigcode/starcoder, bigcode/starcoderbase, bigcode/gpt_bigcode-santacoder.
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

common = dict(sizes=dict(vocab_size=260, n_embd=64, n_layer=2, n_head=4, n_positions=128, n_inner=256))
wrong = error(mlx, "GPTBigCode", **common, activation_function="gelu_pytorch_tanh")
control = error(mlx, "GPTBigCode", **common, activation_function="gelu")
report(wrong, control, most=5e-6)
