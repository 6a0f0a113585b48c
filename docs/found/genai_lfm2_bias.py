"""onnxruntime-genai's builder: the biases of LFM2's short convolution are dropped.

With `conv_bias=True` the layers `in_proj` and `out_proj` have biases; `make_short_conv` writes them as products
alone. Control: `conv_bias=False` agrees.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.24.0",
#     "onnxruntime-genai==0.18.0",
#     "onnxruntime==1.32.0",
#     "onnx==1.23.2",
#     "onnx-ir==1.1.0",
# ]
# ///

from tiny import error, genai, random_biases, report

common = dict(layer_types=["conv", "full_attention"], before=random_biases)
wrong = error(genai, "Lfm2", **common, conv_bias=True)
control = error(genai, "Lfm2", **common, conv_bias=False)
report(wrong, control)
