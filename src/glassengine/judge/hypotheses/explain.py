"""Tries the catalog on one question and ranks what holds.

Several mistakes may make one tensor. What leaves more than a proof does, says of another op only that it is another, of
a tensor that it is not read where the candidate has all of the ops, or is written off the candidate's tensor itself
(elements that are zero, a number beyond which nothing lies, an order of its slices) describes what came out as well as
what was done: a mistake that says what was done, and makes the same, is the better one.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch.fx import Node

from glassengine.judge.hypotheses.mistakes.arguments import as_theirs, fitted_constants, origin_in, same_op, usual
from glassengine.judge.hypotheses.mistakes.candidate_ops import another_op, extra_op
from glassengine.judge.hypotheses.mistakes.catalog import DESCRIBED, FAMILIES, Family
from glassengine.judge.hypotheses.mistakes.layouts import missing_rotation, reshaped
from glassengine.judge.hypotheses.mistakes.masks import of_attention, pairs_between
from glassengine.judge.hypotheses.mistakes.operands import exchanged, left_out
from glassengine.judge.hypotheses.mistakes.operations import activations, other_ops
from glassengine.judge.hypotheses.mistakes.tensor_roles import OF_VALUES, are_of_positions, is_counted_alone, only_hides
from glassengine.judge.hypotheses.mistakes.weights_read import weights
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, called, constants_of
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import OutOfWork, edited
from glassengine.judge.site_pairs import ancestors, down, passes_on
from glassengine.numerics.float64 import is_real
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name, source_line
from glassengine.results import Altered, Hint, Kind

_log = logging.getLogger(__name__)

_EVERYWHERE = 0.9
"""Score of one mistake in several places of a region."""
_TOGETHER = 0.85
"""Score of two mistakes at once."""
_NEAR = 0.7
"""The first of two mistakes leaves no more than this share of the error."""
_MOST_FIRST = 3
_OF_TWO: tuple[Family, ...] = (same_op, weights, as_theirs, of_attention, left_out, exchanged, activations, usual)
_DIFFERS, _SEEN = 0.5, 0.8
"""Scores of what differs, and changes the result, but is not all of it; of an op that the candidate has instead."""
_TENSOR = re.compile(r"\b[A-Za-z_][\w/.]*\.\d+\b")
"""What a text calls one tensor: a mistake is the same in several places, whatever it is made to."""
_MAKER_WITHIN = 6
"""Steps above the candidate's tensor within which the op stands that made it what it is."""
_ROUNDED = 1e-5
"""By how much a number that was fitted may be off the candidate's own."""
_CLEARLY = 2.0
"""An activation of the candidate's own is nearer to what it made than the right one by this factor."""


@torch.no_grad()
def differences(question: Question) -> list[Hint]:
    """Return which arguments and weights of the candidate's op change the result by more than rounding."""
    found = []
    try:
        # Which of several weights is which is unknown here.
        held = [node for node in question.trial.inputs if node.name in question.weights]
        is_clear = len(question.trial.ops) == len(question.their_weights) == len(held) == 1
        for family in (same_op, weights) if is_clear else (same_op,):
            for hypothesis in _fitting(family, question):
                if all(passes_on(node) or traits_of(node).kind == "constant" for node in hypothesis.edits):
                    continue  # sizes and orders of axes are spelled in many ways
                if not all(_goes_on_alike(question, node) for node in hypothesis.edits):
                    continue  # other numbers belong to other ops after them: tanh(x) is 2 sigmoid(2 x) - 1
                made = question.trial.changed(hypothesis.edits)
                if question.differs(made):
                    evidence = "argument" if family is same_op else "weights"
                    found.append(hint_of(question, hypothesis, made, _DIFFERS, evidence))
        found += [] if found else _nearer_activation(question)
    except OutOfWork:
        pass
    return found


def _nearer_activation(question: Question) -> list[Hint]:
    """Return which activation the candidate's program has: where few bits prove none, it is the nearer one of two."""
    theirs = {op_name(op) for op in question.theirs if traits_of(op).kind == "activation"}
    for hypothesis in _fitting(activations, question):
        name = str(hypothesis.values[1]) if hypothesis.values else ""
        made = question.trial.changed(hypothesis.edits) if name.partition(" ")[0] in theirs else None
        if made is not None and question.left(made) * _CLEARLY < question.of_right:
            return [hint_of(question, hypothesis, made, _SEEN, "ops")]
    return []


def _goes_on_alike(question: Question, node: Node) -> bool:
    """Whether the same ops follow in the region of both sides where the candidate has an op of the same name."""
    theirs = [other for other in question.theirs if other.target is node.target]
    if not theirs:
        return True
    both = (node, question.trial.ops), (theirs[-1], question.theirs)
    here, there = ([op_name(op) for op in down([one], set(ops)) if not passes_on(op)] for one, ops in both)
    return sorted(here) == sorted(there)


@dataclass(frozen=True)
class MistakeExplanation:
    """A mistake that explains a question: its hint, where it was made, how much it settles, and what it was found by.

    `family` is one of the catalog, with its score; None of two mistakes together.
    """

    question: Question
    hint: Hint
    hypothesis: Hypothesis
    rank: Rank
    family: tuple[float, Family] | None = None


@torch.no_grad()
def explanation(question: Question, only: tuple[float, Family] | None = None) -> MistakeExplanation | None:
    """Return the best mistake that makes what the candidate made: the first that settles it; None where none fits.

    Args:
        question: What went wrong.
        only: The one family of the catalog that is asked, with its score; all of them without it.
    """
    near: list[tuple[float, Hypothesis]] = []
    best: MistakeExplanation | None = None
    waiting = deque(_every(question) if only is None else [(*only, _fitting(only[1], question))])
    try:
        question.trial.spend_first()
        while waiting:
            score, family, hypotheses = waiting[0]
            for hypothesis in hypotheses:
                hint = _explained(question, hypothesis, score, near)
                if hint is None:
                    continue
                hint = as_certain(question, family, hint)
                rank = rank_of(family, hint)
                has_all = hypothesis.lost is not None and question.has_all([hypothesis.lost, *hypothesis.edits])
                if has_all or (family is extra_op and best is not None) or _is_elsewhere(question, hypothesis):
                    rank = min(rank, Rank.DONE)
                found = MistakeExplanation(question, hint, hypothesis, rank, (score, family))
                if best is None or found.rank > best.rank:
                    best = found
                if best.rank is Rank.SETTLED:
                    return best
            waiting.popleft()
        if best is None and only is None:
            best = _of_two(question, near)
    except OutOfWork:
        question.trial.budget.num_skipped += len(waiting) or 1
    return best


def _is_elsewhere(question: Question, hypothesis: Hypothesis) -> bool:
    """Whether both sides have the line of what a mistake changes word for word, though not those of all ops above."""
    trial = question.trial
    changed = [
        op for node in hypothesis.edits for op in ([node] if node in trial.ops else node.users) if op in trial.ops
    ]
    return bool(changed) and all(map(question.is_written_alike, changed))


def _every(question: Question) -> Iterator[tuple[float, Family, Iterator[Hypothesis]]]:
    for score, family in FAMILIES:
        yield score, family, _fitting(family, question)
    for family in (missing_rotation, activations, left_out, exchanged, as_theirs, usual, other_ops, reshaped):
        yield _EVERYWHERE, family, _everywhere(question, _fitting(family, question))


def _explained(
    question: Question, hypothesis: Hypothesis, score: float, near: list[tuple[float, Hypothesis]] | None = None
) -> Hint | None:
    """Return the hint of a mistake that makes what the candidate made; None where it does not, perhaps nearly."""
    made = question.trial.changed(hypothesis.edits)
    if question.is_apart(made):
        return None
    distance = question.left(made)
    if made is None or not question.explains(made, distance):
        if near is not None and distance < _NEAR * question.of_right < math.inf:
            near.append((distance / question.of_right, hypothesis))
        return None
    lost = hypothesis.lost
    if lost is not None and lost not in hypothesis.edits and question.is_still_computed(lost):
        return None
    hypothesis = _as_missing(question, hypothesis)
    change = change_of(question, hypothesis)
    text = hypothesis.text if change.origin is None else f"{hypothesis.text} ({change.origin})"
    left, proven = question.unexplained(made), question.proves(made)
    pairs = pairs_between(question, made)
    kind: Kind = hypothesis.kind if pairs is None else "mask"
    if pairs is not None and pairs not in text:
        # Which other tensor of whole numbers holds the same mask is chance.
        is_tensor = all(isinstance(edit, torch.Tensor) for edit in hypothesis.edits.values())
        is_chance = hypothesis.kind == "position" and is_tensor
        text = pairs if is_chance else f"{pairs}; {text}"
    if kind == "other" and _only_moves(question, hypothesis):
        kind = "permuted"
    if kind in OF_VALUES and only_hides(question, hypothesis.edits):
        kind, text = "mask", f"{text}; other positions are seen"
    elif are_of_positions(question, hypothesis.edits, kind):
        kind = "position"
    elif kind == "other" and hypothesis.lost is not None and is_counted_alone(question, hypothesis.lost):
        kind = "position"  # a slope times the distance of positions, a table of sines
    return Hint(kind, text, score, proven=proven, change=change, unexplained=left)


def _as_missing(question: Question, hypothesis: Hypothesis) -> Hypothesis:
    """Say that a slice is missing where another argument makes it do nothing, and the candidate has fewer of them."""
    node, *others = hypothesis.edits
    if others or hypothesis.argument is None or not passes_on(node):
        return hypothesis
    here, there = ([op for op in ops if op.target == node.target] for ops in (question.trial.ops, question.theirs))
    call = question.trial.call(node)
    read, made = next(iter(call.args), None), edited(call, hypothesis.edits[node])
    if len(there) >= len(here) or not (isinstance(read, torch.Tensor) and isinstance(made, torch.Tensor)):
        return hypothesis
    if read.shape != made.shape or not torch.equal(read.double(), made.double()):
        return hypothesis
    text = f"{called(op_name(node))} is missing"
    return dataclasses.replace(hypothesis, text=text, argument=None, values=None)


def _only_moves(question: Question, hypothesis: Hypothesis) -> bool:
    """Whether the one op that is changed makes the same elements in another order: heads repeated in turn, not each."""
    node, *others = hypothesis.edits
    right = question.trial.values[node]
    made = edited(question.trial.call(node), hypothesis.edits[node]) if is_real(right) and not others else None
    if not isinstance(made, torch.Tensor) or made.shape != right.shape:
        return False
    return torch.equal(*(tensor.double().flatten().sort().values for tensor in (right, made)))


def _of_two(question: Question, near: list[tuple[float, Hypothesis]]) -> MistakeExplanation | None:
    """Return two mistakes that together make what the candidate made: one that leaves less, and another after it.

    More pairs fit by chance than single mistakes do, so that only a proof counts, and only where each of the two is
    needed, by more than the number of pairs that were tried.
    """
    num_tried = 0
    for share, first in sorted(near, key=lambda item: item[0])[:_MOST_FIRST]:
        trial = question.trial.after(first.edits)
        if trial is None:
            continue
        rest = dataclasses.replace(question, trial=trial)
        for family in _OF_TWO:
            for second in _fitting(family, rest):
                if second.edits.keys() & first.edits.keys():
                    continue
                num_tried += 1
                hint = _explained(rest, second, _TOGETHER)
                if hint is None or not hint.proven:
                    continue
                # What it changes may hold what the first one made: alone, it is another edit.
                same = next((one for one in _fitting(family, question) if one.text == second.text), None)
                alone = rest.right, None if same is None else question.trial.changed(same.edits)
                if not question.needs_both(trial.changed(second.edits), alone, num_tried):
                    continue
                text, edits = f"{first.text}; and {hint.text}", {**first.edits, **second.edits}
                both = dataclasses.replace(first, text=text, edits=edits)
                kind: Kind = "position" if are_of_positions(question, edits, first.kind) else first.kind
                left, change = share * (hint.unexplained or 0.0), change_of(question, both)
                found = Hint(kind, text, hint.score, proven=True, change=change, unexplained=left)
                return MistakeExplanation(question, found, both, Rank.TOGETHER)
    return None


def hint_of(question: Question, hypothesis: Hypothesis, made: torch.Tensor | None, score: float, evidence: str) -> Hint:
    """Return the hint of a mistake that need not be proven, by what it makes."""
    left, change = None if made is None else question.unexplained(made), change_of(question, hypothesis)
    return Hint(hypothesis.kind, hypothesis.text, score, evidence, change=change, unexplained=left)


def change_of(question: Question, hypothesis: Hypothesis) -> Altered:
    """Return what a mistake changes in the baseline, by the names that people know."""
    here, there = hypothesis.values or (None, None)
    origin = None
    if isinstance(there, float) and hypothesis.kind in ("scale", "other"):
        origin = origin_in(question, there)
    edited = list(hypothesis.edits)
    return Altered(
        ops=tuple(question.label(node) for node in edited if node.op != "placeholder"),
        operands=tuple(question.label(node) for node in edited if node.op == "placeholder"),
        argument=hypothesis.argument,
        baseline=_plain(here),
        candidate=_plain(there),
        axis=hypothesis.axis,
        origin=origin,
        exchanged=hypothesis.exchanged,
    )


def _plain(value: Any) -> Any:
    """Return a literal as JSON knows it."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _fitting(family: Family, question: Question) -> Iterator[Hypothesis]:
    """Yield what a family proposes up to where torch cannot compute it: a hint is not a verdict."""
    try:
        yield from family(question)
    except RuntimeError as error:
        _log.debug("%s do not fit %s: %s", getattr(family, "__name__", family), question.trial.end, error)


def _everywhere(question: Question, hypotheses: Iterable[Hypothesis]) -> Iterator[Hypothesis]:
    """Yield one mistake in all places of a region, or of one line in it, where there are several: two norms."""
    alike: dict[tuple[str | None, Kind, str], list[Hypothesis]] = {}
    for hypothesis in hypotheses:
        line = source_line(question.in_baseline(next(iter(hypothesis.edits))))
        for where in dict.fromkeys((None, line)):
            alike.setdefault((where, hypothesis.kind, _TENSOR.sub("", hypothesis.text)), []).append(hypothesis)
    asked: set[tuple[str, frozenset[Node]]] = set()
    for (_, _, text), several in alike.items():
        edits = {node: edit for one in reversed(several) for node, edit in one.edits.items()}
        if len(edits) > 1 and (text, frozenset(edits)) not in asked:
            asked.add((text, frozenset(edits)))
            yield dataclasses.replace(several[0], text=f"{several[0].text}, in {len(edits)} places", edits=edits)


class Rank(IntEnum):
    """How much an explanation settles, least first."""

    NEARLY = 0
    TOGETHER = 1
    DESCRIBED = 2
    FITS = 3
    DONE = 4
    SETTLED = 5


def rank_of(family: Callable[..., Any], hint: Hint) -> Rank:
    """Return how much a mistake settles that explains."""
    is_described = family in DESCRIBED
    if not hint.proven:
        return Rank.NEARLY if is_described or hint.kind == "other" else Rank.FITS
    if is_described:
        return Rank.DESCRIBED
    return Rank.DONE if family is another_op and hint.kind == "other" else Rank.SETTLED


def as_certain(question: Question, family: Callable[..., Any], hint: Hint) -> Hint:
    """Return a hint that is certain only if the ops of the candidate bear it out: its numbers, or what it describes."""
    if not hint.proven or not question.theirs:
        return hint
    change, makers = hint.change, DESCRIBED.get(family, ())
    if family in (usual, fitted_constants) and change is not None and isinstance(change.candidate, float):
        values = [*question.their_values, *constants_of(question.theirs)]
        is_certain = change.origin is not None or _is_made_of(change.candidate, values)
    elif not makers or hint.kind == "scale":
        return hint  # a factor is a description that any product bears out
    else:
        end = question.theirs[-1]
        near = {
            op_name(node) for node in {*question.theirs, *ancestors(end, _MAKER_WITHIN)} if node.op == "call_function"
        }
        is_certain = bool(near & set(makers))
    return hint if is_certain else dataclasses.replace(hint, proven=False)


def _is_made_of(number: float, values: Iterable[Any]) -> bool:
    """Whether a number is one of some literals, or a product, quotient, root or sum of two of them."""
    known = {0.0, 1.0, 2.0, *(float(one) for one in values if isinstance(one, (int, float)) and math.isfinite(one))}
    known |= {root for one in known if one > 0 for root in (math.sqrt(one),)}
    made = (m for a in known for b in known for m in (a * b, a / (b or 1.0), a + b, a - b, 1 / (a * b or 1.0)))
    return any(abs(abs(number) - abs(one)) <= _ROUNDED * abs(number) for one in made)
