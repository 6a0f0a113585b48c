"""A loss that has its labels moved, smoothed or counted otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from glassengine.judge.hypotheses.trials.question import Question, noise_of
from glassengine.judge.hypotheses.trials.trial import Trial
from glassengine.judge.pieces import Piece
from glassengine.results import Hint
from tests.judge.hypotheses.asking import explain

G = torch.Generator().manual_seed(0)
LOGITS, LABELS = torch.randn(2, 9, 24, generator=G), torch.randint(0, 24, (2, 9), generator=G)
LABELS[1, 6:] = -100


def asked(right: Callable[..., Tensor], made: Tensor, *given: Tensor) -> list[Hint]:
    return asked_of(make_fx(lambda *given: (right(*given),))(*given), made, *given)


def asked_of(module: GraphModule, made: Tensor, *given: Tensor) -> list[Hint]:
    names = [place.name for place in module.graph.find_nodes(op="placeholder")]
    end = module.graph.output_node().all_input_nodes[0].name
    piece = Piece(module, dict(zip(names, given, strict=True)), (end,))
    trial = Trial(piece)
    actual = made.double() if made.is_floating_point() else made
    return explain(Question(trial, actual, None, noise_of(piece, trial.right, made)))


def loss(logits: Tensor, labels: Tensor, by: int = 1, **options: float) -> Tensor:
    size = labels.shape[1] - by
    return F.cross_entropy(logits[:, :size].flatten(0, 1), labels[:, by:].flatten(), **options)  # type: ignore[arg-type]


def by_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([loss(x[None], y[None]) for x, y in zip(logits, labels, strict=True)]).mean()


def over_all(logits: Tensor, labels: Tensor) -> Tensor:
    return loss(logits, labels, reduction="sum") / labels[:, 1:].numel()


WRONG: dict[str, tuple[Tensor, str, str]] = {
    "twice": (loss(LOGITS, LABELS, 2), "position", "the position 2 later"),
    "not moved": (loss(LOGITS, LABELS, 0), "position", "the position itself"),
    "smoothed": (loss(LOGITS, LABELS, label_smoothing=0.1), "other", "smoothed by 0.1"),
    "rows": (by_rows(LOGITS, LABELS), "scale", "means of the rows"),
    "padding in the mean": (over_all(LOGITS, LABELS), "scale", "over all 16 labels"),
    "padding counted": (loss(LOGITS, LABELS.clamp(min=0)), "mask", "count in the candidate"),
    "sum": (loss(LOGITS, LABELS, reduction="sum"), "scale", "sum"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_of_a_loss_are_named(name: str) -> None:
    made, kind, text = WRONG[name]
    (hint,) = asked(loss, made, LOGITS, LABELS)
    assert hint.proven and hint.kind == kind and text in hint.text, hint


def test_a_loss_that_is_not_smoothed_is_told_where_the_loss_is_one_op() -> None:
    module = make_fx(lambda *given: (loss(*given, label_smoothing=0.1),), pre_dispatch=True)(LOGITS, LABELS)
    assert any(node.target is torch.ops.aten.cross_entropy_loss.default for node in module.graph.nodes)
    (hint,) = asked_of(module, loss(LOGITS, LABELS), LOGITS, LABELS)
    assert hint.proven and "smoothed by 0.1 in the baseline, not in the candidate" in hint.text, hint


def test_a_loss_of_other_logits_is_none_of_these() -> None:
    assert asked(loss, loss(LOGITS.roll(1, 2) * 1.01, LABELS), LOGITS, LABELS) == []


def test_labels_that_are_ignored_and_are_not() -> None:
    (hint,) = asked(lambda x: x[:, 1:], LABELS[:, 1:].clamp(min=0), LABELS)
    assert hint.proven and hint.kind == "mask" and "-100 is ignored in the baseline" in hint.text
    other = LABELS[:, 1:].clone()
    other[0, 0], other[1, 1] = 3, 4
    assert asked(lambda x: x[:, 1:], other, LABELS) == []
