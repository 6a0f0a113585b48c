"""Queries, keys and values of one product that lie in another order, and layouts that a right port has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor
from torch.nn import functional as F

from glassengine.judge.hypotheses.explain import explain
from tests.judge.hypotheses.mistakes.test_operands import asked, drawn, told

HEADS, WIDTH, GROUPS = 4, 6, 2
SIZES = [HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of heads [rows, positions, heads, width]."""
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True)


def by_thirds(x: Tensor) -> Tensor:
    return attention(*(part.view(2, 5, HEADS, WIDTH) for part in x.chunk(3, -1)))


def by_thirds_written_otherwise(x: Tensor) -> Tensor:
    return attention(*x.view(2, 5, 3, HEADS, WIDTH).unbind(2))


def sliced(x: Tensor) -> Tensor:
    size = HEADS * WIDTH
    return attention(*(x[..., i * size : (i + 1) * size].reshape(2, 5, HEADS, WIDTH) for i in range(3)))


def by_heads(x: Tensor) -> Tensor:
    return attention(*x.view(2, 5, HEADS, 3, WIDTH).unbind(3))


def by_heads_split_afterwards(x: Tensor) -> Tensor:
    return attention(*x.view(2, 5, HEADS, 3 * WIDTH).chunk(3, -1))


def by_width(x: Tensor) -> Tensor:
    return attention(*x.view(2, 5, WIDTH, 3, HEADS).permute(3, 0, 1, 4, 2))


def products_by_thirds(x: Tensor) -> Tensor:
    """Without the values."""
    q, k, _ = (part.view(2, 5, HEADS, WIDTH).transpose(1, 2) for part in x.chunk(3, -1))
    return q @ k.transpose(-1, -2)


def products_by_heads(x: Tensor) -> Tensor:
    q, k, _ = (part.transpose(1, 2) for part in x.view(2, 5, HEADS, 3, WIDTH).unbind(3))
    return q @ k.transpose(-1, -2)


def one_after_the_other(x: Tensor) -> Tensor:
    return attention(*(part.unflatten(-1, (-1, WIDTH)) for part in x.split(SIZES, -1)))


def grouped(x: Tensor) -> Tensor:
    parts = x.view(2, 5, GROUPS, HEADS // GROUPS + 2, WIDTH)
    return attention(parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :])


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (by_thirds, by_heads, "as 4 x 3 x 6 in the candidate, as 3 x 4 x 6 here: each head holds its 3 parts"),
        (by_thirds, by_heads_split_afterwards, "as 4 x 3 x 6 in the candidate"),
        (sliced, by_heads, "as 4 x 3 x 6 in the candidate"),
        (by_thirds, by_width, "as 6 x 3 x 4 in the candidate"),
        (by_heads, by_thirds, "3 x 4 x 6"),
        (by_heads_split_afterwards, by_thirds, "parts of heads are mixed"),
        (products_by_thirds, products_by_heads, "as 4 x 3 x 6 in the candidate"),
    ],
)
def test_parts_of_heads(right: Callable[..., Tensor], wrong: Callable[..., Tensor], says: str) -> None:
    hint = told(right, wrong, {"x": drawn(2, 5, 3 * HEADS * WIDTH)})
    assert (hint.kind, hint.proven, says in hint.text) == ("permuted", True, True), hint


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (one_after_the_other, grouped, "holds its 3 parts in each of 2 groups in the candidate"),
        (
            grouped,
            one_after_the_other,
            "one part after the other in the candidate, its 4 parts in each of 2 groups here",
        ),
    ],
)
def test_groups_of_queries(right: Callable[..., Tensor], wrong: Callable[..., Tensor], says: str) -> None:
    hint = told(right, wrong, {"x": drawn(2, 5, sum(SIZES))})
    assert (hint.kind, hint.proven, says in hint.text) == ("permuted", True, True), hint


def test_what_is_right_has_no_hint() -> None:
    given = {"x": drawn(2, 5, 3 * HEADS * WIDTH)}
    assert explain(asked(by_thirds, by_thirds_written_otherwise, given)) == []
    assert explain(asked(sliced, by_thirds, given)) == []
