"""onnxruntime-genai's builder: the bias of Nemotron's up projection is dropped.

`NemotronModel.make_mlp_proj` writes products alone, whatever `mlp_bias` says. Control: `mlp_bias=False` agrees.
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

common = dict(head_dim=32, before=random_biases)
wrong = error(genai, "Nemotron", **common, mlp_bias=True)
control = error(genai, "Nemotron", **common, mlp_bias=False)
report(wrong, control)
