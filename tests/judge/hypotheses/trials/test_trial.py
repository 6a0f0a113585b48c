"""What one divergence may cost is estimated from shapes, shared by its questions, and what it leaves out is counted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from glassengine.judge.hypotheses.mistakes.catalog import FAMILIES
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Budget, OutOfWork, Trial
from glassengine.judge.pieces import Piece
from tests.judge.hypotheses.asking import explain


def _question(budget: Budget | None = None) -> Question:
    def right(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(x) * 3.0

    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    module = torch.fx.experimental.proxy_tensor.make_fx(lambda x: (right(x),), pre_dispatch=True)(x)
    end = module.graph.output_node().all_input_nodes[0].name
    trial = Trial(Piece(module, {module.graph.find_nodes(op="placeholder")[0].name: x}, (end,)), budget)
    return Question(trial, torch.nn.functional.gelu(x).double() * 3.0, None, 1e-7)


def test_a_question_leaves_a_share_for_deeper_ones_and_the_last_may_spend_it() -> None:
    budget = Budget()
    budget.begin(is_last=False)
    with pytest.raises(OutOfWork):
        for _ in range(100):
            budget.spend(1e8)
    with pytest.raises(OutOfWork):
        budget.spend(1)
    budget.begin(is_last=True)
    budget.spend(1e8)


def test_untried_mistakes_are_counted() -> None:
    assert explain(_question())[0].kind == "activation"
    spent = Budget()
    with pytest.raises(OutOfWork):
        spent.spend(1e10)
    assert explain(_question(spent)) == []
    assert spent.num_skipped > len(FAMILIES)


def test_a_few_elements_rule_out_what_explains_nothing_and_never_what_explains() -> None:
    question = _question()
    assert question.is_apart(question.right * 2)
    assert not question.is_apart(question.actual)
    # Nearer than the right one: of two mistakes it may be the first.
    assert not question.is_apart((question.actual + question.right) / 2)
    one = question.actual.clone()
    one[0, 1] += 5
    assert not dataclasses.replace(question, actual=one).is_apart(question.actual)
