"""`--metrics` on every command: a report on stderr, and the same within `--json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import glassengine as glass
from glassengine.cli import main as cli
from glassengine.executable.counters import parse_metrics
from glassengine.results.metrics import MetricsReport

PROMPT = ("--input-text", "Hey, are you conscious?", "--max-new-tokens", "4")


@pytest.fixture(autouse=True)
def fresh() -> None:
    glass.metrics.reset()


@pytest.mark.parametrize("before", [True, False])
def test_report_on_stderr(engine_directory: Path, capsys: pytest.CaptureFixture[str], before: bool) -> None:
    flag = ["--metrics"]
    assert cli.main([*flag * before, "run", str(engine_directory), *PROMPT, *flag * (not before)]) == 0
    captured = capsys.readouterr()
    report = parse_metrics(captured.err)
    assert "Metric:" not in captured.out
    assert report.metric("ExecuteTime").total_samples == 4  # prefill and 3 decode steps
    assert report.counters["CachedCompile"] == 3


def test_report_within_json(engine_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(engine_directory), *PROMPT, "--json", "--metrics"]) == 0
    captured = capsys.readouterr()
    report = MetricsReport.from_dict(json.loads(captured.out)["metrics"])
    assert report.metric("ExecuteTime").total_samples == 4
    assert str(report).rstrip() in captured.err


def test_not_without_the_flag(engine_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(engine_directory), *PROMPT, "--json"]) == 0
    captured = capsys.readouterr()
    assert "metrics" not in json.loads(captured.out) and "Metric:" not in captured.err


def test_a_command_that_runs_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--metrics"]) == 0
    assert "no metrics: nothing was compiled or run, or GLASS_METRICS=0" in capsys.readouterr().err


def test_a_command_that_fails_reports_all_the_same(engine_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", str(engine_directory), *PROMPT]) == 0
    capsys.readouterr()
    assert cli.main(["run", str(engine_directory / "nowhere"), *PROMPT, "--metrics"]) == 2
    assert "Metric: ExecuteTime" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_takes_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    assert "--metrics" in capsys.readouterr().out
