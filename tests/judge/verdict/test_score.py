"""Given numbers on a graph of five ops: which op is named, what is inherited, and which verdict each tensor has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from glassengine.judge.cases import module_cases
from glassengine.judge.replay.expected import ReplayedTensor
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.program import ProgramSide
from glassengine.judge.sides.protocol import Guarantee, Place
from glassengine.judge.site_pairs import SitePair, pair_sites
from glassengine.judge.verdict.score import Score, contradicted_region, is_compensated
from glassengine.numerics.exemptions import PADDING, TIES
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.kinds import KnownValues
from glassengine.numerics.verdict import Reference
from glassengine.program import export_program, load_model
from glassengine.results import FLAGGED
from tests.corpus import corpus
from tests.corpus.corpus import Bench
from tests.judge.hand_made import OPS, Edit, Numbers, chain, scored


def scaled(value: Tensor) -> Tensor:
    return value * 1.01


def rounded(value: Tensor) -> Tensor:
    return value * (1 + torch.finfo(value.dtype).eps / 2)


def broken(value: Tensor) -> Tensor:
    return torch.where(value > 0.9, torch.nan, value)


def one_element(value: Tensor) -> Tensor:
    changed = value.clone()
    changed[3, 7] += 0.5
    return changed


def shorter(value: Tensor) -> Tensor:
    return value[:4]


def judged(edits: dict[str, Edit], dumped: dict[str, Edit], seen: tuple[str, ...] = OPS, *, replays: bool) -> Score:
    program = chain()
    replay = Replay(program, compiled=True) if replays else None
    side = Numbers(program, edits, dumped, seen, place=Place.ENGINE, replay=replay)
    return scored(program, [side])[0]


# What is changed in the computation, what in the dump alone, the origins, and what inherits from them.
INTRODUCED = [
    ({}, {}, [], []),
    ({"mul": rounded, "exp": rounded}, {}, [], []),
    ({"sin": scaled}, {}, ["sin"], ["mul", "exp", "add"]),
    ({"mul": scaled}, {}, ["mul"], ["exp", "add"]),
    ({"mul": one_element}, {}, ["mul"], ["exp", "add"]),
    ({"exp": scaled}, {}, ["exp"], ["add"]),
    ({"add": scaled}, {}, ["add"], []),
    ({"tanh": scaled}, {}, ["tanh"], []),
    ({"mul": scaled, "tanh": one_element}, {}, ["mul", "tanh"], ["exp", "add"]),
    ({"sin": scaled, "exp": scaled}, {}, ["sin", "exp"], ["mul", "add"]),
    ({"sin": broken}, {}, ["sin"], ["mul", "exp", "add"]),
    ({}, {"mul": scaled}, ["mul"], []),
    ({}, {"add": one_element}, ["add"], []),
    ({}, {"exp": shorter}, ["exp"], []),
]


@pytest.mark.parametrize(("edits", "dumped", "origins", "inherited"), INTRODUCED)
def test_the_guilty_op_is_named_and_what_it_feeds_inherits(
    edits: dict[str, Edit], dumped: dict[str, Edit], origins: list[str], inherited: list[str]
) -> None:
    score = judged(edits, dumped, replays=True)
    flagged = {pair.site.removeprefix("./").split(".")[0]: pair for pair in score.pairs if pair.verdict in FLAGGED}
    assert sorted(score.divergences) == sorted(origins)
    assert sorted(name for name, pair in flagged.items() if pair.inherited) == sorted(inherited)
    assert {pair.verdict for name, pair in flagged.items() if name in origins} <= {"wrong"}
    assert score.judged_nodes == set(OPS)


@pytest.mark.parametrize(
    ("edits", "seen", "origins"),
    [
        ({}, OPS, []),
        ({"mul": scaled}, OPS, ["mul"]),
        ({"mul": scaled, "tanh": scaled}, OPS, ["mul", "tanh"]),
        # Nobody saw mul: the first tensor that shows it is named.
        ({"mul": scaled}, ("sin", "exp", "add", "tanh"), ["exp"]),
        ({"mul": scaled}, ("add", "tanh"), ["add"]),
        # Two mistakes in one chain are one without replay.
        ({"sin": scaled, "exp": scaled}, OPS, ["sin"]),
    ],
)
def test_without_replay_an_unbroken_chain_has_one_origin(
    edits: dict[str, Edit], seen: tuple[str, ...], origins: list[str]
) -> None:
    score = judged(edits, {}, seen, replays=False)
    assert sorted(score.divergences) == sorted(origins)
    assert all(pair.judged_by == "noise floor" for pair in score.pairs)


def test_an_error_that_nobody_saw_being_made_is_judged_by_the_floor_where_it_shows() -> None:
    score = judged({"mul": scaled}, {}, ("exp", "add", "tanh"), replays=True)
    by_site = {pair.site: pair for pair in score.pairs}
    assert list(score.divergences) == ["exp"]
    assert by_site["./exp.0"].judged_by == "noise floor" and by_site["./tanh.0"].judged_by == "reverse replay"


def test_a_divergence_says_what_the_op_made_and_what_it_was_given() -> None:
    score = judged({"sin": scaled, "exp": scaled}, {}, replays=True)
    sin, exp = score.divergences["sin"], score.divergences["exp"]
    assert sin.introduced is not None and sin.inherited == pytest.approx(0.0, abs=1e-12)
    assert exp.introduced is not None and exp.inherited is not None and 0 < exp.inherited < exp.introduced * 10
    assert (sin.candidate_site, sin.level, sin.step) == ("own sin", "engine", 0)


def test_steps_of_a_case_are_judged_each_and_the_first_is_named() -> None:
    program = chain()
    side = Numbers(program, {"mul": scaled}, place=Place.RELEASE, guarantee=Guarantee.RESULTS)
    (score,) = scored(program, [side], num_steps=3)
    assert {pair.step for pair in score.pairs} == {0, 1, 2}
    assert score.divergences["mul"].step == 0


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
    assert contradicted_region(start, {first.name, second.name}, {first.name, second.name}) == {start.name}
    assert contradicted_region(start, {first.name}, {first.name, second.name}) is None
    assert contradicted_region(start, {first.name}, {first.name}) is None, "a result"
    assert contradicted_region(start, set(), set()) is None


@pytest.mark.parametrize(
    ("column", "is_excused"), [(0, False), (1, False), (2, True)], ids=["below a tie", "padding", "of what counts"]
)
def test_only_an_error_of_elements_that_count_is_excused_by_the_result(column: int, is_excused: bool) -> None:
    """Of three columns the first is below a tie and the second is padding; the op makes an error in one of them."""
    exact = torch.randn(4, 3, dtype=torch.float64)
    columns = torch.arange(3).expand(4, 3)
    known = KnownValues({TIES: columns == 0, PADDING: columns == 1})
    valid, tied = columns != 1, columns == 0
    reference = Reference(exact, exact.float(), [], dtype=torch.float32, valid=valid, tied=tied, known=known)
    predicted = torch.where(columns == column, exact + 1.0, exact)
    local = ReplayedTensor(Judgement("wrong", 1e6, 0.6), predicted, reference.judge)
    tensor = exact.float()
    assert is_compensated(local, reference.judge(tensor), reference, tensor) is is_excused
