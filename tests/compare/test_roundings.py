"""Rounding without a noise floor is neither wrong nor ok: half precision, two precisions, updates of Adam."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import glassengine as glass
from glassengine.cli.main import main
from glassengine.compare import pairs as plans
from glassengine.compare.compare import compare
from glassengine.compare.roundings import NOT_JUDGED, ROUNDED
from glassengine.report.terminal_compare import comparison
from glassengine.results import Comparison
from glassengine.testing import models

ROWS, WIDTH, BF16 = 16, 32, torch.bfloat16


class _InParts(torch.autograd.Function):
    """A product whose gradient is added up of parts, each rounded, as ranks do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, parts: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parts = parts
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        each = [g.T @ y for g, y in zip(grad.chunk(ctx.parts), x.chunk(ctx.parts), strict=True)]
        return grad @ weight, torch.stack(each).sum(0), None


class Layer(nn.Linear):
    parts = 1

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _InParts.apply(x, self.weight.to(x.dtype), self.parts)
        return found


class Net(nn.Module):
    """With parameters in the dtype of its results, or in float32 beside them."""

    def __init__(self, parts: int, dtype: torch.dtype, slip: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(4)])
        self.act, self.slip = nn.Tanh(), slip
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.parts = parts

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(BF16)
        for i, layer in enumerate(self.layers):
            y = layer(x)
            if i == 2 and self.slip != 1:
                y = torch.cat((y[: ROWS // 2], y[ROWS // 2 :] * self.slip))
            x = x + self.act(y)
        return x


def trained(
    path: Path, parts: int, dtype: torch.dtype = BF16, *, slip: float = 1.0, rate: float = 0.05, scale: float = 1.0
) -> Path:
    net, batch = Net(parts, dtype, slip), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    with glass.record(net, path, gradients=True, optimizer=optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            (net(batch).float().square().sum(-1).mean() * scale).backward()
            optimizer.step()
    return path


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_roundings_are_not_judged_and_never_ok(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trained(tmp_path / "one", 1, dtype)
    right = compare(one, trained(tmp_path / "right", 4, dtype))
    assert (right.ok, right.too_little, right.verdict) == (False, True, "suspicious")
    unsure = [pair for pair in right.pairs if pair.verdict == "suspicious"]
    assert {pair.reason for pair in unsure} == {ROUNDED} and any(":param" in pair.site for pair in unsure)
    assert right.coverage < 1 and right.not_ok_because is not None and ROUNDED in right.not_ok_because
    mistakes: list[tuple[str, dict[str, float]]] = [
        (".:grad_out", {"scale": 1.05}),
        ("act@2:in[0]", {"slip": 1.05}),
        ("layers.0.weight:param", {"rate": 0.055}),
    ]
    for i, (site, mistake) in enumerate(mistakes):
        wrong = compare(one, trained(tmp_path / f"wrong{i}", 4, dtype, **mistake))
        assert (wrong.ok, wrong.too_little, wrong.verdict) == (False, False, "wrong"), mistake
        assert wrong.first_divergence is not None and wrong.first_divergence.site == site
    monkeypatch.setattr(plans, "BLOCK_BYTES", 500)
    rows = compare(one, tmp_path / "right")
    assert [pair.verdict for pair in rows.pairs] == [pair.verdict for pair in right.pairs]


def test_one_side_in_half_precision_is_not_excused(tmp_path: Path) -> None:
    """A layer in another dtype: what comes after it is wrong where the baseline has rounded nothing."""

    class Cast(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.dtype, self.inner, self.outer = dtype, nn.Identity(), nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.outer(self.inner(x.to(self.dtype)).float())
            return found

    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2))
    for name, dtype in (("a", torch.float32), ("b", BF16)):
        with glass.record(net := Cast(dtype), tmp_path / name):
            net(x)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.verdict == "wrong" and {pair.site: pair.verdict for pair in found.pairs}["outer"] == "wrong"


def _compared(tmp_path: Path, left: dict[str, object], right: dict[str, object], **options: Any) -> Comparison:
    torch.save(left, tmp_path / "a.pt")
    torch.save(right, tmp_path / "b.pt")
    return compare(tmp_path / "a.pt", tmp_path / "b.pt", **options)


@pytest.mark.parametrize("size", [1e-7, 1e-20, 1e-3])
@pytest.mark.parametrize("kind", ["zeros", "three times", "negative", "other", "1 % more"])
def test_f54_small_tensors_are_not_acquitted_as_a_whole(tmp_path: Path, size: float, kind: str) -> None:
    x = torch.randn(40, 7, generator=torch.Generator().manual_seed(0)) * size
    wrong = {"zeros": x * 0, "three times": x * 3, "negative": -x, "other": x.flip(0), "1 % more": x * 1.01}
    result = _compared(tmp_path, {"layer.grad": x}, {"layer.grad": wrong[kind]})
    assert not result.ok and result.pairs[0].verdict in ("suspicious", "wrong")
    # Rounding of it is rounding, at any size.
    noise = 1 + 1e-6 * torch.randn(40, 7, generator=torch.Generator().manual_seed(1))
    assert _compared(tmp_path, {"layer.grad": x}, {"layer.grad": x * noise}).pairs[0].verdict == "rounding"


def test_f54_what_is_rounding_alone_beside_larger_tensors_is_no_alarm(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x, y = (torch.randn(64, generator=generator) * size for size in (1e-2, 1e-10, 1e-10))
    result = _compared(tmp_path, {"k.weight": weight, "k.bias": x}, {"k.weight": weight, "k.bias": y})
    assert result.ok and {pair.verdict for pair in result.pairs} == {"identical", "suspicious"}
    # Beside nothing of its module it is not known, and that is said.
    result = _compared(tmp_path, {"w": weight, "bias": x}, {"w": weight, "bias": y})
    assert result.too_little and "below the absolute tolerance" in str(result.not_ok_because)
    # Small elements beside large ones, and denormal numbers beside zeros.
    both = torch.cat([weight, x]), torch.cat([weight, y])
    assert _compared(tmp_path, {"w": both[0]}, {"w": both[1]}).pairs[0].verdict == "rounding"
    assert _compared(tmp_path, {"w": x * 0}, {"w": torch.full((64,), 1e-40)}).pairs[0].verdict == "rounding"


def test_f54_numbers_beside_tensors_are_compared(tmp_path: Path) -> None:
    x = torch.ones(3)
    left = {"x": x, "loss": 1.0, "step": 7, "done": True}
    assert _compared(tmp_path, left, dict(left)).counts["compared"] == 4
    for name, value in (("loss", 1.5), ("step", 8), ("done", False)):
        assert not _compared(tmp_path, left, {**left, name: value}).ok
    as_items = {"loss": torch.tensor(0.1).item()}
    assert _compared(tmp_path, as_items, {"loss": 0.1}).ok, "a number of float32 is judged as one"


def test_f62_values_of_a_coarse_dtype_in_a_file_of_float32(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator) for _ in range(2))
    for dtype in (torch.bfloat16, torch.float16):
        x = (a.to(dtype) @ b.to(dtype)).float()
        y = (a[:, :32].to(dtype) @ b[:32].to(dtype) + a[:, 32:].to(dtype) @ b[32:].to(dtype)).float()
        result = _compared(tmp_path, {"logits": x, "p": x.log_softmax(-1)}, {"logits": y, "p": y.log_softmax(-1)})
        assert result.ok and {pair.verdict for pair in result.pairs} == {"suspicious"}
        assert not _compared(tmp_path, {"logits": x}, {"logits": x * 1.01}).ok
        assert not _compared(tmp_path, {"logits": x}, {"logits": y.roll(1, 0)}).ok
    # Of what was computed from such alone nothing shows it: the flag is named.
    result = _compared(tmp_path, {"p": x.log_softmax(-1)}, {"p": y.log_softmax(-1)})
    assert not result.ok and "--rtol 1.6e-2" in str(result.pairs[0].reason)
    # Ones and halves are numbers of any dtype.
    mask = (a > 0).float()
    assert _compared(tmp_path, {"m": mask}, {"m": mask * 1.01}).pairs[0].verdict == "wrong"


def test_nothing_finite_is_said(tmp_path: Path) -> None:
    nan = torch.full((4, 4), float("nan"))
    result = _compared(tmp_path, {"x": nan}, {"x": nan})
    assert result.pairs[0].verdict == "identical" and "no value is finite" in str(result.pairs[0].reason)
    assert _compared(tmp_path, {"x": torch.ones(4)}, {"x": torch.ones(4)}).pairs[0].reason is None


class PreciseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x.to(self.head.weight.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x) * 3) + x
        return {"logits": self.head(x)}


class Negated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    wrong = models.drawn(PreciseNet)
    wrong.layers[2].__class__ = Negated
    sides = {
        "float32": models.drawn(PreciseNet),
        "bfloat16": models.drawn(PreciseNet).bfloat16(),
        "wrong": wrong.bfloat16(),
    }
    for name, model in sides.items():
        with glass.record(model, folder / name), torch.no_grad():
            model(x)
            model(x * 2)
    return folder


def test_f15_two_precisions_are_drift_and_no_mistake(records: Path) -> None:
    result = glass.compare(records / "float32", records / "bfloat16")
    assert result.ok and result.verdict in ("rounding", "suspicious"), result.not_ok_because
    assert result.first_divergence is None
    assert result.calibration == "another precision: drift, float32 against bfloat16"
    names = [row.site for row in result.drift]
    assert names[:2] == ["layers.0", "layers.1"] and names[-1] == ".:out.logits"
    assert 30 < result.drift[-1].snr_db < 60 and result.drift[0].num_tensors == 2
    assert sum(row.share or 0 for row in result.drift) == pytest.approx(1.0)
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison(result))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "another precision: drift" in text and "drift, in order of execution" in text


def test_f15_a_verdict_that_is_asked_for_or_a_budget_fails(records: Path) -> None:
    sides = [str(records / "float32"), str(records / "bfloat16")]
    assert main(["compare", *sides]) == 0
    assert main(["compare", *sides, "--min-snr", "30dB"]) == 0
    assert main(["compare", *sides, "--min-snr", "90dB"]) == 1
    assert main(["compare", *sides, "--fail-on", "suspicious"]) == 1
    assert main(["compare", *sides, "--min-snr", "much"]) == 2


def test_f15_what_is_no_signal_any_more_is_wrong(records: Path) -> None:
    result = glass.compare(records / "float32", records / "wrong")
    assert not result.ok and result.verdict == "wrong"
    assert result.first_divergence is not None and result.first_divergence.site == "layers.2"


def test_of_one_precision_nothing_is_drift(records: Path) -> None:
    result = glass.compare(records / "bfloat16", records / "wrong")
    assert not result.ok and result.drift == () and result.calibration == "uncalibrated"


class BiasedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.up(x)).tanh()
        return found


def recorded(path: Path, order: list[int], rate: float) -> Path:
    net, batch = BiasedNet(), torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    with glass.record(net, path, gradients=True, optimizer=optimizer, sites=["re::(param|grad)$"]):
        for _ in range(2):
            optimizer.zero_grad()
            net(batch[order]).square().mean().backward()
            optimizer.step()
    return path


@pytest.mark.parametrize(("rate", "is_rounding"), [(0.01, True), (0.02, False)])
def test_a_bias_ahead_of_a_norm(rate: float, is_rounding: bool, tmp_path: Path) -> None:
    one = recorded(tmp_path / "one", list(range(16)), 0.01)
    first = compare(one, recorded(tmp_path / "other", list(range(15, -1, -1)), rate)).first_divergence
    assert first is not None and (first.site == "up.bias:param") is is_rounding
    assert any("whose gradients are rounding" in hint.text for hint in first.hints) is is_rounding


class _InOrder(torch.autograd.Function):
    """A bias whose gradient is summed up in an order of rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, order: list[int]) -> torch.Tensor:
        ctx.order = order
        return x + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        found = torch.zeros_like(grad[0])
        for row in ctx.order:
            found = found + grad[row]
        return grad, found, None


class Up(nn.Linear):
    order: list[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _InOrder.apply(nn.functional.linear(x, self.weight), self.bias, self.order)
        return found


class Attention(nn.Module):
    def __init__(self, order: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = nn.Linear(6, 8), Up(6, 8)
        self.key.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.query(x) @ self.key(x).T).softmax(-1) @ x


def trained_by_adam(
    path: Path, order: list[int], rate: float = 0.01, shift: float = 0.0, scale: float = 1.0, slip: float = 0.0
) -> Path:
    net, batch = Attention(order), torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    with glass.record(net, path, gradients=True, optimizer=optimizer):
        for step in range(3):
            optimizer.zero_grad()
            (net(batch).square().mean() * scale).backward()
            with torch.no_grad():
                net.key.bias += shift if step == 1 else 0.0
                net.query.weight[1] += slip if step == 2 else 0.0
            optimizer.step()
    return path


def test_rounded_updates_are_not_judged_and_never_ok(tmp_path: Path) -> None:
    one, other = trained_by_adam(tmp_path / "one", list(range(16))), list(range(15, -1, -1))
    right = compare(one, trained_by_adam(tmp_path / "right", other))
    assert (right.ok, right.too_little, right.verdict) == (False, True, "suspicious")
    reasons = {pair.site: str(pair.reason) for pair in right.pairs if pair.verdict == "suspicious"}
    reasons = {
        site: reason for site, reason in reasons.items() if "as small as the rounding of key.weight" not in reason
    }
    assert {"key", "key.bias:param"} <= set(reasons) and set(reasons.values()) == {NOT_JUDGED}
    assert right.coverage < 1 and right.not_ok_because is not None and NOT_JUDGED in right.not_ok_because
    mistakes: list[dict[str, float]] = [{"rate": 0.0101}, {"shift": 1.0}, {"scale": 1.01}]
    for i, mistake in enumerate(mistakes):
        wrong = compare(one, trained_by_adam(tmp_path / f"wrong{i}", other, **mistake))
        assert (wrong.ok, wrong.too_little, wrong.verdict) == (False, False, "wrong"), mistake


def test_a_mistake_after_updates_of_rounding_is_the_first(tmp_path: Path) -> None:
    one, other = trained_by_adam(tmp_path / "one", list(range(16))), list(range(15, -1, -1))
    found = compare(one, trained_by_adam(tmp_path / "wrong", other, slip=1e-3))
    first = found.first_divergence
    assert found.verdict == "wrong" and first is not None and (first.site, first.step) == ("query.weight:param", 2)
    assert {pair.site for pair in found.pairs if pair.reason == NOT_JUDGED} == {"key", "key.bias:param"}


class _Product(torch.autograd.Function):
    """A product whose gradient is summed up in an order of rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, order: list[int]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.order = order
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        found = torch.zeros_like(weight)
        for row in ctx.order:
            found = found + grad[row, :, None] * x[row]
        return grad @ weight, found, None


class Product(nn.Linear):
    order: list[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Product.apply(x, self.weight, self.order)
        return found


class Weighted(nn.Module):
    """Its loss has a gradient for one row of a weight that is the small rest of large terms."""

    def __init__(self, order: list[int], x: torch.Tensor, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, drawn = Product(6, 8, bias=False), torch.randn(16, 8)
        self.up.order = order
        rest = drawn[:, 3] - x @ torch.linalg.lstsq(x, drawn[:, 3:4]).solution[:, 0]
        drawn[:, 3] = rest + 1e-6 * drawn[:, 4]
        self.drawn = drawn * factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (self.up(x) * self.drawn).sum()
        return found


def of_weights(
    path: Path, order: list[int], *, slip: float = 0.0, row: int = 2, factor: float = 1.0, rate: float = 0.002
) -> Path:
    """Train it with an optimizer that divides by the size of a gradient, and adds an epsilon of that size."""
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    net = Weighted(order, x, factor)
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, eps=1e-5)
    with glass.record(net, path, gradients=True, optimizer=optimizer):
        for step in range(3):
            optimizer.zero_grad()
            net(x).backward()
            with torch.no_grad():
                net.up.weight[row, 1] += slip if step == 1 else 0.0
            optimizer.step()
    return path


def test_a_result_of_weights_whose_small_gradients_are_rounded(tmp_path: Path) -> None:
    one, other = of_weights(tmp_path / "one", list(range(16))), list(range(15, -1, -1))
    right = compare(one, of_weights(tmp_path / "right", other))
    assert (right.ok, right.too_little, right.verdict) == (False, True, "suspicious")
    unsure = {pair.site: pair.reason for pair in right.pairs if pair.verdict == "suspicious"}
    assert unsure == {"up": NOT_JUDGED, "up.weight:param": NOT_JUDGED}
    mistakes: list[dict[str, Any]] = [{"slip": 9e-6}, {"factor": 1.0005}, {"rate": 0.00201}, {"slip": 0.05, "row": 3}]
    for i, mistake in enumerate(mistakes):
        wrong = compare(one, of_weights(tmp_path / f"wrong{i}", other, **mistake))
        assert (wrong.ok, wrong.too_little, wrong.verdict) == (False, False, "wrong"), mistake
