"""Try the catalog on one question and tell what holds."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.fx import Node

from glassengine.judge.graphs.between import passes_on
from glassengine.judge.hypotheses.mistakes.arguments import as_theirs, same_op, usual
from glassengine.judge.hypotheses.mistakes.catalog import FAMILIES, Family
from glassengine.judge.hypotheses.mistakes.layouts import reshaped
from glassengine.judge.hypotheses.mistakes.operations import other_ops
from glassengine.judge.hypotheses.mistakes.weights_read import weights
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Edit, OutOfWork
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Hint

_log = logging.getLogger(__name__)

_EVERYWHERE = 0.9
"""Score of one mistake in several places of a region."""
_DIFFERS = 0.5
"""Score of what differs, and changes the result, but is not all of it."""


@torch.no_grad()
def differences(question: Question) -> list[Hint]:
    """Return which arguments and weights of the candidate's op change the result by more than rounding."""
    found = []
    try:
        # Which of several weights is which is unknown here.
        is_clear = len(question.trial.ops) == 1 and len(question.their_weights) == len(question.weights) == 1
        for family in (same_op, weights) if is_clear else (same_op,):
            for hypothesis in _fitting(family, question):
                if all(passes_on(node) or traits_of(node).kind == "constant" for node in hypothesis.edits):
                    continue  # sizes and orders of axes are spelled in many ways
                if not all(_goes_on_alike(question, node) for node in hypothesis.edits):
                    continue  # other numbers belong to other ops after them: tanh(x) is 2 sigmoid(2 x) - 1
                if question.differs(question.trial.changed(hypothesis.edits)):
                    found.append(Hint(hypothesis.kind, hypothesis.text, _DIFFERS))
    except OutOfWork:
        pass
    return found


def _goes_on_alike(question: Question, node: Node) -> bool:
    """Whether the same ops follow in the region of both sides where the candidate has an op of the same name."""
    theirs = [other for other in question.theirs if other.target is node.target]
    if not theirs:
        return True
    return _following(node, question.trial.ops) == _following(theirs[-1], question.theirs)


def _following(node: Node, ops: Sequence[Node]) -> list[str]:
    below = {node}
    for op in ops:
        if below & set(op.all_input_nodes):
            below.add(op)
    return sorted(op_name(op) for op in below - {node} if not passes_on(op))


def explain(question: Question) -> list[Hint]:
    """Return the first mistake of the catalog that makes what the candidate made; none where nothing does."""
    found = explanation(question)
    return [] if found is None else [found[0]]


@torch.no_grad()
def explanation(question: Question) -> tuple[Hint, Hypothesis] | None:
    """Return the same, and the mistake itself, which knows where it was made; None where nothing fits."""
    try:
        for score, family in FAMILIES:
            for hypothesis in _fitting(family, question):
                if question.explains(question.trial.changed(hypothesis.edits)):
                    return Hint(hypothesis.kind, hypothesis.text, score), hypothesis
        for family in (as_theirs, usual, other_ops, reshaped):
            for hypothesis in _everywhere(_fitting(family, question)):
                if question.explains(question.trial.changed(hypothesis.edits)):
                    return Hint(hypothesis.kind, hypothesis.text, _EVERYWHERE), hypothesis
    except OutOfWork:
        pass
    return None


def _fitting(family: Family, question: Question) -> Iterator[Hypothesis]:
    """Yield what a family proposes up to where torch cannot compute it: a hint is not a verdict."""
    try:
        yield from family(question)
    except RuntimeError as error:
        _log.debug("%s do not fit %s: %s", getattr(family, "__name__", family), question.trial.end, error)


def _everywhere(hypotheses: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
    """Yield one mistake in all places of a region at once, where there are several: two norms, three convolutions."""
    alike: dict[tuple[str, str], dict[Node, Edit]] = {}
    for hypothesis in hypotheses:
        alike.setdefault((hypothesis.kind, hypothesis.text), {}).update(hypothesis.edits)
    for (kind, text), edits in alike.items():
        if len(edits) > 1:
            yield Hypothesis(kind, f"{text}, in {len(edits)} places", edits)
