"""Mistakes in a loss: labels moved, smoothed or not ignored, a mean over other elements, other labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.site_pairs import passes_on
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_LOSSES = ("nll_loss_forward", "nll_loss_nd", "nll_loss", "cross_entropy_loss", "nll_loss2d_forward")
_MOST_MOVED = 3
_MOST_ABOVE = 12
_IGNORED = -100
_MOST_ELEMENTS = 1 << 22
_ROUNDINGS = 8.0
_SHARP = 0.02
"""A number is one that people write only if rounding leaves few of those near it."""


def losses(question: Question) -> Iterator[Hypothesis]:
    """Yield: the labels of a cross entropy are moved, smoothed or not ignored, or its mean is over other tokens."""
    for node in reversed(question.trial.ops):
        if op_name(node) not in _LOSSES or len(node.args) < 2:
            continue
        logits, labels = (question.trial.tensor(source) for source in node.args[:2])
        if logits is None or labels is None or labels.is_floating_point():
            continue
        if logits.dim() != 2 or labels.dim() != 1 or logits.numel() > _MOST_ELEMENTS:
            continue
        ignored = next((arg for arg in node.args[3:] if isinstance(arg, int) and arg < 0), _IGNORED)
        smoothing = float(node.args[5]) if op_name(node) == "cross_entropy_loss" and len(node.args) > 5 else 0.0
        loss = partial(F.cross_entropy, ignore_index=ignored, label_smoothing=smoothing)
        for by, text, value in _moved(question, node, loss):
            yield Hypothesis("position", text, {node: value}, "shift", (None, by))
        for kind, text, value in _averaged(question, node, logits, labels, ignored, loss):
            yield Hypothesis(kind, text, {node: value})
        yield from _smoothed(question, node, partial(loss, logits, labels), smoothing)


def _moved(question: Question, node: Node, loss: Callable[..., Tensor]) -> Iterator[tuple[int, str, Tensor]]:
    """Yield: the label of another position than the next one, of all positions that have it."""
    logits, labels = (_whole(question, source) for source in node.args[:2])
    if logits is None or labels is None or logits.dim() != labels.dim() + 1 or logits.shape[:-1] != labels.shape:
        return
    words = {0: "the position itself", 1: "the next position", -1: "the position before"}
    for by in range(-1, _MOST_MOVED + 1):
        size = labels.shape[-1] - abs(by)
        if size < 1:
            continue
        predicting, predicted = logits.narrow(-2, max(-by, 0), size), labels.narrow(-1, max(by, 0), size)
        value = loss(predicting.flatten(0, -2), predicted.flatten())
        where = words.get(by, f"the position {by} later")
        yield by, f"the label of {where} is predicted in the candidate", value


def _averaged(
    question: Question, node: Node, logits: Tensor, labels: Tensor, ignored: int, loss: Callable[..., Tensor]
) -> Iterator[tuple[Kind, str, Tensor]]:
    """Yield: the mean counts what is ignored, or is one of the means of rows, or is a sum."""
    each = loss(logits, labels, reduction="none")
    counted = int((labels != ignored).sum())
    if not counted:
        return
    yield "scale", "the sum of the losses, not their mean", each.sum()
    if counted < len(labels):
        text = f"the mean is over all {len(labels)} labels, not over the {counted} that count"
        yield "scale", text, each.sum() / len(labels)
        every = loss(logits, labels.clamp(min=0), reduction="none")
        yield "mask", "labels that are ignored in the baseline count in the candidate, as 0", every.mean()
    rows = _whole(question, node.args[1], is_moved=True)
    if rows is not None and rows.dim() > 1 and rows.numel() == labels.numel():
        by_row, count = each.reshape(rows.shape).sum(-1), (rows != ignored).sum(-1)
        yield "scale", "the mean of the means of the rows", (by_row / count.clamp(min=1)).mean()


def _smoothed(question: Question, node: Node, loss: Callable[..., Tensor], smoothing: float) -> Iterator[Hypothesis]:
    """Yield: labels are smoothed by the number that fits, if it is one that people write; or not at all."""
    ends = []
    for share in (0.0, 1.0):
        made = question.trial.changed({node: loss(label_smoothing=share)})
        if made is None or made.shape != question.actual.shape:
            return
        ends.append(made.double())
    slope, error = ends[1] - ends[0], question.actual.double() - ends[0]
    power = float(slope.square().sum())
    fitted = float((slope * error).sum()) / power if power else 0.0
    share = float(f"{fitted:.2g}")
    rounding = _ROUNDINGS * question.noise * float(ends[0].square().sum() / power) ** 0.5 if power else 1.0
    if 0 < share < 1 and abs(fitted - share) <= rounding <= _SHARP * share:
        text, value = f"labels are smoothed by {share:g} in the candidate", loss(label_smoothing=share)
        yield Hypothesis("other", text, {node: value}, "label_smoothing", (smoothing, share))
    elif abs(fitted) <= rounding <= _SHARP * smoothing:
        text = f"labels are smoothed by {smoothing:g} in the baseline, not in the candidate"
        yield Hypothesis("other", text, {node: loss(label_smoothing=0.0)}, "label_smoothing", (smoothing, 0.0))


def _whole(question: Question, source: object, *, is_moved: bool = False) -> Tensor | None:
    """Return what labels or logits are before they are cut, put in rows or made probabilities; None if unknown.

    Args:
        question: Of the piece.
        source: The node that the loss reads.
        is_moved: Whether it may not be cut.
    """
    for _ in range(_MOST_ABOVE):
        name = op_name(source) if isinstance(source, Node) else ""
        if not isinstance(source, Node) or source.op != "call_function":
            break
        is_rows = name in ("log_softmax", "_log_softmax", "clone", "_unsafe_view", "view")
        if not (passes_on(source) or is_rows or (name == "slice" and not is_moved)):
            break
        if is_moved and (value := question.trial.values.get(source)) is not None and value.dim() > 1:
            break
        source = source.args[0]
    return question.trial.tensor(source)


def relabeled(question: Question) -> Iterator[Hypothesis]:
    """Yield: one of the whole numbers that a tensor has is another one: labels that are ignored, and here are not."""
    right, actual, end = question.right, question.actual, question.trial.end
    if right.shape != actual.shape or right.is_floating_point() or actual.is_floating_point():
        return
    if right.dtype is torch.bool or not right.numel():
        return
    apart = right != actual
    here, there = torch.unique(right[apart]), torch.unique(actual[apart])
    if len(here) == len(there) == 1 and bool((apart == (right == here[0])).all()):
        a, b = int(here[0]), int(there[0])
        what = " is ignored in the baseline, and" if a < 0 <= b else ""
        text = f"{a}{what} is {b} in the candidate, wherever it stands"
        kind: Kind = "mask" if min(a, b) < 0 else "other"
        yield Hypothesis(kind, text, {end: torch.where(right == a, b, right)}, "value", (a, b))
