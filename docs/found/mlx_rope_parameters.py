"""mlx-lm: the RoPE parameters of a checkpoint that transformers 5 saved are not read.

transformers 5 writes theta and scaling into `rope_parameters`. `mlx_lm/models/llama.py` (also mistral, qwen2, phi,
smollm3 and others) reads `rope_theta` and `rope_scaling` alone, and runs theta 10000 without a message. Control:
theta 10000 agrees; so does theta 500000 in the form of transformers 4.
Published: every fine-tune of Llama 3 (theta 500000) or Qwen 2.5 (1000000) that transformers 5 wrote.
Known: ml-explore/mlx-lm pull request 953.
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

wrong = error(mlx, "Llama", rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
control = error(mlx, "Llama", rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
report(wrong, control)
