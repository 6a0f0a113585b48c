"""Recurrences that are written step by step: one mistake in every step is one mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from glassengine.judge.hypotheses.mistakes.unrolled_recurrence import recurrences
from tests.judge.hypotheses.mistakes.test_operands import asked, drawn, told

STEPS = 5


def scanned(mistake: str) -> Callable[..., Tensor]:
    def made(decay: Tensor, x: Tensor, c: Tensor) -> Tensor:
        h, read = torch.zeros(4, 3), []
        for t in range(STEPS):
            before = h
            h = h * decay[t]
            h = x[t] * 1.0 if mistake == "lost" else before + x[t] if mistake == "no decay" else h + x[t]
            read.append((before if mistake == "before" else h) @ c[t])
        return torch.stack(read)

    return made


@pytest.mark.parametrize(
    "mistake, kind, says",
    [
        ("before", "stale", "reads the state of the step before"),
        ("lost", "stale", "the state before is lost"),
        ("no decay", "scale", "is not multiplied, in 5 steps"),
    ],
)
def test_one_mistake_in_each_step(mistake: str, kind: str, says: str) -> None:
    given = {"decay": drawn(STEPS, 4, 3).sigmoid(), "x": drawn(STEPS, 4, 3, seed=1), "c": drawn(STEPS, 3, seed=2)}
    hint = told(scanned(""), scanned(mistake), given)
    assert (hint.kind, says in hint.text) == (kind, True), hint


def test_layers_that_follow_each_other_are_no_steps() -> None:
    """Three gains in three modules: that the last of them reads what the first did is no recurrence."""

    def made(gain: Tensor, x: Tensor, *, is_wrong: bool = False) -> Tensor:
        first = x * gain[0]
        between = (first.tanh() * gain[1]).tanh()
        return (first * gain[1] if is_wrong else between) * gain[2]

    given = {"gain": drawn(3, 4), "x": drawn(5, 4, seed=1)}
    question = asked(made, lambda gain, x: made(gain, x, is_wrong=True), given)
    assert any("in 3 steps" in found.text for found in recurrences(question))
    for number, node in enumerate(node for node in question.named.values() if "mul" in node.name):
        node.meta["nn_module_stack"] = {str(number): (f"layers.{number}", "Layer")}
    assert list(recurrences(question)) == []
