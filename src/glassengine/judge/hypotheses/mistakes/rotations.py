"""Rotations by positions that are not made: queries and keys go on as they are."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from glassengine.judge.hypotheses.mistakes.roles import turned_by
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit


def unturned(question: Question) -> Iterator[Hypothesis]:
    """Yield: what a rotation turns goes on as it is; of the same words for all, as they are left out together."""
    trial = question.trial
    held = {node.name: trial.values[node] for node in [*trial.inputs, *trial.ops]}
    for node in trial.ops:
        own = question.named.get(node.name)
        turned = None if own is None else turned_by(own)
        value, made = None if turned is None else held.get(turned.name), trial.values[node]
        if isinstance(value, torch.Tensor) and isinstance(made, torch.Tensor) and value.shape == made.shape:
            yield Hypothesis("position", "a rotation by positions is left out", {node: _value(value)})


def _value(value: torch.Tensor) -> Edit:
    return lambda call: value
