"""What ranks have of a server's tensors, as one process has it: heads, fused parts, copies, and copies that differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from glassengine.errors import CorruptError
from glassengine.plugins.serving.joined import of_ranks
from glassengine.plugins.serving.requests import Forwards
from glassengine.recording.formats.folders import ServerFolder, ranks_of

WAYS = {
    "*.qkv_proj/out.0": "qkv",
    "*.gate_up_proj/out.0": "halves",
    "*.attn/in.0": "side by side",
    "*.attn/in.1": "keys",
}
ATTN, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
SIZE = 2


def numbers(heads: int, kv_heads: int) -> dict[str, int | None]:
    return {"heads": heads, "kv_heads": kv_heads}


def whole(heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.rand(3, count * SIZE) for count in (heads, kv_heads, kv_heads))
    gate_up = torch.rand(3, 8)
    return {
        "./in.input_ids": torch.tensor([4, 5, 6], dtype=torch.int32),
        "./logits.0": torch.rand(1, 7),
        f"{ATTN}.qkv_proj/out.0": torch.cat([q, k, v], -1),
        f"{ATTN}.attn/in.0": q,
        f"{ATTN}.attn/in.1": k,
        f"{MLP}.gate_up_proj/out.0": gate_up,
        f"{MLP}.down_proj/out.0": torch.rand(3, 5),
    }


def spread(values: dict[str, torch.Tensor], heads: int, kv_heads: int, world: int) -> list[dict[str, torch.Tensor]]:
    """Return the parts of each rank."""
    q, k, v = values[f"{ATTN}.qkv_proj/out.0"].split([heads * SIZE, kv_heads * SIZE, kv_heads * SIZE], -1)
    gate, up = values[f"{MLP}.gate_up_proj/out.0"].chunk(2, -1)
    found = []
    for rank in range(world):

        def keys(x: torch.Tensor, rank: int = rank) -> torch.Tensor:
            return x.chunk(world, -1)[rank] if kv_heads >= world else x.chunk(kv_heads, -1)[rank * kv_heads // world]

        mine = q.chunk(world, -1)[rank]
        own = {
            f"{ATTN}.qkv_proj/out.0": torch.cat([mine, keys(k), keys(v)], -1),
            f"{ATTN}.attn/in.0": mine.contiguous(),
            f"{ATTN}.attn/in.1": keys(k).contiguous(),
            f"{MLP}.gate_up_proj/out.0": torch.cat([gate.chunk(world, -1)[rank], up.chunk(world, -1)[rank]], -1),
        }
        found.append({**values, **own})
    for one in found[1:]:
        del one["./logits.0"]
    return found


def write(folder: Path, ranks: list[dict[str, torch.Tensor]], starts: tuple[int, ...] = ()) -> ServerFolder:
    for rank, values in enumerate(ranks):
        (folder / f"rank{rank}").mkdir(parents=True)
        told = [{"name": f"a-{rank}", "prompt": [4, 5, 6], "start": (starts or (0,) * 9)[rank], "length": 3}]
        facts = {"architecture": "X", "world": len(ranks), "tensor_parallel": len(ranks)}
        metadata = {"forward": json.dumps({"requests": told}), "facts": json.dumps(facts)}
        save_file(values, folder / f"rank{rank}" / "forward-000000.safetensors", metadata)
    return ServerFolder(folder)


@pytest.mark.parametrize(("heads", "kv_heads", "world"), [(4, 2, 2), (4, 1, 2), (8, 2, 4)])
def test_parts_make_the_whole(heads: int, kv_heads: int, world: int, tmp_path: Path) -> None:
    values = whole(heads, kv_heads)
    source = write(tmp_path, spread(values, heads, kv_heads, world))
    (joined,) = of_ranks(ranks_of(source), WAYS, numbers(heads, kv_heads))
    assert {one.site for one in joined.entries} == set(values)
    assert all(torch.equal(joined.tensor(one), values[one.site]) for one in joined.entries)
    (request,), skipped = Forwards(joined).requests()
    assert not skipped and request.prompt == (4, 5, 6)


def test_a_rank_with_copies_of_its_own_is_judged_too(tmp_path: Path) -> None:
    ranks = spread(whole(4, 2), 4, 2, 2)
    ranks[1][f"{MLP}.down_proj/out.0"] = ranks[1][f"{MLP}.down_proj/out.0"] + 1
    first, other = of_ranks(ranks_of(write(tmp_path, ranks)), WAYS, numbers(4, 2))
    assert other.metadata["rank"] == 1
    site = f"{MLP}.down_proj/out.0"
    both = [next(one.tensor(entry) for entry in one.entries if entry.site == site) for one in (first, other)]
    assert torch.equal(both[0] + 1, both[1])


def test_ranks_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    ranks = spread(whole(4, 2), 4, 2, 2)
    source = write(tmp_path / "starts", ranks, starts=(0, 3))
    with pytest.raises(CorruptError, match="same forwards"):
        of_ranks(ranks_of(source), WAYS, numbers(4, 2))
    source = write(tmp_path / "lost", ranks)
    (tmp_path / "lost" / "rank1" / "forward-000000.safetensors").unlink()
    with pytest.raises(CorruptError, match="recorded nothing"):
        ranks_of(source)
