"""Steps in which all sides have the program's own bits are judged without the float64 reference, and no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine.judge.replay.reference import ReferenceRun
from glassengine.judge.replay.replay import Cut, Replay
from glassengine.judge.sides.protocol import Place
from glassengine.judge.verdict.same_bits import equal_bits_suffice
from glassengine.judge.verdict.score import Score
from glassengine.numerics.drift import Drift
from glassengine.program import export_program, load_model
from tests.judge.hand_made import OPS, Numbers, chain, concluded, scored

own = partial(Numbers, place=Place.ENGINE)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yield a list of the steps that the reference runs."""
    steps: list[int] = []
    run = ReferenceRun.step

    def step(self: ReferenceRun, inputs: Mapping[str, Tensor], *rest: Any) -> None:
        steps.append(len(steps))
        run(self, inputs, *rest)

    monkeypatch.setattr(ReferenceRun, "step", step)
    yield steps


@pytest.mark.parametrize("cut", [None, Cut.OP, Cut.SEGMENT])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_nothing_is_measured_where_all_bits_are_equal(measured: list[int], num_steps: int, cut: Cut | None) -> None:
    program = chain()
    replay = None if cut is None else Replay(program, cut=cut)
    scores = scored(program, [own(program), own(program, replay=replay)], num_steps)
    assert not measured
    for score in scores:
        assert [pair.verdict for pair in score.pairs] == ["identical"] * len(OPS) * num_steps
        assert score.judged_nodes == set(OPS)
        assert [one.verdict for one in score.results.compared] == ["identical", "identical"]
    assert concluded(program, scores).ok


@pytest.mark.parametrize("cut", [Cut.OP, Cut.SEGMENT])
def test_all_steps_are_measured_where_one_side_differs_in_the_last(measured: list[int], cut: Cut) -> None:
    program, calls = chain(), []

    def changes(value: Tensor) -> Tensor:
        calls.append(value)
        return value * 1.01 if len(calls) % 3 == 0 else value

    side = own(program, {"mul": changes}, replay=Replay(program, cut=cut))
    _, score = scored(program, [own(program), side], 3)
    assert len(measured) == 3
    assert [(pair.step, pair.site) for pair in score.pairs if pair.verdict == "wrong" and not pair.inherited] == [
        (2, "./mul.0")
    ]


def test_a_result_that_was_not_observed_is_compared(measured: list[int]) -> None:
    program = chain()
    (score,) = scored(program, [own(program, {"add": lambda value: value + 1}, seen=("sin",))])
    assert measured
    assert [one.verdict for one in score.results.compared] == ["wrong", "identical"]


def test_nan_is_measured(measured: list[int]) -> None:
    program = chain()
    scored(program, [own(program, {"sin": lambda value: value * torch.nan})])
    assert measured


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


def test_what_equal_bits_do_not_tell() -> None:
    noise, program = export_program(load_model(Noise()), inputs=[{"x": torch.zeros(3)}]), chain()
    assert equal_bits_suffice(program, [Score(own(program), program)])
    assert not equal_bits_suffice(program, [Score(own(program), program, drift=Drift())])
    assert not equal_bits_suffice(noise, [])
