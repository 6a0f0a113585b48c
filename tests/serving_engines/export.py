"""Exports small checkpoints to ExecuTorch, right or with a mistake of a conversion. In ExecuTorch's interpreter.

Reads {"checkpoint", "folder", "tokens": number or "cache", "backend": "portable" or "xnnpack", "plants": [...]}.
A folder for each plant.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from executorch.exir import EdgeCompileConfig, to_edge, to_edge_transform_and_lower
from transformers import AutoModelForCausalLM


def healthy(model):
    pass


def eps(model):
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-3


def rope_base(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq.copy_(1.0 / 500000.0 ** (torch.arange(0, 32, 2) / 32))


def attention_scale(model):
    model.model.layers[1].self_attn.scaling *= 1.1


def swapped_gate(model):
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def transposed(model):
    weight = model.model.layers[1].self_attn.o_proj.weight
    weight.data = weight.data.T.contiguous()


def norm_plus_one(model):
    model.model.norm.weight.data += 1


def other_act(model):
    model.model.layers[0].mlp.act_fn = torch.nn.GELU()


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits


def exported_of(model, tokens):
    """Return a model as an exported program: `tokens` is a number, or "cache" for calls of any number."""
    if tokens != "cache":
        ids = torch.ones((1, tokens), dtype=torch.int64)
        return torch.export.export(Logits(model), (ids,), strict=False)
    from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

    model.generation_config.update(use_cache=True, cache_implementation="static")
    size = torch.export.Dim("tokens", min=1, max=95)
    return TorchExportableModuleForDecoderOnlyLM(model, 1, 96).export(
        torch.ones((1, 5), dtype=torch.int64),
        cache_position=torch.arange(5),
        dynamic_shapes={"input_ids": {1: size}, "cache_position": {0: size}},
    )


def main():
    warnings.simplefilter("ignore")
    request = json.load(sys.stdin)
    settings = EdgeCompileConfig(_check_ir_validity=False)
    for name in request["plants"]:
        how = {"attn_implementation": "sdpa", "experts_implementation": "batched_mm"}
        model = AutoModelForCausalLM.from_pretrained(request["checkpoint"], **how).eval()
        with torch.no_grad():
            globals()[name](model)
            exported = exported_of(model, request["tokens"])
            if request["backend"] == "xnnpack":
                from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner

                how = {"partitioner": [XnnpackPartitioner()], "compile_config": settings}
                edge = to_edge_transform_and_lower(exported, **how, generate_etrecord=True)
            else:
                edge = to_edge(exported, compile_config=settings, generate_etrecord=True)
        program = edge.to_executorch()
        folder = Path(request["folder"]) / name
        folder.mkdir(parents=True)
        (folder / "model.pte").write_bytes(program.buffer)
        program.get_etrecord().save(str(folder / "etrecord.bin"))


if __name__ == "__main__":
    main()
