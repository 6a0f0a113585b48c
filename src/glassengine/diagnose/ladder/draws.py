"""Models that draw random numbers: what both draw, and what both return with the same seed.

Each run draws other numbers, so that no result is compared with the reference. With one seed, two models that draw the
same in the same order get the same numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.end_to_end import Seeded
from glassengine.judge.exclusions.perturbation import unread_nodes
from glassengine.numerics.drift import SAME_DB, signal_of
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.program import Program
from glassengine.program.representation.signature import named_results
from glassengine.program.user_code.forward import uncompiled
from glassengine.program.user_code.module_state import applied_state, own_copies
from glassengine.results.sentences import place_of

_ROUNDING = 1e-6
"""Relative change of the inputs after which results that rounding does not decide are the same."""

_DISTRIBUTIONS = {
    "rand": "uniform",
    "bernoulli": "uniform",  # as written by hand: rand() < p
    "dropout": "uniform",
    "native_dropout": "uniform",
    "randn": "normal",
}


class _Draw(NamedTuple):
    """Numbers that an op draws: their distribution and shape; a size that varies is -1."""

    distribution: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.distribution} numbers {list(self.shape)}"


def with_one_seed(ours: Any, theirs: Any, step: Mapping[str, Any], programs: tuple[Program, Program]) -> Seeded | None:
    """Return what both models return with the same seed; None where neither draws, or a forward raises.

    Args:
        ours: Side of the baseline's module.
        theirs: Side of the candidate's.
        step: Inputs.
        programs: Of both.
    """
    if not any(_random(program) for program in programs):
        return None
    try:
        first, again, other = _returned(ours, step), _returned(ours, _nudged(step)), _returned(theirs, step)
    except Exception:  # of a user's code: the forward raises again where it is judged, and is reported there
        return None
    if len(first) == len(other) and not first.keys() & other.keys():
        other = dict(zip(first, other.values(), strict=True))
    shared = [name for name in first if name in other]
    if not shared:
        return None
    worst = min(shared, key=lambda name: signal_of(first[name], other[name]))
    found, steady = signal_of(first[worst], other[worst]), signal_of(first[worst], again[worst])
    size = "" if math.isinf(found) else f" ({found:.0f} dB)"
    if found > SAME_DB:
        return Seeded(f"with one seed both models return the same {worst}{size}", is_known=True)
    drawn = [[(_kind(node), _shape(node)) for node in _random(program)] for program in programs]
    text = f"with one seed the models differ in {worst}{size}"
    return Seeded(text, is_known=drawn[0] != drawn[1] or steady < SAME_DB, other_draws=tuple(_differences(*programs)))


def _returned(side: Any, step: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    arguments = dict(step) if side.arguments is None else side.arguments.of(step)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), applied_state(side.module, side.state):
        torch.manual_seed(0)
        with uncompiled(side.module) as module:  # compiled code may draw otherwise
            return named_results(module(**own_copies(arguments)))


def _nudged(step: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value * (1 + _ROUNDING) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in step.items()
    }


def _random(program: Program) -> list[Node]:
    return [node for node in program.graph.nodes if traits_of(node).is_random]


def _draws(program: Program) -> Iterator[tuple[_Draw, str]]:
    """Yield what each op draws that a result is made of, and its line."""
    unread = unread_nodes(program)
    for node in [one for one in _random(program) if one.name not in unread]:
        kind, sites = _kind(node), program.sites.by_node.get(node.name)
        source = sites[0].source if sites else None
        yield _Draw(_DISTRIBUTIONS.get(kind, kind), _shape(node)), f" ({place_of(source)})" if source else ""


def _kind(node: Node) -> str:
    return op_name(node).removesuffix("_like").removesuffix("_functional")


def _shape(node: Node) -> tuple[int, ...]:
    """Return the shape of what an op draws: of a dropout, of what it leaves."""
    return tuple(size if isinstance(size, int) else -1 for size in pytree.tree_leaves(node.meta["val"])[0].shape)


def _differences(baseline: Program, candidate: Program) -> Iterator[str]:
    """Yield what one side draws and the other does not; as many numbers in other shapes are the same."""
    both = ours, theirs = list(_draws(baseline)), list(_draws(candidate))
    totals: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for total, drawn in zip(totals, both, strict=True):
        for draw, _ in drawn:
            if -1 in draw.shape:
                return
            total[draw.distribution] += math.prod(draw.shape)
    more, less = (Counter(draw for draw, _ in drawn) for drawn in (theirs, ours))
    here, there = (
        [(draw, line) for draw, line in drawn if draw in alone and len({one[draw.distribution] for one in totals}) > 1]
        for drawn, alone in ((ours, less - more), (theirs, more - less))
    )
    for (own, line), (other, their_line) in zip(here, there, strict=False):
        yield f"the candidate draws {other}{their_line}, the baseline {own}{line}"
    for draw, line in here[len(there) :]:
        yield f"the candidate does not draw {draw}{line}"
    for draw, line in there[len(here) :]:
        yield f"the candidate also draws {draw}{line}"
