"""Updates that go wrong are explained by the baseline's optimizer with one mistake."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from glassengine.diagnose.training.findings import TrainingFindings
from glassengine.diagnose.training.run import train
from glassengine.diagnose.training.updates import judge_updates
from glassengine.results import Divergence
from tests.corpus import training

SAYS = {
    "not unscaled": "gradients are 1024 times as large",
    "coupled decay": "the weight decay is taken off the weights in the baseline, not in the candidate",
    "adam for adamw": "decoupled_weight_decay: True in the baseline, False in the candidate",
    "no decay": "weight_decay is missing: 0.1 in the baseline",
    "no bias correction": "the bias correction is missing",
    "half the rate": "",
    "up the slope": "maximize is on in the candidate",
    "not updated": "the parameter is not updated",
    "betas": "betas: (0.9, 0.999) in the baseline, (0.9, 0.99) in the candidate",
    "rate": "lr: 0.01 in the baseline, 0.02 in the candidate",
    "decay": "weight_decay: 0.1 in the baseline, 0.01 in the candidate",
    "epsilon of the update": "eps: 1e-08 in the baseline, 0.001 in the candidate",
    "nesterov": "nesterov: False in the baseline, True in the candidate",
    "dampening": "dampening: 0 in the baseline, 0.5 in the candidate",
    "no momentum": "momentum: 0.9 in the baseline, 0.0 in the candidate",
    "schedule a step late": "lr: 0.1 in the baseline, 0.2 in the candidate",
}


def updated(mistake: training.Trained, *, is_right: bool = False) -> list[Divergence]:
    torch.manual_seed(0)
    baseline, candidate = nn.Linear(5, 3), nn.Linear(5, 3)
    candidate.load_state_dict(baseline.state_dict())
    batches = [{"input": torch.randn(4, 5)} for _ in range(2)]
    own = mistake.baseline if is_right else mistake.candidate or mistake.baseline
    steps = train(candidate, batches, lambda out: (out - 1).square().sum(), own)
    found = TrainingFindings()
    judge_updates(found, baseline, steps, mistake.baseline)
    return found.origins


@pytest.mark.parametrize("name", SAYS)
def test_the_mistake_is_told_by_its_kind(name: str) -> None:
    mistake = training.MISTAKES[name]
    first, *_ = updated(mistake)
    (hint,) = first.hints
    assert hint.kind in mistake.kinds and SAYS[name] in hint.text, hint
    assert hint.proven, hint


def test_every_update_of_the_corpus_is_asked() -> None:
    assert {name for name, mistake in training.MISTAKES.items() if mistake.candidate is not None} == SAYS.keys()


def test_a_right_update_written_out_is_right() -> None:
    assert updated(training.Trained((), candidate=training.by_hand("")), is_right=False) == []


def test_unexplained_updates_have_no_hint() -> None:
    class Noisy(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    p.data.add_(torch.rand_like(p))

    wrong = training.Trained((), training.sgd(), lambda module: Noisy(module.parameters(), lr=0.2, momentum=0.9))
    origins = updated(wrong)
    assert origins and all(not found.hints for found in origins)
