"""Ctrl-C and SIGTERM during a check: what was found until then is told, as incomplete, with status 130."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

import glassengine as glass
from glassengine.cli import options
from glassengine.cli.main import main
from glassengine.plugins.quantized import check as quantized_check
from glassengine.plugins.quantized import effects
from glassengine.progress import Work
from glassengine.results import Interrupted
from glassengine.testing import models
from tests.quantized import save_quantized

NETS = """
import os, signal
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, stops=None, number=0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.stops, self.number, self.called = nn.Linear(6, 8), nn.Linear(8, 3), stops, number, 0

    def forward(self, x):
        if self.stops is not None and not torch.compiler.is_exporting() and float(x[0, 0]) == self.number:
            os.kill(os.getpid(), self.stops)
        return self.last(torch.relu(self.first(x)))

def net():
    return Net().eval()

def stopped():
    return Net(signal.SIGINT, 3.0).eval()

def terminated():
    return Net(signal.SIGTERM, 3.0).eval()

def wrong_and_stopped():
    net = stopped()
    net.first.weight.data *= 1.5
    return net

def inputs():
    steps = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    for number, step in enumerate(steps):
        step[0, 0] = number
    return [{"x": step} for step in steps]
"""


@pytest.fixture
def nets(tmp_path: Path) -> str:
    (tmp_path / "nets.py").write_text(NETS)
    return str(tmp_path / "nets.py")


class Stops:
    """Interrupts when work says that a step was judged."""

    def __init__(self, number: int, signal_number: int = signal.SIGINT) -> None:
        self.number, self.signal_number = number, signal_number

    def __call__(self, event: object) -> None:
        if getattr(event, "done", 0) == self.number:
            os.kill(os.getpid(), self.signal_number)
            time.sleep(0.1)


@pytest.mark.parametrize("name", ["stopped", "terminated"])
def test_f70_an_interrupted_check_tells_what_it_found(
    name: str, nets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    number = signal.SIGTERM if name == "terminated" else signal.SIGINT
    stop, real = Stops(3, number), glass.check

    def check(*args: object, progress: object, **more: object) -> object:
        def both(event: object) -> None:
            progress(event)  # type: ignore[operator]
            stop(event)

        return real(*args, progress=both, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(glass, "check", check)
    file = tmp_path / "found.json"
    command = ["check", f"{nets}:net", "--candidate", f"{nets}:net", "--inputs", f"{nets}:inputs", "--json", str(file)]
    assert main(command) == 130
    shown, found = capsys.readouterr(), json.loads(file.read_text())
    assert "NOT OK: too little was judged: interrupted: 3 of 5 steps were begun" in shown.out
    assert "candidate" in shown.out and "interrupted: the answer is of what was judged until then" in shown.err
    assert found["ok"] is False and found["pairs"] and found["results"] and len(found["levels"]) >= 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_f70_a_mistake_that_was_found_is_told(nets: str) -> None:
    with pytest.raises(Interrupted) as caught:
        glass.check(f"{nets}:net", candidate=f"{nets}:wrong_and_stopped", inputs=f"{nets}:inputs", progress=Stops(2))
    found = caught.value.partial
    assert found.standing == "results differ" and found.first_divergence is not None
    assert found.first_divergence.site == "first/linear.0" and "2 of 5 steps" in (found.not_ok_because or "")
    assert not found.ok and not found.too_little


def test_f70_the_ladder_keeps_its_levels(nets: str) -> None:
    with pytest.raises(Interrupted) as caught:
        glass.check(f"{nets}:net", backend="eager", inputs=f"{nets}:inputs", progress=Stops(1))
    assert {"program", "engine", "release"} <= {level.name for level in caught.value.partial.levels}


def test_f70_weights_that_were_judged_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "base"
    models.llama(num_hidden_layers=1).save_pretrained(base)
    save_quantized(models.llama(num_hidden_layers=1), tmp_path / "quantized", "gptq")
    real, calls = effects.difference, []

    def difference(*outcomes: effects.Outcome) -> dict[str, object]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*outcomes)

    assert quantized_check  # imported before, so that it keeps its own function
    monkeypatch.setattr(effects, "difference", difference)
    command = ["check", str(base), "--candidate", str(tmp_path / "quantized"), "--steps", "0"]
    assert main([*command, "--json", str(tmp_path / "found.json")]) == 130
    found = json.loads((tmp_path / "found.json").read_text())
    assert "2 of 7 weights were run alone" in found["not_ok_because"] and not found["ok"]
    assert len(found["quantization"]["weights"]) == 7 and found["results"]
    assert "NOT OK" in capsys.readouterr().out


def test_f70_before_anything_was_found_the_stage_is_named(
    nets: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("glassengine.diagnose.check_ladder.load_model", interrupted)
    assert main(["check", f"{nets}:net", "--json"]) == 130
    shown = capsys.readouterr()
    assert "interrupted while loading the baseline\n" in shown.err
    assert json.loads(shown.out)["exit_status"] == 130


def test_f70_long_work_says_that_it_goes_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "PATIENCE_S", 0.2)
    options.reset()
    with options.stages(()) as progress:
        progress(Work.COMPILING.says("compiling"))
        time.sleep(0.8)
    assert capsys.readouterr().err.count("still compiling, ") >= 2
    options.settings.quiet = True
    with options.stages(()) as progress:
        progress(Work.COMPILING.says("compiling"))
        time.sleep(0.5)
    assert capsys.readouterr().err == ""
    options.reset()


def test_f70_a_check_that_is_not_interrupted_is_ok(nets: str) -> None:
    assert glass.check(f"{nets}:net", candidate=f"{nets}:net", inputs=f"{nets}:inputs").ok
