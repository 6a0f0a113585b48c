"""A tensor whose readers are right and contradict it was no counterpart; one that its readers agree with was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from glassengine.judge.cases import module_cases
from glassengine.judge.graphs.by_name import SitePair, pair_sites
from glassengine.judge.pairing.mispaired import walled_off
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.program import ProgramSide
from glassengine.judge.sides.protocol import Place
from glassengine.program import export_program, load_model
from tests.corpus import corpus
from tests.corpus.corpus import Bench


class Sums(nn.Module):
    """Two waves of one input, in the order that an argument says, one of them scaled; added to a much larger tensor."""

    def __init__(self, *, swapped: bool = False, factor: float = 1.0) -> None:
        super().__init__()
        self.swapped, self.factor = swapped, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.swapped:
            second, first = (x * 3).tanh(), (x * 2).tanh()
        else:
            first, second = (x * 2).tanh(), (x * 3).tanh()
        branch = torch.sigmoid(first * self.factor) - torch.sigmoid(second)
        return x * 1e6 + branch


def flagged(candidate: Sums) -> tuple[str, list[str]]:
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(2))
    model = load_model(Sums().eval())
    bench = Bench("sums/float32", model, export_program(model, inputs=[{"x": x}]), module_cases([{"x": x}])[0])
    other = export_program(load_model(candidate.eval()), inputs=[{"x": x}])
    pairs: dict[str, SitePair] = {pair.baseline.node: pair for pair in pair_sites(bench.program, other)[0]}
    side = ProgramSide(other, pairs, place=Place.CANDIDATE, replay=Replay(bench.program))
    result = corpus.judge(bench, [side])[1]
    return result.verdict, [str(origin.node) for origin in result.origins]


def test_ops_in_another_order_are_no_mistake() -> None:
    verdict, origins = flagged(Sums(swapped=True))
    assert verdict in ("identical", "rounding") and origins == []


@pytest.mark.parametrize("factor", [1.3, 1.001])
def test_an_error_that_drowns_in_what_follows_is_still_one(factor: float) -> None:
    verdict, origins = flagged(Sums(factor=factor))
    assert verdict == "wrong" and len(origins) == 1 and origins[0].startswith(("mul", "sigmoid"))


def test_every_path_must_end_at_a_contradiction() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    start = graph.call_function(torch.sin, (x,))
    first, second = (graph.call_function(torch.neg, (start,)) for _ in range(2))
    graph.output((first, second))
    assert walled_off(start, {first.name, second.name}, {first.name, second.name}) == {start.name}
    assert walled_off(start, {first.name}, {first.name, second.name}) is None
    assert walled_off(start, {first.name}, {first.name}) is None, "a result"
    assert walled_off(start, set(), set()) is None
