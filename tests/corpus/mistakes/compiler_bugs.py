"""Bugs of a compiler: Inductor's own, which it can put into its code for tests, through a real engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from glassengine.judge.cases import Case
from glassengine.judge.sides.protocol import Side
from glassengine.program.representation.naming import op_name
from tests.corpus.corpus import Bench, Planted
from tests.corpus.edits import DoesNotApply, Edit, Mistake, Mutant
from tests.corpus.engines import built_from
from tests.corpus.truth import Guilt


@dataclass(frozen=True)
class CompilerBug:
    """A setting of Inductor under which it generates wrong code for `ops`."""

    name: str
    setting: str
    ops: tuple[str, ...]


COMPILER_BUGS = (
    CompilerBug("inductor_relu", "cpp.inject_relu_bug_TESTING_ONLY", ("relu",)),
    CompilerBug("inductor_log1p", "cpp.inject_log1p_bug_TESTING_ONLY", ("log1p", "softplus")),
)
"""All that Inductor has for CPUs: x + 1 instead of relu(x), and instead of log1p(x)."""


def _made_by_the_compiler(edit: Edit) -> None:
    """Refuse: the program is right."""
    raise DoesNotApply


def built_with_bug(
    bench: Bench, bug: CompilerBug, cases: Sequence[Case], folder: Path, stack: ExitStack
) -> tuple[Planted, Side]:
    """Return the truth, and the observed engine that Inductor builds of the unchanged program with `bug`.

    Raises:
        DoesNotApply: The program has no such op.
    """
    guilty = {node.name: 0 for node in bench.program.graph.nodes if op_name(node) in bug.ops}
    if not guilty:
        raise DoesNotApply
    with torch._inductor.config.patch({bug.setting: "accuracy"}):
        side = built_from(bench, bench.program, "inductor", cases, folder, stack)
    unmoved = {node.name: node.name for node in bench.program.graph.nodes}
    mutant = Mutant(Mistake(bug.name, "compiler", _made_by_the_compiler), bench.program, unmoved)
    return Planted(mutant, Guilt(guilty, math.inf, is_below_precision=False, is_below_dtype=False)), side
