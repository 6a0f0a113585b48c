"""Forwards that SGLang dumps: a file holds the scores of the one before; nothing in it is run."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from glassengine.errors import CorruptError, UsageError
from glassengine.recording.source import open_source

ONE = "TP0_PP0_Rank0_pid77"


def write(folder: Path, *forwards: object) -> Path:
    folder.mkdir(parents=True)
    for number, values in enumerate(forwards):
        torch.save(values, folder / f"Pass{number:05d}.pt")
    return folder


def test_scores_are_of_the_forward_before(tmp_path: Path) -> None:
    layer = "model.layers.0.input_layernorm"
    first = {layer: torch.zeros(2, 3), "model.embed_tokens": torch.ones(2, 3)}
    second = {
        "logits_processor": torch.ones(1, 5),
        "model": torch.zeros(2, 3),
        layer: [torch.ones(1, 3), torch.ones(1, 3)],
    }
    write(tmp_path / "dump" / ONE, first, second)
    for path in (tmp_path / "dump", tmp_path / "dump" / ONE):
        source = open_source(path)
        found = {(one.step, one.site) for one in source.entries}
        assert found == {(0, layer), (0, "model.embed_tokens"), (0, "logits_processor"), (0, "model")} | {
            (1, f"{layer}:out[0]"),
            (1, f"{layer}:out[1]"),
        }
        scores = next(one for one in source.entries if one.site == "logits_processor")
        assert source.tensor(scores).shape == (1, 5) and source.metadata["layout"] == "sglang"


def test_ranks_are_told_apart_and_two_servers_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "dump" / ONE, {"model.norm": torch.ones(2)})
    write(tmp_path / "dump" / "TP1_PP0_Rank1_pid78", {"model.norm": torch.ones(2)})
    assert [one.rank for one in open_source(tmp_path / "dump").entries] == [0, 1]
    write(tmp_path / "dump" / "TP0_PP0_Rank0_pid79", {"model.norm": torch.ones(2)})
    with pytest.raises(UsageError, match="two servers"):
        open_source(tmp_path / "dump")


def test_a_file_that_would_run_code_or_is_none_is_refused(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path("ran").touch, ())

    folder = write(tmp_path / ONE, {"model.norm": torch.ones(2)})
    (folder / "Pass00001.pt").write_bytes(pickle.dumps(Runs()))
    with pytest.raises(CorruptError):
        open_source(folder)
    torch.save({"model.norm": Runs()}, folder / "Pass00001.pt")
    with pytest.raises(CorruptError):
        open_source(folder)
    torch.save(torch.ones(2), folder / "Pass00001.pt")
    with pytest.raises(CorruptError, match="not a forward"):
        open_source(folder)
