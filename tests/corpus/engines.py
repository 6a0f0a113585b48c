"""Real engines for the corpus, made and observed by the code of `glass check`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.levels import add_built, add_engine
from glassengine.engine.build.build import build_program
from glassengine.judge.cases import Case
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.protocol import Side
from glassengine.program import Program
from tests.corpus.corpus import Bench


def built(bench: Bench, backend: str, cases: Sequence[Case], stack: ExitStack) -> list[Side]:
    """Return the observed engine and the release engine of the unchanged program, able to run `cases`."""
    climb = _climb(bench, cases, stack)
    add_built(climb, backend, (), lambda text: None)
    return [_with_margins(score.side) for score in climb.scores]


def built_from(
    bench: Bench, program: Program, backend: str, cases: Sequence[Case], folder: Path, stack: ExitStack
) -> Side:
    """Return the observed engine of a changed program: it is judged by the names and ops of the unchanged one."""
    climb = _climb(bench, cases, stack)
    sizes: dict[str, Any] = {}
    if bench.case.input_ids is not None:
        sizes = {
            "max_batch_size": max(case.batch for case in cases),
            "max_seq_len": max(case.cache_length for case in cases),
        }
    add_engine(climb, build_program(program, folder, backend=backend, **sizes), lambda text: None)
    return _with_margins(climb.scores[0].side)


def _with_margins(side: Side) -> Side:
    """Have the bound ratio worked out for every tensor."""
    if side.replay is not None:
        side.replay.ops.worth_a_bound = 0.0
    return side


def _climb(bench: Bench, cases: Sequence[Case], stack: ExitStack) -> Climb:
    return Climb(
        bench.model, bench.program, list(cases), ModuleSide(bench.model.module, bench.program), [], stack=stack
    )
