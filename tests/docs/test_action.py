"""The composite action: its script runs, passes the exit status on, and obeys no text of its inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml


@pytest.fixture(scope="module")
def action() -> Any:
    return yaml.safe_load((Path(__file__).parents[2] / "action.yml").read_text(encoding="utf-8"))


def run(action: Any, folder: Path, **inputs: str) -> tuple[int, dict[str, str], str]:
    """Run the step that compares, with a stand-in for `glass`; returns status, outputs, and what was printed."""
    (step,) = [step for step in action["runs"]["steps"] if step.get("id") == "glass"]
    defaults = {name: given.get("default", "") for name, given in action["inputs"].items()} | inputs
    words = {name: text.strip("${} ").removeprefix("inputs.") for name, text in step["env"].items()}
    variables = {name: defaults[word] for name, word in words.items()}
    files = {name: folder / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
    own = folder / "bin"
    own.mkdir(exist_ok=True)
    (own / "glass").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m glassengine "$@"\n')
    (own / "glass").chmod(0o755)
    surroundings = {
        "PATH": f"{own}:/usr/bin:/bin",
        "PYTHONPATH": ":".join(sys.path),
        "OMP_NUM_THREADS": "1",
        **variables,
        **{name: str(path) for name, path in files.items()},
    }
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", step["run"]],
        cwd=folder,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = files["GITHUB_OUTPUT"].read_text().splitlines() if files["GITHUB_OUTPUT"].exists() else []
    return done.returncode, dict(line.split("=", 1) for line in lines), done.stdout + done.stderr


def test_a_difference_fails_with_both_documents_and_a_summary(action: Any, tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4)}, tmp_path / "one.pt")
    torch.save({"a": torch.zeros(4)}, tmp_path / "two.pt")
    hostile = "; touch stolen; $(touch stolen)"
    status, outputs, printed = run(
        action, tmp_path, command="compare", baseline="one.pt", candidate="two.pt", arguments="--rtol=1e-3\n\n"
    )
    assert (status, outputs["ok"], outputs["exit-status"]) == (1, "false", "1"), printed
    assert (tmp_path / outputs["sarif"]).is_file() and (tmp_path / outputs["json"]).is_file()
    assert "NOT OK" in (tmp_path / "github_step_summary").read_text()
    # Inputs are words, whatever they hold.
    status, outputs, printed = run(
        action, tmp_path, command="compare", baseline=hostile, candidate="--help", arguments=f"--map={hostile}"
    )
    assert status == 2 and not (tmp_path / "stolen").exists(), printed


def test_outputs_are_those_of_the_step(action: Any) -> None:
    values = [output["value"] for output in action["outputs"].values()]
    assert all(value.startswith("${{ steps.glass.outputs.") for value in values)
    # What a workflow gives never becomes text of a script.
    assert not any("${{" in step["run"] for step in action["runs"]["steps"])
