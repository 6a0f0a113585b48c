"""A side says what it can: its level, its level, what its coverage is a share of, what runs its program."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from glassengine.judge.cases import Case
from glassengine.judge.replay.replay import Cut, Replay
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.program import ProgramSide, SourceSide
from glassengine.judge.sides.protocol import Collective, Guarantee, ObservedAt, Place
from glassengine.judge.site_pairs import SitePair
from glassengine.judge.verdict.coverage import coverage, region_nodes
from glassengine.judge.verdict.score import Score
from glassengine.program import Program
from tests.judge.hand_made import OPS, Chain, Numbers, chain, scored


def pairs_of(program: Program, without: str = "") -> dict[str, SitePair]:
    sites = [site for site in program.sites if site.kind == "op" and site.node != without]
    return {site.node: SitePair(site, site, "name", None) for site in sites}


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_every_guarantee_has_words_and_a_level(guarantee: Guarantee) -> None:
    side = Numbers(chain(), place=Place.CANDIDATE, guarantee=guarantee)
    assert side.guarantee.text.startswith("judged ") and side.observed_at is guarantee.observed_at


def test_the_name_of_a_level_is_that_of_its_place() -> None:
    assert Numbers(chain(), place=Place.RELEASE).level == "release"
    assert Numbers(chain(), place=Place.PASS, detail="f.py:fuse").level == "pass f.py:fuse"
    assert ModuleSide(Chain(), chain()).level == "program"


def test_what_a_module_is_judged_at_is_not_what_a_program_is() -> None:
    program = chain()
    assert Numbers(program, place=Place.CANDIDATE).countable(program) == set(OPS)
    module = ModuleSide(Chain(), program)
    assert module.observed_at is ObservedAt.SEGMENT and module.countable(program) < set(OPS)
    assert module.program is None and module.counterparts == {} and module.reordered == ()


def test_a_program_without_the_counterpart_of_an_op_is_judged_in_regions() -> None:
    program = chain()
    found = {}
    for how in (Cut.OP, Cut.REGION):
        side = ProgramSide(program, pairs_of(program, "mul"), place=Place.CANDIDATE, replay=Replay(program, cut=how))
        (score,) = scored(program, [side])
        found[how] = (region_nodes(score), coverage(score, program, results_agree=False))
        assert "mul" not in side.counterparts and side.observed("mul") == [] and not score.divergences
    assert found[Cut.OP] == ({}, pytest.approx(4 / 5))
    assert found[Cut.REGION] == ({"mul": {"exp"}}, 1.0)


def test_a_side_of_any_kind_has_its_regions_credited() -> None:
    program = chain()
    own = replace(program)
    side = Numbers(
        program,
        {},
        {},
        ("sin", "exp", "add", "tanh"),
        place=Place.ENGINE,
        program=own,
        pairs=pairs_of(own, "mul"),
        replay=Replay(program, cut=Cut.REGION),
    )
    score = Score(side, program)
    score.judged_nodes |= {"sin", "exp", "add", "tanh"}
    assert region_nodes(score) == {"mul": {"exp"}}
    assert coverage(score, program, results_agree=False) == 1.0


def test_a_stored_file_is_replayed_in_each_case_as_in_the_first() -> None:
    program = chain()
    side = SourceSide(Chain(), program=program, replay=Replay(program))
    side.replay.ops.relative_floors["mul"] = 1.0
    side.begin(Case("inputs", 1))
    assert not side.replay.ops.relative_floors


def ratios(terms: list[torch.Tensor], *results: torch.Tensor) -> list[float]:
    return Collective("node", "name", 0, terms, results).bound_ratios()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 5])
def test_any_order_is_within_the_bound_and_a_mistake_is_not(dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    terms = [torch.randn(500, generator=generator).to(dtype) for _ in range(count)]
    for order in list(itertools.permutations(range(count)))[::7]:
        total = terms[order[0]].clone()
        for place in order[1:]:
            total += terms[place]
        assert 0 < ratios(terms, total)[0] <= 1
    right = torch.stack(terms).sum(0)
    for wrong in (right / count, right + terms[0], right - terms[-1], terms[0]):
        found = ratios(terms, right, wrong)
        assert found[0] <= 1 < found[1]


def test_what_is_no_number_or_whole() -> None:
    terms = [torch.tensor([1.0, torch.nan, 0.0]), torch.tensor([2.0, 1.0, 0.0])]
    assert ratios(terms, torch.tensor([3.0, torch.nan, 0.0])) == [0.0]
    assert ratios(terms, torch.tensor([torch.nan, 0.0, 0.0])) == [torch.inf]
    assert ratios(terms, torch.zeros(2)) == [torch.inf]
    whole = [torch.tensor([1, 2]), torch.tensor([3, 4])]
    assert ratios(whole, torch.tensor([4, 6]), torch.tensor([4, 7])) == [0.0, torch.inf]
