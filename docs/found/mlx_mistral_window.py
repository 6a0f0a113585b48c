"""mlx-lm: the sliding window of Mistral is ignored.

A checkpoint of type `mistral` with `sliding_window` is loaded as `llama`, whose `ModelArgs` reads windows from
`layer_types` alone. Every token attends to all earlier ones.
Expected: token i attends to tokens i - window + 1 to i, as in transformers. Control: `sliding_window=None` agrees.
Published: mistralai/Mistral-7B-v0.1 and Mistral-7B-Instruct-v0.1 (4096), HuggingFaceH4/zephyr-7b-beta; wrong from
token 4097 on.
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

wrong = error(mlx, "Mistral", sliding_window=8)
control = error(mlx, "Mistral", sliding_window=None)
report(wrong, control)
