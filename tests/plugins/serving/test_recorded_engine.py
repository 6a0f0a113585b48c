"""Rows of requests in dumps that do not name them: as the plug-in in vLLM says them, or left out with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glassengine.errors import CorruptError, UsageError
from glassengine.plugins.serving.recorded_engine import DescribedForwards, described
from glassengine.plugins.serving.requests import Forwards
from glassengine.recording.formats.folders import ServerFolder
from glassengine.recording.layout.layout import Entry
from glassengine.recording.layout.tensors import dtype_name
from glassengine.recording.source import open_source
from tests.serving_engines.sglang_dumps import write_dumper, write_passes

RECORDED = Path(__file__).parents[2] / "serving_engines" / "recorded" / "llama-healthy"


class Dump:
    """Forwards of (token ids, positions, lengths, places in the pool)."""

    path, complete, skipped = Path("dump"), True, ()

    def __init__(self, *forwards: tuple[list[int], list[int], list[int] | None, list[int] | None]) -> None:
        self.metadata: dict[str, object] = {}
        self._values: dict[Entry, torch.Tensor] = {}
        for step, (ids, positions, lengths, pool) in enumerate(forwards):
            given = {"input_ids": ids, "positions": positions, "seq_lens": lengths, "req_pool_indices": pool}
            values = {name: torch.tensor(value) for name, value in given.items() if value is not None}
            values["model.norm:out[0]"] = torch.tensor(positions)[:, None] + 100.0 * step
            values["model.layers.0.self_attn.q_norm"] = torch.arange(4.0 * len(ids)).reshape(2 * len(ids), 2)
            for site, value in values.items():
                entry = Entry(site, step, 0, dtype_name(value.dtype), tuple(value.shape), nbytes=value.nbytes)
                self._values[entry] = value
        self.entries = tuple(self._values)

    def tensor(self, entry: Entry) -> torch.Tensor:
        return self._values[entry]


def found(*forwards: tuple[list[int], list[int], list[int] | None, list[int] | None]) -> tuple[list[object], list[str]]:
    requests, skipped = Forwards(DescribedForwards(Dump(*forwards), "sglang")).requests()
    return [(one.prompt, one.metadata["token_ids"][0][len(one.prompt) :]) for one in requests], [
        one.reason.partition(":")[0] for one in skipped
    ]


def test_a_dump_of_sglang_has_the_rows_that_the_plug_in_says(tmp_path: Path) -> None:
    source = ServerFolder(RECORDED)
    ours, _ = Forwards(source).requests()
    dump = described(open_source(write_dumper(source, tmp_path / "dump")), "sglang")
    theirs, skipped = Forwards(dump).requests()
    assert not skipped and [one.metadata["token_ids"] for one in theirs] == [one.metadata["token_ids"] for one in ours]
    for own, other in zip(ours, theirs, strict=True):
        site = "model.layers.1.self_attn.attn/in.1"
        both = [[one.tensor(entry) for entry in one.entries if entry.site == site] for one in (own, other)]
        assert torch.equal(*(torch.cat(values) for values in both))


def test_forwards_of_sglang_leave_out_what_is_not_certain(tmp_path: Path) -> None:
    source = described(open_source(write_passes(ServerFolder(RECORDED), tmp_path / "dump")), None)
    requests, skipped = Forwards(source).requests()
    assert requests and {one.reason.partition(":")[0] for one in skipped} == {
        "which request these rows continue is not certain",
        "which tokens it begins with is not in the dump",
    }


def test_requests_of_two_lengths_are_told_apart() -> None:
    first = ([1, 2, 3, 7, 8], [0, 1, 2, 0, 1], [3, 2], None)
    decode = ([4, 9], [3, 2], [4, 3], None)
    assert found(first, decode, ([10], [3], [4], None)) == ([((1, 2, 3), [4]), ((7, 8), [9, 10])], [])


def test_requests_of_one_length_are_told_apart_by_their_order_or_not_at_all() -> None:
    first = ([1, 2, 3, 4], [0, 1, 0, 1], [2, 2], None)
    assert found(first, ([5, 6], [2, 2], [3, 3], None)) == ([((1, 2), [5]), ((3, 4), [6])], [])
    requests, skipped = found(first, ([5], [2], [3], None))
    assert requests == [((1, 2), []), ((3, 4), [])] and skipped == ["which request these rows continue is not certain"]
    # The place in the pool says it.
    first = (*first[:3], [4, 9])
    assert found(first, ([5], [2], [3], [9])) == ([((1, 2), []), ((3, 4), [5])], [])


def test_a_chunk_is_joined_and_a_prefix_of_another_is_not() -> None:
    chunks = [([1, 2], [0, 1], [2], [0]), ([3, 4], [2, 3], [4], [0]), ([5], [4], [5], [0])]
    assert found(*chunks) == ([((1, 2, 3, 4), [5])], [])
    # The next one in that place reads two tokens from the cache.
    assert found(*chunks, ([8, 9], [2, 3], [4], [0])) == (
        [((1, 2, 3, 4), [5])],
        ["which tokens it begins with is not in the dump"],
    )


def test_rows_that_follow_each_other_by_chance_are_not_joined() -> None:
    first, second = ([1, 2, 3], [0, 1, 2], None, None), ([7, 8, 9, 4], [0, 1, 2, 3], None, None)
    requests, skipped = found(first, second)
    assert requests == [((1, 2, 3), [])] and len(skipped) == 1
    assert found(([1, 2, 3], [0, 1, 2], None, None), ([4], [3], None, None)) == ([((1, 2, 3), [4])], [])


def test_heads_that_were_made_rows_are_heads_again() -> None:
    source = DescribedForwards(Dump(([1, 2, 3], [0, 1, 2], [3], None)), "sglang")
    entry = next(one for one in source.entries if one.site.endswith("q_norm/out.0"))
    assert entry.shape == (3, 2, 2) and source.tensor(entry)[1, 0].tolist() == [4.0, 5.0]


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CorruptError, match="do not fit"):
        found(([1, 2], [0, 2], [2], None))
    with pytest.raises(UsageError, match="on which tokens"):
        DescribedForwards(Dump(), "sglang")
