"""mlx-lm: Jamba normalizes the weights of the chosen experts.

`JambaSparseMoeBlock` takes the softmax over the chosen logits. Jamba takes the softmax over all experts, then the
top k, without dividing by their sum (transformers; vLLM has `renormalize=False`). The output of the experts is too
large.
Control: with `num_experts_per_tok=num_experts` both agree.
Published: ai21labs/Jamba-v0.1, AI21-Jamba-Mini-1.5, 1.6, 1.7, AI21-Jamba-Large-* (16 experts, 2 per token).
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
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    num_experts=4,
    mamba_d_state=8,
    mamba_dt_rank=8,
    use_mamba_kernels=False,
)
wrong = error(mlx, "Jamba", **common, num_experts_per_tok=2)
control = error(mlx, "Jamba", **common, num_experts_per_tok=4)
report(wrong, control)
