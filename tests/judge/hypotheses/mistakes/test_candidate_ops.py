"""Ops and expressions that only the candidate has: an activation too many, a flip, another padding, no first stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glassengine.diagnose import check
from glassengine.judge.hypotheses.mistakes.candidate_ops import extra_op
from glassengine.results import Divergence
from tests.judge.hypotheses.asking import explain
from tests.judge.hypotheses.mistakes.test_operands import asked, drawn, told


@pytest.mark.parametrize(
    ("wrong", "kind", "says"),
    [
        (
            lambda x, y: x.sigmoid().softmax(-1) * y,
            "activation",
            "softmax of sigmoid in the candidate, none in the baseline",
        ),
        (lambda x, y: (x.sigmoid() * y).tanh(), "activation", "tanh of mul in the candidate, none in the baseline"),
        (lambda x, y: x.sigmoid() * y.flip(1), "permuted", ""),
        (lambda x, y: x.sigmoid() * y.cumsum(1), "other", "cumsum of y in the candidate, none in the baseline"),
    ],
)
def test_an_op_too_many(wrong: Callable[..., Tensor], kind: str, says: str) -> None:
    hint = told(lambda x, y: x.sigmoid() * y, wrong, {"x": drawn(2, 5, 6), "y": drawn(2, 5, 6, seed=1)})
    assert (hint.kind, says in hint.text.replace("_1", "")) == (kind, True), hint


def test_ops_multiplied_by_0_are_named() -> None:
    def right(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x.sigmoid(), y])

    hint = told(right, lambda x, y: torch.cat([x.sigmoid() * 0, y]), {"x": drawn(2, 5), "y": drawn(2, 5, seed=1)})
    assert hint.text == "sigmoid is multiplied by 0"


@pytest.mark.parametrize("wrong", [lambda x: x.sigmoid() * 1.01, lambda x: x.sigmoid() + 0.1])
def test_a_number_is_no_op_too_many(wrong: Callable[..., Tensor]) -> None:
    given = {"x": drawn(2, 5, 6)}
    assert list(extra_op(asked(torch.sigmoid, wrong, given))) == []
    assert all("none in the baseline" not in hint.text for hint in explain(asked(torch.sigmoid, wrong, given)))


def test_ops_that_both_sides_have_are_not_extra() -> None:
    given = {"x": drawn(2, 5, 6)}
    assert list(extra_op(asked(lambda x: x.tanh().exp(), lambda x: x.exp().tanh(), given))) == []
    assert explain(asked(lambda x: 2 * x.sigmoid() - 1, lambda x: (x / 2).tanh(), given)) == []


def test_an_op_on_the_other_side_of_a_norm_is_named() -> None:
    given = {"x": drawn(2, 5, 6)}
    hint = told(lambda x: F.layer_norm(x.relu(), (6,)), lambda x: F.layer_norm(x, (6,)).relu(), given)
    assert (hint.kind, hint.text) == ("activation", "relu is done to layer_norm, not to x")


@pytest.mark.parametrize("size", [8, 10])
def test_padding_as_another_framework_has_it(size: int) -> None:
    given = {"x": drawn(1, 3, size, size), "weight": drawn(4, 3, 3, 3, seed=1)}
    hint = told(
        lambda x, weight: F.conv2d(x, weight, stride=2, padding=1),
        lambda x, weight: F.conv2d(F.pad(x, (0, 1, 0, 1)), weight, stride=2),
        given,
    )
    assert "TensorFlow's SAME" in hint.text, hint


def test_rows_of_a_table_by_distances_in_another_order_are_positions() -> None:
    def biased(x: Tensor, table: Tensor, *, is_turned: bool = False) -> Tensor:
        place = torch.arange(5)
        apart = place[:, None] - place[None] + 5
        return x + F.embedding(apart.T if is_turned else apart, table).permute(2, 0, 1)

    given = {"x": drawn(3, 5, 5), "table": drawn(11, 3, seed=1)}
    hint = told(biased, lambda x, table: biased(x, table, is_turned=True), given)
    assert hint.kind == "position" and "kernel" not in hint.text, hint


def test_nothing_is_proven_where_no_number_is_left() -> None:
    """A division by zero and a root of negative numbers are alike there."""
    given = {"x": drawn(2, 5, 6), "y": drawn(2, 5, 6, seed=1)}
    hints = explain(asked(lambda x, y: x / (y.abs() + 1e-6), lambda x, y: x * y * float("nan"), given))
    assert not any(hint.proven for hint in hints), hints


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
