"""Whatever a file says is shown, and nothing of it is obeyed: on the screen, and as JSON, which is JSON always."""

import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from glassengine.cli.documents import json_text
from glassengine.cli.main import main
from glassengine.cli.run import _write
from glassengine.engine.build.artifacts import shown
from glassengine.recording.layout.layout import LeftOut
from glassengine.recording.write.writer import RecordingWriter

EVIL = "a\x1b[31m\x1b]0;title\x07\u202ecba\x9b2J\x85\u2028\r\x7f"
X = torch.tensor([1.0, 2.0])


def recording(path: Path, by: float = 0.0) -> Path:
    metadata = {
        "modules": {"": EVIL, EVIL: EVIL},
        "not_seen": {EVIL: EVIL},
        "sources": {EVIL: EVIL},
        "class": EVIL,
        "environment": {EVIL: EVIL},
        "aliases": {EVIL + "x": EVIL},
    }
    with RecordingWriter(path, metadata=metadata) as w:
        w.write(EVIL, 0, X + by, node=EVIL)
        w.leave_out(LeftOut(EVIL + "2", 0, 0, f"{EVIL}\n{EVIL}"))
        w.commit(0, stopped=EVIL)
    return path


def pickled(path: Path, by: float = 0.0) -> Path:
    torch.save({EVIL: X + by, "b": {EVIL: EVIL}, EVIL + "2": torch.ones(3)}, path.with_suffix(".pt"))
    return path.with_suffix(".pt")


def arrays(path: Path, by: float = 0.0) -> Path:
    np.savez(path.with_suffix(".npz"), **{EVIL.replace("/", "."): (X + by).numpy(), "text": np.array([EVIL])})
    return path.with_suffix(".npz")


def run_results(path: Path, by: float = 0.0) -> Path:
    tree = {"module_path": EVIL, "inputs": None, "outputs": {"shape": EVIL, "value": [EVIL]}, "children": []}
    path = path.with_suffix(".json")
    path.write_text(json.dumps(tree))
    return path


def map_file(path: Path, by: float = 0.0) -> Path:
    path = path.with_suffix(".json")
    path.write_text(json.dumps({EVIL: EVIL, "rules": [{"baseline": EVIL, "candidate": [EVIL], EVIL: EVIL}]}))
    return path


KINDS = [recording, pickled, arrays, run_results, map_file]


@pytest.mark.parametrize("make", KINDS)
def test_s14_nothing_that_a_file_says_is_obeyed(
    make: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = make(tmp_path / f"x{EVIL[:3]}"), make(tmp_path / "y", 0.5)
    good = recording(tmp_path / "good")
    for command in (
        ["show", ours],
        ["show", ours, "--json"],
        ["show", ours, "*", "--values"],
        ["show", ours, EVIL],
        ["show", ours, "no" + EVIL],
        ["compare", ours, theirs],
        ["compare", ours, theirs, "--json"],
        ["compare", good, theirs, "--show-only", EVIL],
        ["compare", good, good, "--map", ours],
        ["sites", ours],
        ["sites", ours, "--json"],
        ["snapshot", "show", ours],
        ["run", ours, "--input-text", EVIL],
        ["replay", ours],
    ):
        status = main([str(part) for part in command])
        told = capsys.readouterr()
        assert status != 70, (command, told.err)
        text = told.out + told.err
        assert not [char for char in set(text) if not char.isprintable() and char not in "\n\t"], (command, text)
        if "--json" in command:
            json.loads(told.out)


def test_s14_json_is_json_whatever_is_in_it() -> None:
    document = {"a": [math.nan, math.inf, -math.inf, 1.5], "b": (EVIL, "\ud800", "\U000e0001"), "c": {"d": None}}
    text = json_text(document)
    assert all(char.isprintable() or char == "\n" for char in text)
    found = json.loads(text)
    assert found["a"] == ["nan", "inf", "-inf", 1.5] and found["b"][0] == EVIL
    # The counterpart: what can be printed stays readable.
    assert "\u4e2d\u6587 \u00fc" in json_text({"x": "\u4e2d\u6587 \u00fc"})


def test_s14_artifacts_can_be_printed() -> None:
    text = shown(f"name {EVIL} \ud800\n\tline")
    assert text.endswith("\n\tline") and text.replace("\n", "").replace("\t", "").isprintable()
    text.encode()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_s14_what_a_model_writes_is_escaped_on_a_terminal_only(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    screen: Any = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    _write(f"{EVIL}\nnext")
    written = screen.getvalue()
    assert ("\x1b" in written) != is_terminal and written.endswith("\nnext")
