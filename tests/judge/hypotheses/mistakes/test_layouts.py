"""Rotations and slopes by positions: left out, turned the other way, in another order; heads that are repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glassengine.judge.hypotheses.explain import explain
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
