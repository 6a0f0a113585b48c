"""Training in which each rank has rows of its own: right however the loss is reduced, and mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine.capture.record import record
from glassengine.cli.main import main
from glassengine.compare import compare
from glassengine.recording.reader import Recording
from glassengine.recording.write.writer import RecordingWriter
from glassengine.results import Comparison

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))

Reduce = Callable[[Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, reduce: Reduce = torch.mean) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.act, self.outer = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)
        self.reduce = reduce

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        result = self.outer(self.act(self.inner(x)))
        return {"loss": self.reduce((result - y).square().sum(-1)), "result": result}


def train(
    nets: list[Net], path: Path, *, exchange: str = "in the backward", scale: float = 1.0, **options: Any
) -> Path:
    """Train copies in lockstep, each on its share of the rows, as ranks do; `exchange` says how gradients are averaged.

    Options: `skip`, the name of a parameter whose gradients are not; `twins`, all get the same rows; `total`, gradients
    are added up; `optimizer`, whether its steps are recorded.
    """
    count, skip = len(nets), options.get("skip")
    rows = list(zip(X.chunk(count), Y.chunk(count), strict=True))
    rows = rows[:1] * count if options.get("twins") else rows
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    records = [
        record(
            net,
            path / f"rank{rank}" if count > 1 else path,
            gradients=True,
            optimizer=optimizer if options.get("optimizer", True) else None,
        )
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True))
    ]
    for one in records:
        one.__enter__()
    for _ in range(2):
        shared = _shared(nets, rows, scale, options.get("total", False))
        for net, (x, y), optimizer in zip(nets, rows, optimizers, strict=True):
            optimizer.zero_grad()
            hooks: list[Any] = []
            if exchange == "in the backward":
                # In place of what is local comes what all ranks agreed on.
                hooks = [
                    parameter.register_hook(lambda _, name=name, of=shared: of[name])  # type: ignore[misc]
                    for name, parameter in net.named_parameters()
                    if name != skip
                ]
            (net(x, y)["loss"] * scale).backward()
            for hook in hooks:
                hook.remove()
        for net, optimizer in zip(nets, optimizers, strict=True):
            for name, parameter in net.named_parameters():
                if exchange == "after it" and name != skip:
                    parameter.grad = shared[name].clone()
            optimizer.step()
    for one in records:
        one.__exit__(None, None, None)
    return path


def _shared(nets: list[Net], rows: list[tuple[Tensor, Tensor]], scale: float, total: bool) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for net, (x, y) in zip(nets, rows, strict=True):
        result = net.outer.forward(net.act.forward(net.inner.forward(x)))
        loss = net.reduce((result - y).square().sum(-1)) * scale
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        for (name, _), gradient in zip(net.named_parameters(), gradients, strict=True):
            found[name] = found.get(name, torch.zeros(())) + gradient / (1 if total else len(nets))
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train([Net()], tmp_path_factory.mktemp("one") / "r", exchange="none")


def run(one: Path, path: Path, **options: Any) -> Comparison:
    return compare(one, train([Net(), Net()], path, **options))


@pytest.mark.parametrize("exchange", ["in the backward", "after it"])
def test_f10_losses_that_are_means_over_the_rows_of_each_rank(
    exchange: str, one: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(one, tmp_path / "r", exchange=exchange)
    assert (result.ok, result.coverage) == (True, 1.0), result.first_divergence
    assert main(["compare", str(one), str(tmp_path / "r")]) == 0
    shown = capsys.readouterr().out
    assert "divided by 2: gradients of a mean over the rows of each rank" in shown
    assert "averaged over the ranks that have data of their own" in shown


def test_f10_losses_that_are_sums(tmp_path: Path) -> None:
    one = train([Net(torch.sum)], tmp_path / "one", exchange="none")
    right = train([Net(torch.sum), Net(torch.sum)], tmp_path / "right", total=True)
    result = compare(one, right)
    assert (result.ok, result.coverage) == (True, 1.0), result.first_divergence
    # Averaged, they are half as large.
    found = compare(one, train([Net(torch.sum), Net(torch.sum)], tmp_path / "wrong")).first_divergence
    assert found is not None and found.site in ("outer.weight:grad", "outer.bias:grad")
    assert "averaged over ranks whose losses are sums" in found.hints[0].text


@pytest.mark.parametrize(
    ("options", "sites", "kind"),
    [
        ({"exchange": "never"}, {"outer.weight:grad", "outer.bias:grad"}, "reduction"),
        ({"exchange": "never", "optimizer": False}, {"outer.weight:grad", "outer.bias:grad"}, "reduction"),
        ({"skip": "inner.weight"}, {"inner.weight:grad"}, "reduction"),
        ({"skip": "inner.weight", "exchange": "after it"}, {"inner.weight:grad"}, "reduction"),
        ({"total": True}, {"outer.weight:grad", "outer.bias:grad"}, "average"),
        ({"total": True, "exchange": "after it"}, {"inner.weight:param"}, None),
        ({"scale": 3.0}, {".:grad_out.loss"}, "values"),
        ({"scale": 0.5}, {".:grad_out.loss"}, "values"),
        ({"twins": True}, {".:in[0]"}, None),
    ],
)
def test_f10_mistakes_are_found_behind_the_factor(
    options: dict[str, Any], sites: set[str], kind: str | None, one: Path, tmp_path: Path
) -> None:
    if options.get("optimizer") is False:
        one = train([Net()], tmp_path / "one", exchange="none", optimizer=False)
    found = run(one, tmp_path / "r", **options).first_divergence
    assert found is not None and (found.step, found.site in sites) == (0, True), found
    assert kind is None or found.hints[0].evidence == kind


def test_f10_a_wrong_layer_of_one_rank(one: Path, tmp_path: Path) -> None:
    nets = [Net(), Net()]
    nets[1].act.register_forward_hook(lambda module, args, result: result * 1.01)
    found = compare(one, train(nets, tmp_path / "r")).first_divergence
    assert found is not None and (found.site, found.rank, found.level) == ("act", 1, "forward")


def test_f10_rows_that_are_dealt_out_in_any_order(one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = torch.tensor([2, 0, 3, 1])
    monkeypatch.setattr(f"{__name__}.X", X[order])
    monkeypatch.setattr(f"{__name__}.Y", Y[order])
    result = run(one, tmp_path / "r")
    assert (result.ok, result.coverage) == (True, 1.0), result.first_divergence


def test_f10_gradients_that_are_averaged_steps_later(tmp_path: Path) -> None:
    """Microbatches: gradients are local in the first step, and averaged, all of them, in the second."""

    def train_twice(nets: list[Net], path: Path, averages: bool = True) -> Path:
        rows = list(zip(X.chunk(len(nets)), Y.chunk(len(nets)), strict=True))
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        records = []
        for rank, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            own = record(net, path / f"rank{rank}" if len(nets) > 1 else path, gradients=True, optimizer=optimizer)
            own.__enter__()
            records.append(own)
        for _ in range(2):
            for net, (x, y) in zip(nets, rows, strict=True):
                net(x, y)["loss"].backward()
        for parameters in zip(*(net.parameters() for net in nets), strict=True):
            mean = torch.stack([p.grad for p in parameters if p.grad is not None]).mean(0)
            for parameter in parameters:
                parameter.grad = mean.clone() if averages else parameter.grad
        for own, optimizer in zip(records, optimizers, strict=True):
            optimizer.step()
            own.__exit__(None, None, None)
        return path

    one = train_twice([Net()], tmp_path / "one")
    result = compare(one, train_twice([Net(), Net()], tmp_path / "two"))
    assert (result.ok, result.coverage) == (True, 1.0), result.first_divergence
    found = compare(one, train_twice([Net(), Net()], tmp_path / "wrong", averages=False)).first_divergence
    assert found is not None and found.hints[0].evidence == "reduction" and found.step == 0


def test_f10_without_a_record_of_the_inputs(tmp_path: Path) -> None:
    def strip(path: Path) -> Path:
        for place in (path,) if (path / "recording.json").exists() else sorted(path.iterdir()):
            opened = Recording.open(place)
            there = tmp_path / f"stripped-{path.name}" / (place.name if place != path else "")
            with RecordingWriter(there, metadata=opened.metadata) as w:
                for step in opened.steps:
                    for entry in opened.entries:
                        if entry.step == step and not entry.site.startswith(".:in"):
                            w.write(entry.site, step, opened.tensor(entry))
                    w.commit(step)
        return tmp_path / f"stripped-{path.name}"

    one = strip(train([Net()], tmp_path / "one", exchange="none"))
    result = compare(one, strip(train([Net(), Net()], tmp_path / "two")))
    assert (result.ok, result.coverage) == (True, 1.0), result.first_divergence
    found = compare(one, strip(train([Net(), Net()], tmp_path / "never", exchange="never"))).first_divergence
    assert found is not None and found.site.endswith(":grad") and found.hints[0].evidence == "reduction"


def test_f10_ranks_with_different_numbers_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each loss is a mean over the rank's rows: the mean of both is another one."""
    monkeypatch.setattr(f"{__name__}.X", X[:3])
    monkeypatch.setattr(f"{__name__}.Y", Y[:3])
    one = train([Net()], tmp_path / "one", exchange="none")
    found = run(one, tmp_path / "r").first_divergence
    assert found is not None and (found.step, found.site) == (0, ".:out.loss")
    assert "have 2, 1 rows" in found.hints[0].text


def test_f10_ranks_with_different_numbers_of_rows_that_each_count_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each loss is a sum over the rank's rows, divided by the rows of all: the mean of both is right."""
    monkeypatch.setattr(f"{__name__}.X", X[:3])
    monkeypatch.setattr(f"{__name__}.Y", Y[:3])
    one = train([Net()], tmp_path / "one", exchange="none")
    nets = [Net(lambda errors: errors.sum() / 3 * 2) for _ in range(2)]
    found = compare(one, train(nets, tmp_path / "two"))
    assert (found.ok, found.coverage) == (True, 1.0)
    wrong = train([Net(lambda errors: errors.sum() / 2) for _ in range(2)], tmp_path / "wrong")
    assert not compare(one, wrong).ok
