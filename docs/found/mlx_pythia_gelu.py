"""mlx-lm: GPT-NeoX runs the tanh approximation in place of the exact GELU.

`hidden_act` is `gelu` in the Pythia models; `mlx_lm/models/gpt_neox.py` calls `nn.gelu_approx` and reads no
`hidden_act`. Control: `hidden_act="gelu_fast"` (GPT-NeoX-20B has it) agrees to 1e-6.
Published: EleutherAI/pythia-70m to pythia-12b.
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
    sizes=dict(vocab_size=260, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4),
    stored={"rotary_emb_base": 10000, "rotary_pct": 0.25},
)
wrong = error(mlx, "GPTNeoX", **common, hidden_act="gelu")
control = error(mlx, "GPTNeoX", **common, hidden_act="gelu_fast")
report(wrong, control, most=5e-6)
