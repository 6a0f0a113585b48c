"""Recurrences that are written step by step: alike ops, each of which reads what the one before it made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.tensor_roles import module_of
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, leaves_of, reading, tensors_of
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit
from glassengine.judge.site_pairs import ancestors, passes_on
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name

_LEAST_STEPS = 3
"""Fewer alike ops are not taken for steps."""


def recurrences(question: Question) -> Iterator[Hypothesis]:
    """Yield: each step of a recurrence has the same mistake: what is carried is lost, kept as it is, or one late."""
    groups: dict[Any, list[Node]] = {}
    for op in question.trial.ops:
        read = tensors_of(question.trial, op)
        if len(read) > 1 and not passes_on(op):
            shapes = tuple(question.trial.values[source].shape for _, source in read)
            # Layers that follow each other are no steps of one recurrence.
            groups.setdefault((op.target, shapes, module_of(question.in_baseline(op))), []).append(op)
    for group in groups.values():
        if len(group) >= _LEAST_STEPS:
            yield from _carried(question, group)
            yield from _one_late(question, group)


def _carried(question: Question, group: Sequence[Node]) -> Iterator[Hypothesis]:
    """Mistakes in the ops that read what is carried from step to step."""
    trial = question.trial
    for place, _ in tensors_of(trial, group[-1]):
        chain = _chain(group, place)
        if len(chain) < _LEAST_STEPS:
            continue
        (other,) = [at for at, _ in tensors_of(trial, chain[-1]) if at != place][:1]
        what, where = question.label(leaves_of(chain[-1])[place]), f"in {len(chain)} steps"
        kind = traits_of(chain[-1]).kind
        if kind in ("term", "factor"):
            verb = "multiplied" if kind == "factor" else "added"
            text = f"what each step carries on is not {verb} ({what}), {where}: the state before is lost"
            yield Hypothesis("stale", text, dict.fromkeys(chain, _alone(other)))
        if kind == "factor":
            # What is added in each step is what the recurrence is given: all of it is left out by no mistake in steps.
            text = f"{question.label(leaves_of(chain[-1])[other])} is not multiplied, {where}"
            yield Hypothesis("scale", text, dict.fromkeys(chain, _alone(place)))
        first = trial.values[leaves_of(chain[0])[place]]
        # Where it is zero, the state is lost.
        if first.shape == trial.values[leaves_of(chain[-1])[place]].shape and bool(first.any()):
            text = f"each step reads the first state ({what}), {where}"
            yield Hypothesis("stale", text, dict.fromkeys(chain[1:], reading({place: first})))


def _one_late(question: Question, group: Sequence[Node]) -> Iterator[Hypothesis]:
    """What reads the state of each step reads that of the step before it."""
    trial = question.trial
    for place, _ in tensors_of(trial, group[-1]):
        states = [leaves_of(op)[place] for op in group]
        values = [trial.values[state] for state in states]
        if len(set(states)) < len(states) or not values[0].is_floating_point():
            continue
        last, before = (question.in_baseline(state) for state in (states[-1], states[-2]))
        if before not in ancestors(last) or set(group) & ancestors(states[-1]):
            continue  # no states, or this very op carries them on
        late = [torch.zeros_like(values[0]), *values[:-1]]
        edits = {op: reading({place: value}) for op, value in zip(group, late, strict=True)}
        text = f"each {op_name(group[0])} reads the state of the step before: not {question.label(states[-1])}"
        yield Hypothesis("stale", f"{text}, in {len(group)} steps", edits)


def _chain(group: Sequence[Node], place: int) -> list[Node]:
    """Return the ops that each read by one operand what the one before it made, in order, the last of them last."""
    chain = [group[-1]]
    for op in reversed(group[:-1]):
        source = leaves_of(chain[-1])[place]
        if source is op or op in ancestors(source):
            chain.append(op)
    return chain[::-1]


def _alone(place: int) -> Edit:
    """Leave one operand, as it is when the edit is made, of the shape of the result."""
    return lambda call: call.leaves[place].expand(call.value.shape)
