"""From scores of hand-made sides to one answer: which score counts, what is named first, coverage, ok."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glassengine.errors import IncomparableError
from glassengine.judge.end_to_end import Severity
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.protocol import Guarantee, Place
from glassengine.judge.verdict.conclude import joined, main_of
from glassengine.judge.verdict.score import Score
from glassengine.results import Divergence, Hint
from tests.judge.hand_made import OPS, Edit, Numbers, chain, concluded, scored

AT_RESULTS, EVERY_OP = Guarantee.RESULTS_AND_CACHES, Guarantee.EVERY_OP


def scaled(value: Tensor) -> Tensor:
    return value * 1.01


def side(
    place: Place,
    edits: dict[str, Edit] | None = None,
    seen: tuple[str, ...] = OPS,
    guarantee: Guarantee = Guarantee.EVERY_OP,
    detail: str = "",
) -> Numbers:
    replay = Replay(chain(), compiled=True) if guarantee is Guarantee.EVERY_OP else None
    return Numbers(chain(), edits or {}, {}, seen, place=place, guarantee=guarantee, replay=replay, detail=detail)


@pytest.mark.parametrize(
    ("places", "main"),
    [
        ([(Place.PROGRAM, Guarantee.SEGMENTS), (Place.ENGINE, EVERY_OP), (Place.RELEASE, AT_RESULTS)], 1),
        (
            [(Place.PROGRAM, Guarantee.SEGMENTS), (Place.PASS, EVERY_OP), (Place.ENGINE, EVERY_OP)],
            2,
        ),
        ([(Place.PROGRAM, Guarantee.SEGMENTS), (Place.UNTOUCHED, Guarantee.SEGMENTS)], 1),
        ([(Place.PROGRAM, Guarantee.SEGMENTS), (Place.RELEASE, AT_RESULTS)], 1),
        # A stored program judges itself op by op, and is nobody's candidate.
        ([(Place.SOURCE, EVERY_OP), (Place.CANDIDATE, EVERY_OP)], 1),
        ([(Place.SOURCE, Guarantee.STORED_OPS), (Place.UNTOUCHED, Guarantee.SEGMENTS)], 1),
    ],
)
def test_the_verdict_rests_on_the_first_candidate_that_is_judged_op_by_op(
    places: list[tuple[Place, Guarantee]], main: int
) -> None:
    scores = [Score(Numbers(chain(), place=place, guarantee=guarantee), chain()) for place, guarantee in places]
    assert main_of(scores) is scores[main]


@pytest.mark.parametrize(
    ("edits", "seen", "ok", "standing", "verdict", "named"),
    [
        ({}, OPS, True, "ok", "identical", None),
        ({"mul": scaled}, OPS, False, "results differ", "wrong", "./mul.0"),
        ({"tanh": scaled, "mul": scaled}, OPS, False, "results differ", "wrong", "./mul.0"),
        ({}, ("add", "tanh"), False, "too little judged", "identical", None),
        ({"add": scaled}, ("add", "tanh"), False, "results differ", "wrong", "./add.0"),
    ],
)
def test_one_side(
    edits: dict[str, Edit], seen: tuple[str, ...], ok: bool, standing: str, verdict: str, named: str | None
) -> None:
    found = concluded(chain(), scored(chain(), [side(Place.CANDIDATE, edits, seen)]))
    assert (found.ok, found.standing, found.verdict) == (ok, standing, verdict)
    assert (found.first_divergence.site if found.first_divergence else None) == named
    assert found.counts["compared"] == len(found.pairs)


def test_coverage_is_the_share_of_the_candidate_and_what_nobody_has_is_counted() -> None:
    found = concluded(chain(), scored(chain(), [side(Place.CANDIDATE, {}, ("sin", "mul", "tanh"))]), min_coverage=0.5)
    assert found.ok and found.coverage == pytest.approx(3 / 5)
    of_source = [side(Place.SOURCE), side(Place.CANDIDATE, {}, ("sin", "mul", "tanh"))]
    assert concluded(chain(), scored(chain(), of_source)).coverage == pytest.approx(3 / 5)


def test_the_first_level_that_is_wrong_is_named() -> None:
    sides = [side(Place.PASS, {"tanh": scaled}, detail="f.py:fuse"), side(Place.ENGINE, {"mul": scaled})]
    found = concluded(chain(), scored(chain(), sides))
    assert found.first_divergence is not None
    assert (found.first_divergence.level, found.first_divergence.site) == ("pass f.py:fuse", "./tanh.0")
    assert [level.name for level in found.levels] == ["pass f.py:fuse", "engine"]
    assert found.levels[0].candidate == "program after pass f.py:fuse"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (Place.ENGINE, "only the engine with debug outputs is wrong"),
        (Place.RELEASE, "only the engine without debug outputs is wrong"),
    ],
)
def test_an_error_on_one_of_two_engines_is_an_effect_of_observing(wrong: Place, words: str) -> None:
    edits = {"add": scaled}
    sides = [
        side(Place.ENGINE, edits if wrong is Place.ENGINE else {}),
        side(Place.RELEASE, edits if wrong is Place.RELEASE else {}, ("add", "tanh"), AT_RESULTS),
    ]
    found = concluded(chain(), scored(chain(), sides))
    assert found.first_divergence is not None and found.first_divergence.level == wrong
    assert any(hint.text.startswith(words) for hint in found.first_divergence.hints[:2])


def test_another_token_of_the_release_engine_is_not_ok() -> None:
    severity = Severity()
    severity.add(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), 1e-6, "case, step 1")
    sides = [side(Place.ENGINE), side(Place.RELEASE, {}, ("add", "tanh"), AT_RESULTS)]
    found = concluded(chain(), scored(chain(), sides), severity={"release": severity})
    assert (found.ok, found.standing) == (False, "token changes")
    assert found.levels[1].note is not None and "changed token: case, step 1" in found.levels[1].note


def test_a_release_engine_alone_is_a_small_share() -> None:
    release = side(Place.RELEASE, {}, ("add", "tanh"), AT_RESULTS)
    found = concluded(chain(), scored(chain(), [release]), min_coverage=0.3)
    assert found.ok and found.coverage == pytest.approx(2 / 5) and found.levels[0].coverage == pytest.approx(2 / 5)
    assert concluded(chain(), scored(chain(), [release]), min_coverage=0.9).too_little


def test_comparing_nothing_is_an_error() -> None:
    with pytest.raises(IncomparableError, match="nothing was compared"):
        concluded(chain(), scored(chain(), [side(Place.CANDIDATE, {}, ())]))


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [
        (("mean instead of sum, in 2 places", "mean instead of sum"), "mean instead of sum, in 2 places"),
        (("mean instead of sum", "relu instead of gelu"), "mean instead of sum; and relu instead of gelu"),
    ],
)
def test_a_mistake_of_several_ops_of_a_line_is_told_once(texts: tuple[str, str], wanted: str) -> None:
    found = [
        Divergence(
            None,
            0,
            site,
            None,
            site,
            "net.py:3: y",
            "wrong",
            9.0,
            None,
            None,
            None,
            (Hint("scale", text, 1.0, proven=True),),
        )
        for site, text in zip(("m/div.0", "m/sum.0"), texts, strict=True)
    ]
    assert joined(found)[0].hints[0].text == wanted
