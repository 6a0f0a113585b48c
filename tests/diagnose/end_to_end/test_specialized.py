"""Ports that look at values: judged with the inputs at hand, each step by a trace of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(4, 4), nn.Linear(4, 4)


class Masked(Base):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.second(self.linear(x).masked_fill(mask[..., None], 0.0))


class Branches(Base):
    """Leaves the mask out where it hides nothing."""

    factor = 1.0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.linear(x)
        if mask.any():
            y = y.masked_fill(mask[..., None], 0.0) * self.factor
        return self.second(y)


class Asks(Branches):
    """Asks for equal tensors by functions whose answer is a Python value."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.linear(x)
        if not torch.equal(mask, torch.zeros_like(mask)) and not torch.allclose(y, 2 * y):
            y = y.masked_fill(mask[..., None], 0.0) * self.factor
        return self.second(y)


class Experts(Base):
    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        parts = [expert(x) * (chosen == number)[:, None] for number, expert in enumerate((self.second, self.linear))]
        return parts[0] + parts[1]


class Padded(nn.Module):
    """Pads by numbers that are tensors, as a codec does, so that the padding goes into the shapes of a recurrence."""

    def __init__(self, *, is_number: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.conv, self.lstm, self.factor = nn.Conv1d(3, 4, 3), nn.LSTM(4, 4), factor
        self.register_buffer("by", torch.tensor(2))
        self.is_number = is_number

    def forward(self, x: Tensor) -> Tensor:
        by = 2 if self.is_number else self.by
        y = nn.functional.pad(x, (by, 0)) if x.shape[-1] > by else x
        y = (self.conv(y) * self.factor).permute(2, 0, 1)
        return self.lstm(y)[0][: len(y) - by]


class Routed(Base):
    """Each expert computes the rows that were sent to it."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        chosen, result = (x[:, 0] > 0).long(), torch.zeros_like(x)
        for number, expert in enumerate((self.second, self.linear)):
            rows = (chosen == number).nonzero()[:, 0]
            if rows.numel() == 0:
                continue
            result[rows] = expert(x[rows]) * self.factor
        return result


class Energy(Base):
    """Forces: what a sum of tanh is derived by."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        return ((1 - y * y) @ self.linear.weight) + 0.0 * self.second(x)


class Derived(Base):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            points = x.detach().requires_grad_(True)
            energy = (self.linear(points).tanh() * self.factor).sum()
            return torch.autograd.grad(energy, points)[0] + 0.0 * self.second(x)


def inputs(tmp_path: Path, steps: Any) -> str:
    torch.save(steps, tmp_path / "inputs.pt")
    return str(tmp_path / "inputs.pt")


def judged(baseline: nn.Module, port: Any, factor: float, given: str) -> Any:
    port.load_state_dict(baseline.state_dict())
    port.factor = factor
    return check(baseline, candidate=port, inputs=given)


@pytest.mark.parametrize("kind", [Branches, Asks])
@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_f30_a_branch_on_a_mask(kind: type[Base], factor: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[False, False, True]])
    steps = [{"x": torch.randn(1, 3, 4), "mask": one} for one in (torch.zeros_like(mask), mask)]
    result = judged(Masked(), kind(), factor, inputs(tmp_path, steps))
    assert result.ok == (factor == 1.0) and result.coverage > 0.9
    assert any("it looks at values" in item.reason for item in result.skipped)
    if factor != 1.0:
        assert result.first_divergence.step == 1


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_f30_rows_that_are_sent_to_experts(factor: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = judged(Experts(), Routed(), factor, inputs(tmp_path, [{"x": torch.randn(6, 4)}]))
    assert result.ok == (factor == 1.0), result.not_ok_because


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_f32_a_port_that_computes_gradients_in_its_forward(factor: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = judged(Energy(), Derived(), factor, inputs(tmp_path, [{"x": torch.randn(3, 4)}]))
    assert result.ok == (factor == 1.0), result.not_ok_because


def test_f32_a_baseline_that_computes_gradients_in_its_forward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    given = inputs(tmp_path, [{"x": torch.randn(3, 4)}])
    for factor in (1.0, 1.01):
        result = judged(Derived(), Derived(), factor, given)
        assert result.ok == (factor == 1.0), result.not_ok_because


@pytest.mark.parametrize("factor", [pytest.param(1.0, marks=pytest.mark.slow), 1.01])
def test_numbers_that_are_tensors_go_into_shapes(factor: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    baseline, port = Padded(), Padded(is_number=True)
    result = judged(baseline, port, factor, inputs(tmp_path, [{"x": torch.randn(2, 3, 9)}]))
    assert result.ok == (factor == 1.0), result.not_ok_because
    sites = {pair.site.split("/")[0] for pair in result.pairs if pair.level == "candidate"}
    assert sites >= {"conv", "lstm"}, "the modules are still known"
    assert not [item.site for item in result.skipped if item.site.startswith("./")], "what only makes a number is gone"


class Rows(Base):
    """Computes the rows that a mask picks, up to the last of them; when it is compiled, it does something else."""

    factor = 1.0

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.linear(x)
        if not torch.compiler.is_compiling() and bool(mask.any()):
            y = 2 * y
        rows = mask.nonzero().flatten()
        found = torch.zeros_like(x).index_add(0, rows, self.second(y.index_select(0, rows)))
        found[mask] = found[mask] * self.factor
        return found[: int(rows.max()) + 1]


@pytest.mark.parametrize("factor", [1.0, 1.1])
def test_rows_that_a_mask_picks_and_code_that_asks_whether_it_is_compiled(factor: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    baseline, port = Rows(), Rows()
    port.load_state_dict(baseline.state_dict())
    port.factor = factor
    given = {"x": torch.randn(6, 4), "mask": torch.tensor([True, False, True, True, False, False])}
    result = check(baseline, candidate=port, inputs=given)
    assert result.ok == (factor == 1.0), result.not_ok_because
