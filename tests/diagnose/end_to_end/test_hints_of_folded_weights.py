"""What is said of weights that one side folds, of slices of other dimensions, and of factors taken elsewhere."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from glassengine.diagnose import check
from glassengine.results import Comparison


def judged(baseline: nn.Module, candidate: nn.Module, x: Tensor, tmp_path) -> Comparison:  # type: ignore[no-untyped-def]
    torch.save({"x": x}, tmp_path / "inputs.pt")
    return check(baseline.eval(), candidate=candidate.eval(), inputs=str(tmp_path / "inputs.pt"))


def told(result: Comparison) -> str:
    assert not result.ok and result.first_divergence is not None
    return "; ".join(hint.text for hint in result.first_divergence.hints)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.conv = nn.Conv1d(4, 6, 3), nn.Conv1d(6, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(F.silu(self.before(x))))


def normed() -> tuple[Plain, Plain]:
    plain = Plain()
    other = copy.deepcopy(plain)
    parametrizations.weight_norm(other.conv)
    with torch.no_grad():
        other.conv.parametrizations.weight.original1.mul_(3)  # a norm takes its length away
    return plain, other


def test_a_folded_weight_norm_is_ok_either_way(tmp_path) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(2, 4, 17, generator=torch.Generator().manual_seed(1))
    plain, other = normed()
    assert judged(plain, other, x, tmp_path).ok
    assert judged(other, plain, x, tmp_path).ok


def test_a_weight_that_is_normed_on_one_side_is_compared_as_its_product(tmp_path) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(2, 4, 17, generator=torch.Generator().manual_seed(1))
    plain, other = normed()
    with torch.no_grad():
        other.conv.parametrizations.weight.original0.mul_(2)
    assert "is scaled by 2" in told(judged(plain, other, x, tmp_path))
    plain, other = normed()
    with torch.no_grad():
        plain.conv.weight.copy_(plain.conv.weight.flip(-1))
    assert "kernel flipped along axis 2" in told(judged(other, plain, x, tmp_path))


class Relative(nn.Module):
    """Scores of distances, turned into scores of places by padding: with heads as rows of the batch or apart."""

    def __init__(self, *, folds_heads: bool, scales_queries: bool, start: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(12, 12), nn.Linear(12, 12)
        self.table = nn.Parameter(torch.randn(2 * 7 - 1, 4))
        self.folds_heads, self.scales_queries, self.start = folds_heads, scales_queries, start

    def forward(self, x: Tensor) -> Tensor:
        size, length, _ = x.shape
        q, k = self.q(x), self.k(x)
        if self.scales_queries:
            q = q * 0.5
        q, k = (t.view(size, length, 3, 4).transpose(1, 2) for t in (q, k))
        if self.folds_heads:
            q, k = q.reshape(3 * size, length, 4), k.reshape(3 * size, length, 4)
        apart = F.pad(q @ self.table.T, [0, 1]).flatten(-2)
        apart = F.pad(apart, [0, length - 1]).unflatten(-1, (length + 1, 2 * length - 1))
        stop = None if not self.start else -self.start
        apart = apart[..., :length, length - 1 - self.start : stop]
        scores = q @ k.mT
        scores = scores + apart if self.scales_queries else scores / 2 + apart / 2
        return scores.softmax(-1).view(size, 3, length, length)


def test_a_slice_is_told_where_tensors_have_other_dimensions(tmp_path) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(1))
    baseline = Relative(folds_heads=True, scales_queries=True)
    assert judged(baseline, Relative(folds_heads=False, scales_queries=False), x, tmp_path).ok
    wrong = judged(baseline, Relative(folds_heads=False, scales_queries=False, start=1), x, tmp_path)
    assert "start of slice: 6 in the baseline, 5" in told(wrong)
    assert "missing" not in told(wrong)


def test_a_factor_that_is_missing_is_told_as_before(tmp_path) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(1))
    baseline = Relative(folds_heads=True, scales_queries=True)
    port = Relative(folds_heads=True, scales_queries=True)
    port.forward = lambda x: baseline.__class__.forward(port, x)  # type: ignore[method-assign]
    port.q.weight.data.mul_(2), port.q.bias.data.mul_(2)
    assert "scaled by 2" in told(judged(baseline, port, x, tmp_path))
