"""mlx-lm: Mamba 2 with several groups is normalized over the whole width.

`MambaRMSNormGated` divides by the root mean square of all elements; transformers, mamba_ssm
(`norm_before_gate=False`, `group_size`) and llama.cpp take that of each group. Control: one group agrees.
Published: mistralai/Mamba-Codestral-7B-v0.1 (8 groups).
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

common = dict(
    sizes=dict(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=16,
        expand=2,
    )
)
wrong = error(mlx, "Mamba2", **common, n_groups=2)
control = error(mlx, "Mamba2", **common, n_groups=1)
report(wrong, control)
