"""Mistakes that are named: the place through which a wrong gradient flows, and what an update did otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine import check_training
from glassengine.diagnose.training_check import TrainingFindings, judge_updates
from glassengine.diagnose.training_run import train
from glassengine.results import Divergence
from tests.corpus import training


class Gated(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.a, self.b, self.c = kind, nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        with torch.set_grad_enabled(self.kind != "no_grad"):
            gate = torch.sigmoid(self.b(h))
        e = (h * (gate.detach() if self.kind == "gate" else gate)).exp()
        total = e.sum(-1, keepdim=True)
        y = self.c(e / (total.detach() if self.kind == "total" else total))
        if self.kind == "twice":
            y = 2 * y - y.detach()
        if self.kind == "sign":
            y = 2 * y.detach() - y
        return y + (h.detach() if self.kind == "skip" else h)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.softmax(x, -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return ctx.saved_tensors[0] * gradient


class Scored(nn.Module):
    def __init__(self, is_wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.c, self.is_wrong = nn.Linear(8, 8), nn.Linear(8, 8), is_wrong

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.c(Softmax.apply(h) if self.is_wrong else torch.softmax(h, -1))  # type: ignore[no-untyped-call]


def judged(baseline: nn.Module, candidate: nn.Module) -> Any:
    torch.manual_seed(1)
    return check_training(baseline, candidate, inputs=[{"x": torch.randn(4, 8)}], loss=lambda y: y.pow(2).mean())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("gate", "sigmoid.0 is detached before mul.0: no gradient flows back"),
        ("no_grad", "sigmoid.0 is detached before mul.0: no gradient flows back"),
        ("total", "sum.0 is detached before div.0: no gradient flows back"),
        ("skip", "tanh.0 is detached before add.0: no gradient flows back"),
        ("twice", "the gradient from add.0 to addmm.0 is 2 times the right one"),
        ("sign", "the gradient from add.0 to addmm.0 has the other sign"),
    ],
)
def test_the_gradient_is_named(kind: str, text: str) -> None:
    result = judged(Gated(""), Gated(kind))
    (origin,) = result.origins
    assert (origin.level, origin.hints[0].text, origin.hints[0].proven) == ("backward", text, True)
    assert text in result.not_ok_because and "the loss agrees" in result.not_ok_because


def test_an_op_of_a_backward_is_no_mistake_of_the_forward() -> None:
    result = judged(Scored(False), Scored(True))
    assert not result.ok and result.first_divergence.level == "backward"
    assert not any(hint.proven for origin in result.origins for hint in origin.hints)
    assert result.first_divergence.hints[0].text.startswith("in the gradient of ")


class Passes(nn.Module):
    def __init__(self, is_wrong: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.is_wrong = nn.Linear(8, 8), nn.Linear(8, 8), is_wrong

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            back = self.b(x)
            x = torch.tanh(self.a(x) - (back.detach() if self.is_wrong else back))
        return x


def test_one_line_that_is_detached_in_every_pass_is_named() -> None:
    result = judged(Passes(False), Passes(True))
    (hint, *_) = result.first_divergence.hints
    assert hint.proven and "is detached before sub" in hint.text and hint.text.endswith("in 3 places")
    assert judged(Passes(True), Passes(True)).ok


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
