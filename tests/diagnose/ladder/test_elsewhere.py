"""Who replays a record makes no difference: this process, others that answer in bytes, or some that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import glassengine as glass
from glassengine import commands
from glassengine.cli.main import main
from glassengine.diagnose.ladder import elsewhere, helper
from glassengine.errors import UsageError
from glassengine.judge.replay.foretold import HelpedReplay, Mask
from glassengine.testing import models
from glassengine.workers import Died, pipe, processes

PROMPTS = [[17, 200, 9, 33, 41], [5, 91, 14, 3, 77, 120, 250, 8]]
NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(12, 16), torch.nn.Linear(16, 4)
    def forward(self, x):
        return self.last(torch.tanh(self.first(x)).softmax(-1))

def net():
    return Net().eval()
"""


def model_file(directory: Path) -> str:
    (directory / "net.py").write_text(NET, encoding="utf-8")
    return f"{directory / 'net.py'}:net"


def recorded(directory: Path, *, steps: int = 3, factor: float = 1.0) -> Path:
    """What the model recorded, with its first weights so much larger."""
    values: dict[str, Any] = {}
    exec(NET, values)
    net = values["net"]()
    with torch.no_grad():
        net.first.weight.mul_(factor)
    x = torch.randn(steps, 5, 12, generator=torch.Generator().manual_seed(3))
    with glass.record(net, directory / "run"), torch.no_grad():
        for one in x:
            net(one)
    return directory / "run"


class Pool:
    """Answers in this process, in bytes; dies of the tensors that are named."""

    def __init__(self, deadly: str | None = None) -> None:
        self.count, self.deadly, self.asked = 2, deadly, []

    def run(self, requests: Iterable[bytes], *, attempts: int = 3) -> Generator[bytes | Died, None, None]:
        for request in requests:
            asked = msgspec.msgpack.decode(request, type=helper.Asked)
            self.asked.append(asked)
            if asked.end == asked.first:  # to be ready; torch exports one model at a time in a process
                yield msgspec.msgpack.encode(helper.Found())
                continue
            is_deadly = self.deadly is not None and asked.side == 1
            if is_deadly and (self.deadly in asked.nodes or (not asked.nodes and asked.first == int(self.deadly))):
                yield Died("killed by SIGKILL")
            else:
                yield helper.answer(request)

    def close(self) -> None:
        """Nothing is open."""


@pytest.fixture
def helped(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[dict[str, Any], int]]:
    """Return a check with helpers, and how many tensors these have replayed."""

    def check(*arguments: Any, deadly: str | None = None, **options: Any) -> tuple[dict[str, Any], int]:
        taken = []
        judge = HelpedReplay.judge

        def counted(self: HelpedReplay, *given: Any) -> Any:
            before, found = self.num_taken, judge(self, *given)
            taken.append(self.num_taken - before)
            return found

        with monkeypatch.context() as patch:
            patch.setattr(elsewhere, "Processes", lambda *_: Pool(deadly))
            patch.setattr(HelpedReplay, "judge", counted)
            document = glass.check(*arguments, jobs=3, **options).to_dict()
        return document, sum(taken)

    return check


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_segments_are_replayed_elsewhere(tmp_path: Path, helped: Any, factor: float) -> None:
    record = recorded(tmp_path, factor=factor)
    expected = glass.check(model_file(tmp_path), candidate=record).to_dict()
    found, num_taken = helped(model_file(tmp_path), candidate=record)
    assert found == expected and found["ok"] == (factor == 1.0)
    assert num_taken >= (len(found["pairs"]) if factor == 1.0 else 3)


def test_a_step_that_kills_helpers_is_named_and_not_ok(tmp_path: Path, helped: Any) -> None:
    record = recorded(tmp_path)
    found, _ = helped(model_file(tmp_path), candidate=record, deadly="1")
    why = "each worker that judged it was killed by SIGKILL"
    assert not found["ok"] and found["too_little"] and found["not_ok_because"].endswith(f", step 1: {why}")
    assert {one["rung"] for one in found["skipped"] if one["reason"] == why} == {"record"}
    assert {pair["step"] for pair in found["pairs"] if pair["rung"] == "record"} == {0}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    text = "from glassengine.testing import models\nllama = models.llama\n"
    (directory / "model.py").write_text(text, encoding="utf-8")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["right", "wrong"])
@pytest.mark.parametrize("level", ["ops", "modules"])
def test_language_models_are_judged_alike(llama: Path, tmp_path: Path, helped: Any, kind: str, level: str) -> None:
    model = models.llama()
    if kind == "wrong":
        model.model.layers[1].mlp.down_proj.weight.data[7] *= 2
    if level == "ops":
        engine = glass.build(
            model, tmp_path / "engine", backend="eager", add_output=["*"], max_batch_size=2, max_seq_len=16
        )
        engine.generate(input_ids=PROMPTS, max_new_tokens=3, record=tmp_path / "run")
    else:
        ids = torch.tensor([[0, 0, 0, *PROMPTS[0]], PROMPTS[1]])
        inputs = {"input_ids": ids, "attention_mask": (ids > 0).long()}
        commands.record_target(model, tmp_path / "run", inputs=inputs, max_new_tokens=3)
    spec, limits = f"{llama / 'model.py'}:llama", {"candidate": tmp_path / "run", "min_coverage": 0.5}
    expected = glass.check(spec, **limits).to_dict()
    found, num_taken = helped(spec, **limits)
    assert found == expected and found["ok"] == (kind == "right")
    assert num_taken > (0.7 if kind == "right" else 0.1) * len(found["pairs"])
    if level == "ops":
        (node,) = {pair["site"] for pair in found["pairs"] if pair["site"].endswith("layers.0.mlp.down_proj/linear.0")}
        program = glass.sites(spec)
        name = next(site.node for site in program if site.name == node)
        deadly, _ = helped(spec, **limits, deadly=name)
        assert (not deadly["ok"] and kind == "wrong") or node in deadly["not_ok_because"]
        lost = [one["site"] for one in deadly["skipped"] if "killed by SIGKILL" in one["reason"]]
        assert lost == [node]


@pytest.mark.slow
@pytest.mark.parametrize("where", [{"jobs": 2}, {"cluster": "auto", "jobs": 2}], ids=["processes", "ray"])
def test_processes_and_clusters_find_what_one_finds(tmp_path: Path, where: dict[str, Any]) -> None:
    if "cluster" in where:
        pytest.importorskip("ray")
    record = recorded(tmp_path)
    expected = glass.check(model_file(tmp_path), candidate=record).to_dict()
    assert glass.check(model_file(tmp_path), candidate=record, **where).to_dict() == expected


@pytest.mark.slow
def test_processes_that_are_killed_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two real ones are killed right after they were asked: they were ready before, and are replaying."""
    record = recorded(tmp_path)
    expected = glass.check(model_file(tmp_path), candidate=record).to_dict()
    children: list[Any] = []
    killed: list[int] = []
    init = processes._Child.__init__

    def started(self: Any, command: Any) -> None:
        init(self, command)
        children.append(self)

    def send(file: Any, data: bytes) -> None:
        pipe.send(file, data)
        asked = msgspec.msgpack.decode(data, type=helper.Asked)
        if asked.end > asked.first and len(killed) < 2:
            (pid,) = (one._process.pid for one in children if one._process is not None and one._process.stdin is file)
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)

    monkeypatch.setattr(processes._Child, "__init__", started)
    monkeypatch.setattr(processes, "send", send)
    found = glass.check(model_file(tmp_path), candidate=record, jobs=2).to_dict()
    assert found == expected and len(set(killed)) == 2


def test_what_cannot_be_shared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = model_file(tmp_path)
    assert main(["check", spec, "--candidate", spec, "--jobs", "2"]) == 2
    assert "for a recorded candidate" in capsys.readouterr().err
    record = recorded(tmp_path, steps=1)
    with pytest.raises(UsageError, match="a model that is open in this one"):
        glass.check(torch.nn.Linear(12, 12), candidate=record, jobs=2)
    with pytest.raises(UsageError, match="tensors of this one"):
        glass.check(spec, candidate=record, inputs={"x": torch.ones(1, 12)}, jobs=2)
    with pytest.raises(UsageError, match="invalid --jobs"):
        glass.check(spec, candidate=record, jobs=0)


def test_masks_come_back() -> None:
    mask = torch.rand(3, 1, 7) > 0.5
    again = Mask.of(mask).tensor()
    assert again.dtype == torch.bool and torch.equal(again, mask)
