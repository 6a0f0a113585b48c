"""`glass report`, and `--report DIR` of the commands that judge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from glassengine.cli import main as cli
from tests.report.made_results import comparison
from tests.report.test_without_tensors import runs


@pytest.fixture
def records(tmp_path: Path) -> tuple[str, str]:
    for name, factor in (("base", 1.0), ("other", 1.01)):
        torch.save({"layers.0.up": torch.ones(2, 8), "layers.1.up": torch.ones(2, 8) * factor}, tmp_path / f"{name}.pt")
    return str(tmp_path / "base.pt"), str(tmp_path / "other.pt")


def test_a_document_becomes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document, target = tmp_path / "result.json", tmp_path / "report"
    document.write_text(json.dumps(comparison().to_dict()))
    assert cli.main(["report", str(document), "-o", str(target)]) == 0
    assert f"report: {target / 'index.html'} (96 tensors" in capsys.readouterr().out
    assert cli.main(["report", str(document), "-o", str(target), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"] == str(target / "index.html") and found["num_tensors"] == 96 and found["ok"] is False
    assert found["total_bytes"] == sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def test_compare_writes_a_report_with_values_beside_its_answer(
    tmp_path: Path, records: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report"
    assert cli.main(["compare", *records, "--report", str(target)]) == 1
    shown = capsys.readouterr()
    assert "NOT OK" in shown.out and f"report: {target / 'index.html'}" in shown.err
    assert (target / "data/values-0.js").is_file()
    assert "The first wrong tensor is layers.1.up" in (target / "index.html").read_text()
    # A second candidate: a page each.
    assert cli.main(["compare", *records, records[0], "--report", str(target), "-q"]) == 1
    assert (target / "1/data/values-0.js").is_file() and "report:" not in capsys.readouterr().err


def test_watched_runs_have_a_report_with_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = map(str, runs(tmp_path))
    document, target = tmp_path / "result.json", tmp_path / "report"
    assert cli.main(["compare", one, two, "--report", str(target), "--json", str(document)]) == 1
    assert f"report: {target / 'index.html'} (0.1 MB in 1 file)" in capsys.readouterr().err
    assert "<polyline" in (target / "index.html").read_text()
    line = ["report", str(document), "-o", str(target)]
    assert cli.main([*line, "--recordings", one, "--recordings", two]) == 0
    assert "<polyline" in (target / "index.html").read_text()
    assert cli.main([*line, "--recordings", one]) == 2
    assert "not those of the result" in capsys.readouterr().err


def test_a_result_with_its_recordings_shows_values(
    tmp_path: Path, records: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    document, target = tmp_path / "result.json", tmp_path / "report"
    assert cli.main(["compare", *records, "-q", "--json", str(document)]) == 1
    line = ["report", str(document), "-o", str(target)]
    assert cli.main([*line, "--recordings", records[0], "--recordings", records[1], "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n{")[2].join(["{", ""]))["num_with_values"] == 1


@pytest.mark.parametrize(
    "line",
    ["compare a b", "check model", "check-training model --candidate other", "replay snapshot"],
)
def test_a_place_that_is_taken_is_refused_before_any_work(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/thesis.txt").touch()
    (tmp_path / "snapshot").mkdir()
    assert cli.main([*line.split(), "--report", "taken"]) == 2
    assert "a report replaces only a report" in capsys.readouterr().err


NETS = """
import torch

class Net(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.scale = torch.nn.Linear(8, 8), scale

    def forward(self, x):
        return torch.relu(self.fc(x)) * self.scale

def right(): return Net(0.5).eval()
def wrong(): return Net(0.6).eval()
def inputs(): return {"x": torch.linspace(-1, 1, 32).reshape(4, 8)}
"""


def test_check_writes_a_report_with_both_lines_and_the_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(NETS)
    line = ["check", "nets.py:right", "--candidate", "nets.py:wrong", "--inputs", "nets.py:inputs", "-q"]
    assert cli.main([*line, "--report", "report", "--json=result.json"]) == 1
    page = (tmp_path / "report/index.html").read_text()
    assert "./mul.0" in page and page.count("nets.py:11") >= 1 and "* self.scale" in page
    assert "0.5" in page and "0.6" in page
    details = (tmp_path / "report/data/details-0.js").read_text()
    assert '"values":{"worst":[{"index":[' in details
    # The document alone makes the same page.
    assert cli.main(["report", "result.json", "-o", "again"]) == 0
    for name in ("data/details-0.js", "data/rows-0.js"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "report" / name).read_bytes()
