"""Engines side by side, build artifacts and series of watched runs have a page too, without tensors."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glassengine.compare.series import compare_series
from glassengine.errors import UsageError
from glassengine.recording.series import MEASURED, NONFINITE, SeriesLog
from glassengine.report.page.write import write_report
from glassengine.results import (
    ArtifactComparison,
    EngineColumn,
    SideBySide,
    StageComparison,
    StepDifference,
    TokenDifference,
)
from glassengine.results.backends import Change, Difference
from tests.report.made_results import figures

NAME = "<img src=x onerror=alert(1)>"


def engines(agreement: Any = "beyond") -> SideBySide:
    def step(number: int, agreement: Any) -> StepDifference:
        return StepDifference(number, agreement, "noise floor", 0.5, 3.0, figures(0.25))

    known: dict[str, Any] = {"model": "m", "dtype": "float32", "added_outputs": (), "options": {}}
    known |= {"total_bytes": 3 << 20, "executable_bytes": 1000, "weights_bytes": 2000, "prefill_ms": 3.0}
    steps = (step(0, "bitwise"), step(1, "within rounding"), step(2, agreement))
    other = TokenDifference(2, 0, 7, 8, 0.1, 0.2)
    columns = (
        EngineColumn("a/one", backend="eager", decode_ms=1.0, **known),
        EngineColumn(
            f"b/{NAME}", backend="inductor", decode_ms=2.0, steps=steps, num_different_tokens=1,
            first_different_token=other, agreement=agreement, **known,
        ),
    )  # fmt: skip
    return SideBySide(
        columns, agreement != "beyond", agreement, ((1, 2),), ((5, 6, 7),), 5, 1, "a processor", ("note",)
    )


def artifacts(**more: Any) -> ArtifactComparison:
    told: dict[str, Any] = {"ok": False, "complete": True, "files": ("plugin.txt",), "notes": ()}
    change = Change("changed", f"mul: {NAME}", "mul: other", ("mlp/mul.0",))
    told["stages"] = (StageComparison("exported", "identical", ()), StageComparison("fused", "different", (change,)))
    told["differences"] = (Difference("dtype", "float32", None),)
    return ArtifactComparison("a", "b", **{**told, **more})


def runs(folder: Path, *, parts: bool = True) -> tuple[Path, Path]:
    for name in ("one", "two"):
        (folder / name).mkdir()
        log = SeriesLog(folder / name)
        log.column("loss", "number")
        log.column(NAME, "norm")
        for at in range(64):
            factor = 50.0 if parts and name == "two" and at >= 40 else 1.0
            values = np.array([math.exp(-at / 8), factor * (1 + 0.01 * (at % 3))], dtype=np.float32)
            states = np.array([NONFINITE if at == 20 else MEASURED, MEASURED], dtype=np.uint8)
            log.row(at, 0.0, states, values, [(0, -1, 0.0)] if at == 20 else [])
        log.close()
    return folder / "one", folder / "two"


def page_of(result: Any, folder: Path, **more: Any) -> str:
    """Return the page, which is the same from memory and from a document, and is one file."""
    (folder / "result.json").write_text(json.dumps(result.to_dict()))
    written = write_report(result, folder / "m", **more)
    write_report(folder / "result.json", folder / "f", **more)
    text = (folder / "m/index.html").read_text()
    assert text == (folder / "f/index.html").read_text() and [path.name for path in (folder / "m").iterdir()] == [
        "index.html"
    ]
    assert (written.ok, written.num_tensors, written.num_files) == (result.ok, 0, 1)
    assert NAME not in text and 'id="map"' not in text
    return text


def test_engines(tmp_path: Path) -> None:
    text = page_of(engines(), tmp_path)
    assert "are beyond rounding, first in step 2." in text and "NOT OK" in text
    chips = re.findall(r'<span class="chip (\w+)">([^<]*)', text)
    size = "max abs 0.25, 3 roundings, noise ratio 0.5"
    assert chips == [("identical", "bitwise equal"), ("rounding", size), ("wrong", size)]
    for words in ("8 instead of 7", "3.0 MiB", "1 of 3 differ", "a processor", "note"):
        assert words in text
    (tmp_path / "ok").mkdir()
    assert "Logits are within rounding." in page_of(engines("within rounding"), tmp_path / "ok")


def test_artifacts(tmp_path: Path) -> None:
    text = page_of(artifacts(), tmp_path)
    assert "Different: first in stage fused, different." in text
    assert re.findall(r'<span class="chip (\w+)">(\w+)', text) == [("identical", "identical"), ("wrong", "different")]
    for words in ("mul: other", "mlp/mul.0", "plugin.txt", "float32", "none"):
        assert words in text
    with pytest.raises(UsageError, match="not those of the result"):
        write_report(artifacts(), tmp_path / "x", recordings=["a", "b"])


def test_series_with_their_curves(tmp_path: Path) -> None:
    one, two = runs(tmp_path)
    result = compare_series(one, two)
    text = page_of(result, tmp_path, recordings=[one, two])
    assert "first, in step 40." in text and "logarithmic" in text
    parted = [float(x) for x in re.findall(r'class="parting" x1="([\d.]+)"', text)]
    assert parted == [pytest.approx(600 * 40 / 63, abs=0.1)]
    (tmp_path / "without").mkdir()
    without = page_of(result, tmp_path / "without")
    assert "<polyline" not in without and "--recordings BASELINE" in without


def test_runs_that_do_not_part_show_their_series_with_gaps(tmp_path: Path) -> None:
    one, two = runs(tmp_path, parts=False)
    text = page_of(compare_series(one, two), tmp_path, recordings=[one, two])
    # Of the loss two pieces on each side: one number is not finite.
    assert len(re.findall('<polyline class="of-baseline"', text)) == 3 and 'class="parting"' not in text
    assert "nan" not in "".join(re.findall(r'points="([^"]*)"', text))
