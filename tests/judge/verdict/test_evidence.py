"""What is kept of a divergence: the op on the side's own inputs, what should come out, and how far it may differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.protocol import Place
from glassengine.judge.site_pairs import SitePair
from glassengine.judge.verdict.evidence import EvidenceBox
from glassengine.judge.verdict.run import run_cases
from glassengine.judge.verdict.score import Score
from glassengine.program import Program
from tests.judge.hand_made import INPUTS, Numbers, case, chain


def scaled(value: Tensor) -> Tensor:
    return value * 1.01


def pairs_of(program: Program) -> dict[str, SitePair]:
    return {site.node: SitePair(site, site, "name+fingerprint", None) for site in program.sites if site.kind == "op"}


def kept(side: Numbers, num_steps: int = 1) -> tuple[Score, EvidenceBox]:
    box = EvidenceBox(chain())
    score = Score(side, chain(), evidence=box)
    run_cases(chain(), [case(num_steps)], None, [score], coarsest=None, on_step=lambda *_: None)
    return score, box


def test_with_a_program_the_op_on_its_own_inputs_is_kept() -> None:
    program = chain()
    side = Numbers(
        program,
        {"sin": scaled, "exp": scaled},
        place=Place.CANDIDATE,
        program=program,
        pairs=pairs_of(program),
        replay=Replay(program, compiled=True),
    )
    _, box = kept(side)
    found = box.get("exp", 0)
    assert found is not None and found.exact is not None and found.target is not None
    given = scaled(torch.sin(INPUTS["x"])) * 0.5
    assert torch.allclose(found.expected, torch.exp(given.double()))
    assert torch.equal(found.actual, scaled(torch.exp(given)))
    assert bool((found.allowed < (found.actual.double() - found.expected).abs()).any())
    piece = found.candidate()
    assert piece is not None and torch.equal(piece.run()[0], torch.exp(given))
    assert box.get("exp", 1) is None and box.get("mul", 0) is None


@pytest.mark.parametrize("replays", [True, False])
def test_without_a_program_the_result_alone_is_kept(replays: bool) -> None:
    replay = Replay(chain(), compiled=True) if replays else None
    _, box = kept(Numbers(chain(), {"mul": scaled}, place=Place.RECORD, replay=replay))
    found = box.get("mul", 0)
    assert found is not None and found.exact is None and found.candidate() is None
    assert torch.allclose(found.expected, torch.sin(INPUTS["x"].double()) * 0.5)
    assert found.allowed.shape == found.expected.shape and float(found.allowed.max()) < 1e-4
