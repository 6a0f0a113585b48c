"""Rotations and slopes by positions: left out, turned the other way, in another order; heads that are repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.judge.hypotheses.asking import explain
from tests.judge.hypotheses.mistakes.test_operands import asked, drawn, told

GIVEN = {"q": drawn(2, 5, 8), "k": drawn(2, 5, 8, seed=1)}


def rotated(x: Tensor, *, sign: float = 1.0, is_interleaved: bool = False) -> Tensor:
    angles = torch.outer(torch.arange(5).float(), 10.0 ** -(torch.arange(0, 8, 2) / 8))
    angles = angles.repeat_interleave(2, -1) if is_interleaved else torch.cat([angles, angles], -1)
    half = torch.cat([-x[..., 4:], x[..., :4]], -1)
    return x * angles.cos() + sign * half * angles.sin()


def scores(q: Tensor, k: Tensor) -> Tensor:
    return rotated(q) @ rotated(k).transpose(-1, -2)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda q, k: q @ k.transpose(-1, -2), "a rotation by positions is left out, in 2 places"),
        (lambda q, k: q @ rotated(k).transpose(-1, -2), "a rotation by positions is left out"),
        (lambda q, k: rotated(q) @ k.transpose(-1, -2), "a rotation by positions is left out"),
    ],
)
def test_queries_and_keys_that_are_not_turned(wrong: Callable[..., Tensor], says: str) -> None:
    hint = told(scores, wrong, GIVEN)
    assert (hint.kind, hint.text) == ("position", says)


def test_a_half_with_the_other_sign_is_turned_the_other_way() -> None:
    given = {"x": drawn(2, 5, 8)}
    assert told(rotated, lambda x: rotated(x, sign=-1.0), given).kind == "position"


def test_angles_in_another_order_are_other_positions() -> None:
    def angles(x: Tensor, *, is_interleaved: bool = False) -> Tensor:
        made = torch.outer(torch.arange(5).float(), x[0].abs())
        return (made.repeat_interleave(2, -1) if is_interleaved else torch.cat([made, made], -1)).cos()

    (hint,) = explain(asked(angles, lambda table: angles(table, is_interleaved=True), {"table": drawn(1, 4)}))
    assert hint.kind == "position" and "interleaved" in hint.text, hint


def test_a_slope_of_distances_that_is_left_out_is_one_of_positions() -> None:
    """A bias that is stored is none, and what comes in is none either."""

    def sloped(x: Tensor) -> Tensor:
        place = torch.arange(5)
        return x - (place[:, None] - place[None]).float() * 0.3

    hint = told(sloped, lambda x: x + 0, {"x": drawn(2, 5, 5)})
    assert (hint.kind, "is not subtracted" in hint.text) == ("position", True), hint
    given = {"x": drawn(2, 5, 5), "table": drawn(5, 5, seed=1)}
    assert told(lambda x, table: x + table, lambda x, table: x + 0 * table, given).kind == "bias missing"


def test_heads_that_are_repeated_in_turn_are_in_another_order() -> None:
    given = {"k": drawn(2, 3, 5, 4)}
    hint = told(lambda k: k.repeat_interleave(2, 1), lambda k: k.repeat(1, 2, 1, 1), given)
    assert hint.kind == "permuted", hint


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
        (
            by_thirds,
            by_heads,
            "as 4 x 3 x 6 in the candidate, as 3 x 4 x 6 in the baseline: each head holds its 3 parts",
        ),
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
            "one part after the other in the candidate, its 4 parts in each of 2 groups in the baseline",
        ),
    ],
)
def test_groups_of_queries(right: Callable[..., Tensor], wrong: Callable[..., Tensor], says: str) -> None:
    hint = told(right, wrong, {"x": drawn(2, 5, sum(SIZES))})
    assert (hint.kind, hint.proven, says in hint.text) == ("permuted", True, True), hint


def test_right_layouts_have_no_hint() -> None:
    given = {"x": drawn(2, 5, 3 * HEADS * WIDTH)}
    assert explain(asked(by_thirds, by_thirds_written_otherwise, given)) == []
    assert explain(asked(sliced, by_thirds, given)) == []


def test_a_rotation_by_stored_tables_is_left_out() -> None:
    """Tables that were read from a checkpoint are not seen to be sines: halves of which one is negated are seen."""

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin

    angles = torch.arange(1.0, 7.0)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001]).repeat_interleave(2)
    given = {"x": drawn(2, 6, 8), "table": angles.cos(), "weight": angles.sin()}
    hint = told(turned, lambda x, cos, sin: x.clone(), given)
    assert (hint.kind, hint.text) == ("position", "a rotation by positions is left out: that of arg0_1")


def test_axes_that_are_put_together_otherwise_before_an_op_and_taken_apart_so_after_it() -> None:
    """No tensor between the two is one of the baseline: the mistake is in both places."""

    def scaled(x: Tensor, weight: Tensor, *, is_turned: bool = False) -> Tensor:
        flat = (x.transpose(1, 2) if is_turned else x).reshape(2, 20) * weight
        return flat.reshape(2, 5, 4).transpose(1, 2) if is_turned else flat.reshape(2, 4, 5)

    given = {"x": drawn(2, 4, 5), "weight": drawn(20, seed=1)}
    hint = told(scaled, lambda x, weight: scaled(x, weight, is_turned=True), given)
    assert hint.text == (
        "axes are put together as 5 x 4 in the candidate, as 4 x 5 in the baseline: parts are interleaved, "
        "and what is made is taken apart so again"
    )


def test_an_op_along_a_part_of_an_axis_that_is_put_together() -> None:
    hint = told(
        lambda x: x.reshape(2, 20).softmax(-1) * 2, lambda x: x.softmax(-1).reshape(2, 20) * 2, {"x": drawn(2, 4, 5)}
    )
    assert hint.text == "softmax is along axis 2 of 2 x 4 x 5, not along axis -1 of 2 x 20"


def test_sides_of_a_difference_that_are_expanded_are_exchanged() -> None:
    def apart(x: Tensor, *, is_turned: bool = False) -> Tensor:
        one, other = x[:, :, None], x[:, None]
        return (other - one if is_turned else one - other).exp()

    hint = told(apart, lambda x: apart(x, is_turned=True), {"x": drawn(2, 5, 3)})
    assert hint.kind == "swapped" and "of sub are exchanged" in hint.text


@pytest.mark.parametrize("is_split", [True, False])
def test_windows_are_of_rows_and_columns(is_split: bool) -> None:
    """Both axes are wrong at once, and neither alone explains anything."""

    def right(x: Tensor) -> Tensor:
        return x.reshape(2, 4, 3, 5, 3).cos() if is_split else x.reshape(2, 4, 3, 5, 3).cos().reshape(2, 12, 15)

    def wrong(x: Tensor) -> Tensor:
        if is_split:
            return x.reshape(2, 3, 4, 3, 5).permute(0, 2, 1, 4, 3).cos()
        return x.reshape(2, 4, 3, 5, 3).cos().permute(0, 2, 1, 4, 3).reshape(2, 12, 15)

    hint = told(right, wrong, {"x": drawn(2, 12, 15)})
    assert hint.proven and hint.text.endswith("in 2 places")


def test_heads_that_are_joined_in_turn_are_not_called_rotated() -> None:
    """What is added to them has the same shape, and is turned by nothing."""
    in_turn = torch.arange(8).reshape(2, 4).T.reshape(-1)
    given = {"heads": drawn(3, 5, 8), "x": drawn(3, 5, 8, seed=1)}
    (hint,) = explain(asked(lambda heads, x: heads + x, lambda heads, x: heads[..., in_turn] + x, given))
    assert hint.text == "heads: interleaved halves (axis 2)", hint
