"""Who judges the cases of a check makes no difference: one process, several, or some that end too early."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.cli.main import main
from glassengine.diagnose.ladder import per_case
from glassengine.diagnose.ladder.request import CheckRequest
from glassengine.diagnose.router import route
from glassengine.errors import BackendError, UsageError
from glassengine.results import Interrupted, Policy
from glassengine.workers import Died

PORT = """
import torch
from glassengine.testing import models

def llama():
    return models.llama(num_hidden_layers=1)

def port():
    model = llama()
    model.model.layers[0].mlp.down_proj.weight.data[7] *= 2
    return model

def half():
    return llama().to(torch.bfloat16).float()
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("port") / "port.py"
    path.write_text(PORT, encoding="utf-8")
    return str(path)


class InThisProcess:
    """Workers that answer here; one of them may end without an answer."""

    died: Died | None = None

    def __init__(self, function: Any, count: int) -> None:
        self.function = function

    def run(self, requests: list[bytes], *, attempts: int) -> Iterator[bytes | Died]:
        for request in requests:
            yield self.died or self.function(request)

    def close(self) -> None:
        """Nothing is open."""


def same(one: Any, other: Any) -> bool:
    """Whether two documents are equal, with sums in another order."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12) or (one != one and other != other)
    return bool(one == other)


@pytest.mark.parametrize(
    "candidate", ["port", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "half"))]
)
def test_processes_find_what_one_finds(file: str, candidate: str) -> None:
    arguments: dict[str, Any] = {"candidate": f"{file}:{candidate}", "steps": 1, "drift": True}
    expected = glass.check(f"{file}:llama", **arguments).to_dict()
    found = glass.check(f"{file}:llama", jobs=2, **arguments).to_dict()
    assert len(expected["inputs"]) == 3 and expected["ok"] == (candidate == "llama")
    assert same(found, expected), [key for key in expected if not same(found[key], expected[key])]


def test_an_interrupt_keeps_the_cases_that_were_judged(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(per_case, "_merge", interrupted)
    with pytest.raises(Interrupted) as stopped:
        glass.check(f"{file}:llama", candidate=f"{file}:port", steps=1, jobs=2)
    assert {pair.case for pair in stopped.value.partial.pairs} == {"prompt 0"}
    assert not stopped.value.partial.ok


def test_a_worker_that_ends_is_an_error(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_case, "Processes", InThisProcess)
    monkeypatch.setattr(InThisProcess, "died", Died("killed by SIGKILL"))
    with pytest.raises(BackendError, match="killed by SIGKILL"):
        glass.check(f"{file}:llama", candidate=f"{file}:port", steps=1, jobs=2)


def test_an_error_of_a_worker_is_passed_on(file: str) -> None:
    request = CheckRequest(f"{file}:none", f"{file}:none", Policy(), jobs=2, route=route).for_workers()
    found = pickle.loads(per_case.answer(pickle.dumps((1, torch.get_num_threads(), request))))  # noqa: S301
    per_case._case = None
    assert isinstance(found, str) and found


def test_one_case_is_judged_by_one_process(
    file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(per_case, "Processes", None)
    inputs = [{"input_ids": torch.tensor([[3, 5, 7]])}]
    assert glass.check(f"{file}:llama", candidate=f"{file}:llama", steps=1, inputs=inputs, jobs=2).ok
    assert "it has one case" in caplog.text


def test_options_that_processes_cannot_share_are_refused(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = f"{file}:llama"
    assert main(["check", spec, "--jobs", "2"]) == 2
    assert "candidate that other processes can load" in capsys.readouterr().err
    with pytest.raises(UsageError, match="other processes can load"):
        glass.check(torch.nn.Linear(12, 12), candidate=spec, jobs=2)
    with pytest.raises(UsageError, match="invalid --jobs"):
        glass.check(spec, candidate=spec, jobs=0)
