"""Sizes in the plan of a dry run."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import glassengine as glass
from glassengine.engine.build.plan import weights_bytes
from glassengine.program import Program


class Bag(torch.nn.Module):
    """A table and a product; one weight for both where they are tied."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(1000, 16)
        self.head = torch.nn.Linear(16, 1000, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def exported(module: torch.nn.Module) -> Program:
    from glassengine.program.export.export import export_module

    return export_module(module.eval(), {"ids": torch.ones(2, 3, dtype=torch.int64)})


def test_a_tied_weight_counts_once() -> None:
    apart, tied = exported(Bag()), exported(Bag(tied=True))
    assert weights_bytes([apart]) == 2 * weights_bytes([tied]) == 2 * 1000 * 16 * 4


def test_both_programs_of_an_engine_count() -> None:
    program = exported(Bag())
    assert weights_bytes([program, exported(Bag())]) == 2 * weights_bytes([program])
    assert weights_bytes([program, program]) == weights_bytes([program])


def test_dry_run_needs_no_weights(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, vocab_size=100
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    plan = glass.build(tmp_path / "m", tmp_path / "e", backend="eager", dry_run=True)
    assert plan.weights_bytes > 4 * 2 * 100 * 64
    assert not (tmp_path / "e").exists()
