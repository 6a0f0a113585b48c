"""The ways in which people write that a script runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from glassengine.cli.main import main
from glassengine.cli.script_line import ScriptLine, read_script_line
from glassengine.errors import UsageError


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x.py -a", ScriptLine("x.py", ("-a",))),
        ("-m pkg.mod a", ScriptLine("pkg.mod", ("a",), is_module=True)),
        ("python x.py a", ScriptLine("x.py", ("a",))),
        ("python3.11 -u -W error -X dev -Wonce x.py -u", ScriptLine("x.py", ("-u",))),
        ("python3 -m mod -a", ScriptLine("mod", ("-a",), is_module=True)),
        ("python -uB no-ending a", ScriptLine("no-ending", ("a",))),
        ("model.onnx", None),
        ("python", None),
        ("some/model", None),
    ],
)
def test_f41_lines_that_run_a_script(line: str, expected: ScriptLine | None) -> None:
    assert read_script_line(line.split()) == expected


def test_f41_this_python_by_its_path_and_others() -> None:
    assert read_script_line([sys.executable, "x.py"]) == ScriptLine("x.py", ())
    with pytest.raises(UsageError, match="/opt/other/bin/python -m glassengine record"):
        read_script_line(["/opt/other/bin/python", "x.py"])


@pytest.mark.parametrize(
    ("line", "said"), [("python -c pass", "script.py"), ("torchrun x.py", "torchrun ... -m glass")]
)
def test_f41_lines_that_cannot_be_recorded(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_script_line(line.split())


def test_f41_scripts_without_an_ending(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train"
    script.write_text("#!/usr/bin/env python3\nimport torch\ntorch.nn.ReLU()(torch.ones(2))\n")
    assert read_script_line([str(script), "a"]) == ScriptLine(str(script), ("a",))
    assert main(["record", "-o", str(tmp_path / "out"), "--", "python", str(script)]) == 0
    assert "glass show" in capsys.readouterr().err
    script.write_text("#!/bin/sh\n")
    assert read_script_line([str(script)]) is None
