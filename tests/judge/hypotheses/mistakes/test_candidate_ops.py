"""Ops that only the candidate has: an activation too many, a flip; and padding that is not the same on both sides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from glassengine.judge.hypotheses.explain import explain
from glassengine.judge.hypotheses.mistakes.candidate_ops import extra_op
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
