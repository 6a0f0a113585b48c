"""vLLM with tensor_parallel_size=2, as its two processes have recorded it; mistakes are planted in what one has."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import glassengine as glass
from glassengine.results import Comparison
from glassengine.testing.checkpoints import save_small

RECORDED = Path(__file__).parents[4] / "serving_engines" / "recorded" / "llama-two_ranks"
Values = list[dict[str, torch.Tensor]]
LAYER = "model.layers.1"


def same_shard(ranks: Values) -> None:
    name = f"{LAYER}.self_attn.qkv_proj/out.0"
    ranks[1][name] = ranks[0][name]


def exchanged_shards(ranks: Values) -> None:
    name = f"{LAYER}.mlp.gate_up_proj/out.0"
    ranks[0][name], ranks[1][name] = ranks[1][name], ranks[0][name]


def norm_of_one_rank(ranks: Values) -> None:
    ranks[1][f"{LAYER}.post_attention_layernorm/out.0"] *= 1.1


def share_of_a_sum(ranks: Values) -> None:
    for rank, share in zip(ranks, (0.25, 0.75), strict=True):
        rank[f"{LAYER}.self_attn.o_proj/out.0"] *= share


PLANTS: dict[str, tuple[Callable[[Values], None], str, str]] = {
    "same_shard": (same_shard, f"{LAYER}.self_attn.q_proj/linear.0", "request 0"),
    "exchanged_shards": (exchanged_shards, f"{LAYER}.mlp.gate_proj/linear.0", "request 0"),
    "norm_of_one_rank": (norm_of_one_rank, f"{LAYER}.post_attention_layernorm/mul.1", "request 0, rank 1"),
    "share_of_a_sum": (share_of_a_sum, f"{LAYER}.self_attn.o_proj/linear.0", "request 0"),
}


def planted(folder: Path, change: Callable[[Values], None]) -> Path:
    """Copy the recording with a change in each forward."""
    shutil.copytree(RECORDED, folder)
    for number in range(3):
        paths = [folder / f"rank{rank}" / f"forward-{number:06d}.safetensors" for rank in (0, 1)]
        ranks: Values = []
        metadata = []
        for path in paths:
            with safe_open(path, "pt") as file:
                ranks.append({name: file.get_tensor(name).clone() for name in file.keys()})  # noqa: SIM118
                metadata.append(file.metadata())
        change(ranks)
        for path, values, told in zip(paths, ranks, metadata, strict=True):
            save_file({name: value.clone() for name, value in values.items()}, path, told)
    return folder


def bad(found: Comparison) -> str | None:
    return next((pair.case for pair in found.pairs if pair.verdict == "wrong"), None)


@pytest.mark.slow
def test_two_right_ranks_are_judged_as_one(tmp_path: Path) -> None:
    found = glass.check(save_small("llama", tmp_path / "checkpoint"), candidate=RECORDED)
    assert found.ok and found.coverage == 1.0 and not found.origins, found.not_ok_because
    assert {pair.case for pair in found.pairs} == {"request 0", "request 1"}, "copies are the same"


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_a_mistake_of_one_rank_is_named(name: str, tmp_path: Path) -> None:
    change, place, case = PLANTS[name]
    recorded = planted(tmp_path / "recorded", change)
    found = glass.check(save_small("llama", tmp_path / "checkpoint"), candidate=recorded)
    first = found.first_divergence
    assert not found.ok and first is not None and (first.step, first.site) == (0, place)
    assert bad(found) == case
