"""Results are read back as they were written, and nothing else is taken for one."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.cli.documents import json_text
from glassengine.errors import CorruptError, GlassError, UsageError
from glassengine.results import Comparison, Comparisons
from glassengine.results.base import failure
from glassengine.results.stored import read_comparisons


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Return one with numbers that are not finite."""
    folder = tmp_path_factory.mktemp("dumps")
    torch.save({"a": torch.ones(4), "b": torch.arange(3.0)}, folder / "one.pt")
    torch.save({"a": torch.ones(4), "b": torch.tensor([0.0, math.inf, 5.0])}, folder / "two.pt")
    return glass.compare(folder / "one.pt", folder / "two.pt")


def written(document: dict[str, Any], folder: Path) -> Path:
    path = folder / "result.json"
    path.write_text(json_text({"schema_version": 1, **document}))
    return path


def test_a_result_is_read_as_written(found: Comparison, tmp_path: Path) -> None:
    (read,) = read_comparisons(written(found.to_dict(), tmp_path))
    assert json_text(read.to_dict()) == json_text(found.to_dict())
    assert read.pairs[1].figures is not None and math.isinf(read.pairs[1].figures.max_abs_diff)
    many = Comparisons("a", False, "wrong", (found, found), too_little=False)
    assert [one.verdict for one in read_comparisons(written(many.to_dict(), tmp_path))] == ["wrong", "wrong"]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"verdict": "fine"}, CorruptError, "is damaged"),
        ({"pairs": 3}, CorruptError, "is damaged"),
        ({"pairs": [[[[]]]]}, CorruptError, "is damaged"),
        ({"schema_version": 99}, CorruptError, "newer version"),
    ],
)
def test_other_documents_are_refused(
    found: Comparison, tmp_path: Path, change: dict[str, Any], kind: type[GlassError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        read_comparisons(written({**found.to_dict(), **change}, tmp_path))


def test_documents_of_other_things_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not of a comparison"):
        read_comparisons(written({"backends": []}, tmp_path))
    document = dataclasses.asdict(failure(GlassError("unknown model"), 2))
    with pytest.raises(UsageError, match=r"ended with an error\n.*unknown model"):
        read_comparisons(written(document, tmp_path))
    (tmp_path / "cut.json").write_text(json.dumps({"schema_version": 1})[:-1])
    with pytest.raises(CorruptError):
        read_comparisons(tmp_path / "cut.json")
