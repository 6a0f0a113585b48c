"""mlx-lm: GLM rotates the whole head in place of half of it.

`mlx_lm/models/glm.py` makes `nn.RoPE(dims=head_dim)` and reads no `partial_rotary_factor` (glm4.py does). Control:
`partial_rotary_factor=1.0` agrees.
Published: zai-org/glm-4-9b-hf, glm-4-9b-chat-hf (0.5 of 128); wrong from the second token on.
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

rope = {"rope_type": "default", "rope_theta": 10000.0}
common = dict(head_dim=16, attention_bias=True, stored={"rope_theta": 10000.0})
wrong = error(mlx, "Glm", **common, rope_parameters=rope | {"partial_rotary_factor": 0.5})
control = error(mlx, "Glm", **common, rope_parameters=rope | {"partial_rotary_factor": 1.0})
report(wrong, control)
