"""The cases of a check by one process or several, and products that are all summed in half precision."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.cli.main import main
from glassengine.diagnose import check
from glassengine.diagnose.ladder import judging
from glassengine.diagnose.ladder.request import CheckRequest
from glassengine.diagnose.router import route
from glassengine.errors import BackendError, UsageError
from glassengine.results import Comparison, Interrupted, Policy
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

    monkeypatch.setattr(judging, "_merge", interrupted)
    with pytest.raises(Interrupted) as stopped:
        glass.check(f"{file}:llama", candidate=f"{file}:port", steps=1, jobs=2)
    assert {pair.case for pair in stopped.value.partial.pairs} == {"prompt 0"}
    assert not stopped.value.partial.ok


def test_a_worker_that_ends_is_an_error(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "Processes", InThisProcess)
    monkeypatch.setattr(InThisProcess, "died", Died("killed by SIGKILL"))
    with pytest.raises(BackendError, match="killed by SIGKILL"):
        glass.check(f"{file}:llama", candidate=f"{file}:port", steps=1, jobs=2)


def test_an_error_of_a_worker_is_passed_on(file: str) -> None:
    request = CheckRequest(f"{file}:none", f"{file}:none", Policy(), jobs=2, route=route).for_workers()
    found = pickle.loads(judging.answer(pickle.dumps((1, torch.get_num_threads(), request))))  # noqa: S301
    judging._case = None
    assert isinstance(found, str) and found


def test_one_case_is_judged_by_one_process(
    file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(judging, "Processes", None)
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


SIZE = 512


class Coarse(nn.Linear):
    """Sums are rounded to bfloat16 after every 16 terms."""

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(*x.shape[:-1], self.out_features, dtype=x.dtype)
        for start in range(0, self.in_features, 4):
            total = total + x[..., start : start + 4] @ self.weight[:, start : start + 4].t()
        return total


class Net(nn.Module):
    """Four layers with a norm between them."""

    def __init__(self, *, coarse: bool = False, slope: float = 0.01) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList((Coarse if coarse else nn.Linear)(SIZE, SIZE, bias=False) for _ in range(4))
        self.act = nn.LeakyReLU(slope)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x)) * 4
        return x


def checked(other: nn.Module, tmp_path: Path, accumulation: str | None = None) -> Comparison:
    torch.set_num_threads(1)
    x = torch.randn(64, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    torch.save({"x": x}, tmp_path / "x.pt")
    with torch.no_grad(), glass.record(other.bfloat16().eval(), tmp_path / "record"):
        other(x)
    return check(
        Net().bfloat16().eval(),
        candidate=tmp_path / "record",
        inputs=str(tmp_path / "x.pt"),
        accumulation=accumulation,
        min_coverage=0.4,
    )


def test_f45_products_that_are_summed_coarsely_are_told_of_once(tmp_path: Path) -> None:
    found = checked(Net(coarse=True), tmp_path)
    assert found.verdict == "suspicious" and found.ok and not found.origins, found.origins
    assert len(found.notes) == 1 and "products are summed in bfloat16" in found.notes[0]
    assert "--accum bfloat16" in found.notes[0]


@pytest.mark.slow
def test_f45_another_mistake_beside_them_is_named(tmp_path: Path) -> None:
    found = checked(Net(coarse=True, slope=0.3), tmp_path)
    assert not found.ok and found.first_divergence is not None
    assert found.first_divergence.site.startswith("act") or "leaky" in found.first_divergence.site


@pytest.mark.parametrize("accumulation", [None, "bfloat16"])
def test_nothing_is_said_of_what_is_declared_or_right(accumulation: str | None, tmp_path: Path) -> None:
    found = checked(Net(coarse=accumulation is not None), tmp_path, accumulation)
    assert found.ok and found.verdict in ("identical", "rounding") and found.notes == ()


def test_one_wrong_product_is_no_way_to_sum(tmp_path: Path) -> None:
    other = Net()
    other.layers[2].weight.data *= 1.05  # type: ignore[operator, union-attr]
    found = checked(other, tmp_path)
    assert not found.ok and found.notes == ()


class Rounded(nn.Linear):
    """Operands are rounded to bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16().float() @ self.weight.bfloat16().float().T + self.bias


class Stack(nn.Module):
    """Products and a convolution in float32, whose weights may all be a little off, or whose sums are coarse."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(24, 64, 3, padding=1)
        self.layers = nn.ModuleList((Rounded if kind == "operands" else nn.Linear)(64, 64) for _ in range(4))
        if kind in ("int8", "adapter", "bfloat16", "scaled"):
            for module in (self.conv, *self.layers):
                module.weight.data = _off(kind, module.weight.data)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).mT
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _off(kind: str, weight: Tensor) -> Tensor:
    if kind == "int8":
        step = weight.abs().amax() / 127
        return (weight / step).round() * step
    if kind == "adapter":
        a, b = torch.randn(weight.shape[0], 2), torch.randn(2, weight.numel() // weight.shape[0])
        change = (a @ b).view_as(weight)
        return weight + 0.004 * change * weight.norm() / change.norm()
    return weight.bfloat16().float() if kind == "bfloat16" else weight * 1.003


def of_stack(kind: str, tmp_path: Path) -> Comparison:
    torch.set_num_threads(1)
    x = torch.randn(3, 24, 17, generator=torch.Generator().manual_seed(1))
    torch.save({"x": x}, tmp_path / "x.pt")
    other = Stack(kind).eval()
    with torch.no_grad(), glass.record(other, tmp_path / "record"):
        other(x)
    return check(Stack().eval(), candidate=tmp_path / "record", inputs=str(tmp_path / "x.pt"), min_coverage=0.1)


@pytest.mark.parametrize(
    "kind", ["int8", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("adapter", "bfloat16", "scaled"))]
)
def test_weights_that_are_all_slightly_off_are_no_way_to_sum(kind: str, tmp_path: Path) -> None:
    found = of_stack(kind, tmp_path)
    assert not found.ok and found.verdict == "wrong" and found.notes == ()


@pytest.mark.slow
def test_operands_that_are_rounded_first_are_a_way_to_compute(tmp_path: Path) -> None:
    found = of_stack("operands", tmp_path)
    assert found.ok and len(found.notes) == 1 and "products are summed in" in found.notes[0]
