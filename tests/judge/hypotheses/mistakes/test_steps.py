"""Recurrences that are written step by step: one mistake in every step is one mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.judge.hypotheses.mistakes.test_operands import drawn, told

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
