"""Rows of a server's forwards by request: chunks, several requests, what is read from the prefix cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from glassengine.errors import CorruptError, UsageError
from glassengine.plugins.serving.requests import Forwards, of_ranks
from glassengine.recording.formats.folders import ServerFolder, ranks_of
from glassengine.recording.source import open_source

Part = tuple[str, int, int]
A, B = [3, 4, 5, 6, 7], [3, 4, 9]


def written(folder: Path, forwards: list[list[Part]], tokens: dict[str, list[int]], **facts: object) -> Path:
    """Write forwards whose values are 100 times the number of the forward, and the position."""
    (folder / "rank0").mkdir(parents=True)
    prompts = {"a": A, "b": B}
    for number, parts in enumerate(forwards):
        ids = [token for name, start, length in parts for token in tokens[name][start : start + length]]
        places = [float(at) for _, start, length in parts for at in range(start, start + length)]
        values = {
            "./in.input_ids": torch.tensor(ids, dtype=torch.int32),
            "model.layers.0.mlp/out.0": torch.tensor(places)[:, None] + 100.0 * number,
            "./logits.0": torch.tensor([[1000.0 * number + row] for row in range(len(parts))]),
            "not_rows": torch.zeros(1),
        }
        told = [{"name": n, "prompt": prompts[n], "start": s, "length": length} for n, s, length in parts]
        metadata = {"forward": json.dumps({"requests": told}), "facts": json.dumps({"architecture": "X", **facts})}
        save_file(values, folder / "rank0" / f"forward-{number:06d}.safetensors", metadata)
    return folder


def by_site(source: object, site: str) -> list[list[float]]:
    return [source.tensor(one).flatten().tolist() for one in source.entries if one.site == site]  # type: ignore[attr-defined]


def test_chunks_and_rows_of_others_become_steps(tmp_path: Path) -> None:
    tokens = {"a": [*A, 20, 21], "b": [*B, 30, 31]}
    forwards = [[("a", 0, 3)], [("a", 3, 2), ("b", 0, 3)], [("b", 3, 1), ("a", 5, 1)]]
    source = open_source(written(tmp_path / "f", forwards, tokens))
    assert isinstance(source, ServerFolder)
    (a, b), skipped = Forwards(source).requests()
    assert not skipped and a.prompt == tuple(A)
    assert a.metadata["token_ids"] == [[*A, 20]] and b.metadata["token_ids"] == [[*B, 30]]
    assert by_site(a, "model.layers.0.mlp/out.0") == [[0, 1, 2, 103, 104], [205]]
    assert by_site(b, "model.layers.0.mlp/out.0") == [[100, 101, 102], [203]]
    # Of logits the server has the last row of each request alone.
    assert by_site(a, "./logits.0") == [[0, 1000], [2001]] and by_site(b, "./logits.0") == [[1001], [2000]]
    assert not by_site(a, "not_rows")[1:]


def test_what_was_in_the_prefix_cache_is_found_where_it_was_computed(tmp_path: Path) -> None:
    tokens = {"a": A, "b": [*B, 30]}
    folder = written(tmp_path / "f", [[("a", 0, 5)], [("b", 2, 1)], [("b", 3, 1)]], tokens)
    (_, b), skipped = Forwards(ServerFolder(folder)).requests()
    assert not skipped and by_site(b, "model.layers.0.mlp/out.0") == [[0, 1, 102], [203]]


def test_a_request_whose_beginning_was_not_recorded_is_listed(tmp_path: Path) -> None:
    folder = written(tmp_path / "f", [[("a", 2, 3)], [("b", 0, 1)]], {"a": A, "b": B})
    found, skipped = Forwards(ServerFolder(folder)).requests()
    assert not found
    assert [one.reason.split(" of its")[0] for one in skipped] == ["2 tokens", "its prompt was not read to the end"]


def test_unseen_requests_are_named_with_the_remedy(tmp_path: Path) -> None:
    compiled = ServerFolder(written(tmp_path / "c", [[("a", 0, 5)]], {"a": A}, compiled=True))
    with pytest.raises(UsageError, match="compiled"):
        Forwards(compiled)
    ranks = ServerFolder(written(tmp_path / "r", [[("a", 0, 5)]], {"a": A}, world=2))
    with pytest.raises(UsageError, match="in parts"):
        Forwards(ranks)


@pytest.mark.parametrize("part", [{"name": "a"}, {"name": "a", "prompt": A, "start": 0, "length": 9}, 5])
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, part: object) -> None:
    (tmp_path / "f" / "rank0").mkdir(parents=True)
    metadata = {"forward": json.dumps({"requests": [part]}), "facts": "{}"}
    values = {"./in.input_ids": torch.tensor(A)}
    save_file(values, tmp_path / "f" / "rank0" / "forward-000000.safetensors", metadata)
    with pytest.raises(CorruptError, match="rows of requests"):
        Forwards(ServerFolder(tmp_path / "f"))


def test_a_header_that_is_not_the_plug_ins_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank0").mkdir()
    save_file({"x": torch.zeros(1)}, tmp_path / "rank0" / "forward-000000.safetensors", {"facts": "["})
    with pytest.raises(CorruptError, match="not a forward"):
        open_source(tmp_path)


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
