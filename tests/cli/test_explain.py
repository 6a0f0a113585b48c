"""`glass explain` of a document that `--json` wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glassengine.cli.main import main


def test_a_result_and_a_tensor_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": torch.ones(4), "b": torch.ones(2)}, "one.pt")
    torch.save({"a": torch.tensor([1.0, 1.0, 2.0, 1.0]), "b": torch.ones(2)}, "two.pt")
    assert main(["compare", "one.pt", "two.pt", "--json", "r.json", "-q"]) == 1
    capsys.readouterr()
    assert main(["explain", "r.json"]) == 0
    assert capsys.readouterr().out.startswith("NOT OK")
    assert main(["explain", "r.json", "a"]) == 0
    assert "1 of 4 elements differ" in capsys.readouterr().out
    assert main(["explain", "r.json", "b"]) == 0
    assert capsys.readouterr().out.startswith("b: identical")
    assert main(["explain", "r.json", "c"]) == 2
    assert "unknown site 'c'" in capsys.readouterr().err
    assert main(["explain", "one.pt"]) == 4
