"""Expressions of a candidate, and steps of a recurrence that are not taken for each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from glassengine.diagnose import check
from glassengine.results import Divergence


class Buckets(nn.Module):
    """Counts edges below a value; a port may move an edge and compare otherwise."""

    def __init__(self, *, is_moved: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(6, 6)
        self.register_buffer("edges", torch.linspace(-1, 1, 9))
        self.is_moved = is_moved

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)[..., None]
        assert isinstance(self.edges, Tensor)
        is_below = y <= self.edges + 0.3 if self.is_moved else y < self.edges
        return y[..., 0] * is_below.float().sum(-1)


class Steps(nn.Module):
    """Three steps of one field; a port may leave out what the first stage adds."""

    def __init__(self, *, is_left_out: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.field, self.is_left_out = nn.Linear(4, 4), is_left_out

    def forward(self, y: Tensor) -> Tensor:
        y = torch.tanh(y)
        for _ in range(3):
            first = torch.tanh(self.field(y))
            second = torch.tanh(self.field(y if self.is_left_out else y + 0.3 * first))
            y = y + 0.1 * (second - first * 0.5)
        return y


class Shared(nn.Module):
    """Attends with the first of four heads of keys for all queries."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (one(x).view(3, 1, 4, 2) for one in (self.q, self.k))
        return attended(q, k[:, :, :1])


class NotShared(Shared):
    """Attends with each head of keys."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = (one(x).view(3, 1, 4, 2) for one in (self.q, self.k))
        return attended(q, k)


def attended(q: Tensor, k: Tensor) -> Tensor:
    """Repeats the heads of keys where there are fewer."""
    q, k = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3)
    k = k.repeat_interleave(4, dim=1) if k.shape[1] == 1 else k
    return q @ k.transpose(-1, -2)


class Fitted(nn.Module):
    """Takes the mean of the first rows; a port may take that of all."""

    def __init__(self, *, takes_all: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.takes_all = nn.Linear(6, 2), takes_all

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y - mean_of(y if self.takes_all else y[:2])


def mean_of(x: Tensor) -> Tensor:
    return x.mean(0, keepdim=True)


def divergence(baseline: nn.Module, candidate: nn.Module, width: int) -> Divergence:
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    found = check(baseline, candidate=candidate, inputs={"x" if width == 6 else "y": x}).first_divergence
    assert found is not None
    return found


def test_an_expression_with_two_mistakes_is_written_out() -> None:
    found = divergence(Buckets(), Buckets(is_moved=True), 6)
    assert found.site == "./lt.0" and found.hints[0].proven
    assert "< edges in the baseline" in found.hints[0].text and "<= (edges + 0.3) in" in found.hints[0].text
    assert found.candidate_source is not None and "0.3 if self.is_moved" in found.candidate_source


def test_a_stage_is_not_that_of_a_later_step() -> None:
    found = divergence(Steps(), Steps(is_left_out=True), 4)
    assert found.site == "./add.0" and found.hints[0].proven and "is not added" in found.hints[0].text


def test_ops_that_the_candidate_passes_by_are_missing() -> None:
    found = divergence(Shared(), NotShared(), 6)
    assert found.hints[0].text == "slice, repeat_interleave is missing: k/linear.0 is passed on as it is"
    assert found.candidate_source is not None and found.candidate_source.endswith("return attended(q, k)")


def test_a_slice_that_takes_everything_is_missing() -> None:
    found = divergence(Fitted(), Fitted(takes_all=True), 6)
    assert found.hints[0].text == "slice is missing"
