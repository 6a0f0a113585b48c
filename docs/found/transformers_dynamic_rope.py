"""transformers: a prompt changes the logits of a later, shorter prompt (dynamic NTK RoPE).

`dynamic_rope_update` rescales the frequencies when a prompt is longer than any before, and resets them only for one
that is shorter than the original length. A prompt in between is computed with the frequencies of the longest prompt
so far. Control: without the long prompt the same call twice gives the same bits.
A server that keeps one model in memory answers by the history of its requests.
"""
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.24.0",
# ]
# ///

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def logits(before):
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    sizes = dict(vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config = LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=32, rope_parameters=rope)
    model = LlamaForCausalLM(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, 0, 0.125)
    with torch.no_grad():
        model(torch.arange(before)[None])
        return model(torch.arange(40)[None]).logits


right = logits(before=40)
wrong, control = ((logits(before) - right).abs().max() / right.abs().max() for before in (60, 40))
print(f"DIFFERENCE {wrong:.1e} CONTROL {control:.1e}")
if not (control == 0 and wrong > 1e-3):
    raise SystemExit("does not reproduce")
