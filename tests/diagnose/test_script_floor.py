"""The floor of a recorded script: what rounding explains, and nothing where the script is another one each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import glassengine as glass
from glassengine.capture.run_script import record_script
from glassengine.compare.compare import compare
from glassengine.diagnose import script_floor
from glassengine.diagnose.noise_floor import otherwise
from glassengine.diagnose.script_floor import HOW, main, measure_script_floor
from glassengine.errors import GlassError
from glassengine.recording.layout.noise_floor import FILE, read_noise_floor

RIGHT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
x = torch.randn(8, 64)
for step in range(2):
    model(x + step)
"""
# As a script of one rank sets what its process group asks for.
SETS = "import os\nassert 'OWN' not in os.environ\nos.environ['OWN'] = '1'\n"
UNSEEDED = RIGHT.replace("torch.manual_seed(0)", "")
COUNTS = RIGHT.replace(
    "for step in range(2)",
    """from pathlib import Path
runs = Path(__file__).with_name("runs")
runs.write_text(runs.read_text() + "." if runs.exists() else ".")
for step in range(len(runs.read_text()))""",
)
LATER = COUNTS.replace("len(runs.read_text())", "2").replace(
    "x + step", "x + step + 1e-6 * (len(runs.read_text()) > 2)"
)
# All words are equally likely, up to rounding, and the likeliest is the next one.
GREEDY = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 50, bias=False))
model[1].weight.data[:] = model[1].weight.data[:1].clone()
word = torch.tensor([3])
for step in range(3):
    word = model(word).argmax(-1)
"""
RANKS = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
rank = dist.get_rank()
if rank and os.environ.get("UNSEEDED"):
    torch.seed()
for step in range(2):
    model(torch.randn(4, 64) + rank).sum().backward()
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Runs again are in this process: a child takes seconds to start."""
    if "slow" not in request.keywords:
        import json

        monkeypatch.setattr(script_floor, "_run", lambda asked, *_: main([json.dumps(asked)]))


def measured(folder: Path, text: str) -> Path:
    """Record a script and measure the floor of its one model; return where that is."""
    script, target = folder / "script.py", folder / "run"
    script.write_text(text, encoding="utf-8")
    found = record_script(script, path=target)
    options: dict[str, Any] = {"sites": None, "steps": None, "byte_budget": None}
    where = {"path": target, "directory": folder, "is_module": False, "options": options}
    measure_script_floor(str(script), [], recordings=found.recordings, **where)
    return target / "Sequential"


def test_rounding_is_explained_and_a_mistake_is_not(tmp_path: Path) -> None:
    run = measured(tmp_path, RIGHT)
    floor = read_noise_floor(run)
    assert floor is not None and floor.how == HOW
    with otherwise(7):
        record_script(tmp_path / "script.py", path=tmp_path / "other")
    other = compare(run, tmp_path / "other/Sequential")
    assert other.ok and other.counts["rounding"] and not other.counts["suspicious"]
    assert {pair.judged_by for pair in other.pairs if pair.verdict == "rounding"} == {"noise floor"}
    # An error that a tolerance lets pass.
    (tmp_path / "planted.py").write_text(RIGHT.replace("for step", "model[2].bias.data += 2e-6\nfor step"))
    record_script(tmp_path / "planted.py", path=tmp_path / "wrong")
    wrong = compare(run, tmp_path / "wrong/Sequential")
    assert not wrong.ok and wrong.first_divergence is not None and wrong.first_divergence.site == "2"
    (run / FILE).unlink()
    assert compare(run, tmp_path / "wrong/Sequential").ok


@pytest.mark.parametrize(
    ("text", "what", "got"),
    [
        (UNSEEDED, "differ by more than rounding", "has another value"),
        (COUNTS, "differ by more than rounding", "step"),
        (LATER, "differ by more than rounding", "has another value"),
        (GREEDY, "gives its model other data", "step 1"),
    ],
    ids=["unseeded", "another number of steps", "others after the first repeat", "its own words"],
)
def test_a_floor_that_would_hide_mistakes_is_refused(tmp_path: Path, text: str, what: str, got: str) -> None:
    with pytest.raises(GlassError, match=what) as raised:
        measured(tmp_path, text)
    assert got in str(raised.value.got)
    assert not list(tmp_path.rglob(FILE))


def test_what_cannot_be_rounded_otherwise_has_no_floor(tmp_path: Path) -> None:
    exact = RIGHT.replace("x + step", "x").replace("Linear(64, 64)", "Identity()").replace("Tanh", "ReLU")
    with pytest.raises(GlassError, match="nothing was rounded otherwise"):
        measured(tmp_path, exact)


@pytest.mark.slow
def test_a_script_on_the_command_line(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "glassengine", "record", "--noise-floor", "-o"]
    for name, text in (("right", SETS + RIGHT), ("unseeded", UNSEEDED)):
        (tmp_path / f"{name}.py").write_text(text)
        command = [*line, name, "--", f"{name}.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == (name == "unseeded"), done.stderr
        assert ("two runs of the script differ" in done.stderr) == (name == "unseeded")
        assert (tmp_path / name / "Sequential" / FILE).exists() == (name == "right")


@pytest.mark.slow
@pytest.mark.parametrize("unseeded", [False, True])
def test_a_script_of_two_ranks(tmp_path: Path, unseeded: bool) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29731"]
    command = [*torchrun, "-m", "glassengine", "record", "--noise-floor", "--gradients", "-o", "run", "--", "ranks.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "UNSEEDED": "1" if unseeded else ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    floors = sorted(path.parent.parent.name for path in (tmp_path / "run").rglob(FILE))
    assert (done.returncode != 0) == unseeded, done.stderr
    # Gradients are averaged: what one rank draws is in those of both.
    assert len(floors) == (0 if unseeded else 2)
    if not unseeded:
        (run,) = {path.parent.parent for path in (tmp_path / "run").rglob(FILE)}
        assert glass.compare(run, run).ok
