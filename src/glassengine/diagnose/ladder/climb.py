"""State of a check: its sides, its pairs, and the tensors of them that can be observed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from glassengine.engine.run.engine import Engine
from glassengine.judge.cases import Case
from glassengine.judge.end_to_end import Seeded, Severity
from glassengine.judge.replay.reference import PLAIN, CoarseArithmetic
from glassengine.judge.replay.replay import covered
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.program import SourceSide
from glassengine.judge.sides.protocol import Place, Side
from glassengine.judge.site_pairs import SitePair
from glassengine.judge.verdict.score import Score
from glassengine.numerics.float64 import FLOAT32_SUMS, Accumulation
from glassengine.numerics.kernels import UNMEASURED, Kernels
from glassengine.program import LoadedModel, Program
from glassengine.program.representation.outputs import From, OutputPlan, plan_outputs
from glassengine.results import Skipped, WeightsComparison

BYTE_BUDGET = 1 << 30
"""Most bytes of debug outputs in one step of a check."""


@dataclass
class Climb:
    """Everything one check has; filled level by level.

    `built` is what the engines are built from, `pairs` which of its ops are those of the baseline's program, and
    `candidate` names what is built. `coarsest` is the dtype of the coarsest side, None where that is the baseline's.
    `differences` are those of the sides as a user runs them, in words, and `notes` are other remarks on them.
    `seeded` is what both models return with one seed, where they draw.
    `chosen` has, of each case, the tokens of its first row that follow each step.
    """

    baseline: LoadedModel
    program: Program
    cases: list[Case]
    model: ModuleSide | SourceSide
    scores: list[Score]
    accumulation: Accumulation = FLOAT32_SUMS
    arithmetic: CoarseArithmetic = PLAIN
    coarsest: torch.dtype | None = None
    kernels: Kernels = UNMEASURED
    built: Program | None = None
    pairs: Mapping[str, SitePair] = field(default_factory=dict)
    candidate: str = ""
    skipped: list[Skipped] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    severity: dict[str, Severity] = field(default_factory=dict)
    chosen: dict[str, list[int]] = field(default_factory=dict)
    weights: WeightsComparison | None = None
    seeded: Seeded | None = None
    stack: ExitStack = field(default_factory=ExitStack)

    def of_runtime(self, kernels: Kernels) -> Accumulation:
        """Return how a runtime of such kernels computes; the floor of all sides counts them from now on."""
        self.kernels = self.kernels.joined(kernels)
        return replace(self.accumulation, kernels=kernels)

    def add(self, side: Side) -> None:
        """Add a side to judge."""
        self.scores.append(Score(side, self.program))

    def chooser(self) -> ModuleSide:
        """Return the unchanged model once more, to choose the same tokens for sides that are judged later."""
        return self.model.chooser()


def begun(
    model: LoadedModel, stack: ExitStack, *parts: tuple[Program, list[Case], ModuleSide | SourceSide]
) -> tuple[Climb, ...]:
    """Return a climb for each program of a model, with its cases and its unchanged module, which is a side of it."""
    climbs = tuple(Climb(model, program, cases, side, [], stack=stack) for program, cases, side in parts)
    for climb in climbs:
        climb.add(climb.model)
    return climbs


def nodes(pairs: Mapping[str, SitePair]) -> dict[str, str]:
    """Return baseline node -> candidate node."""
    return {node: pair.candidate.node for node, pair in pairs.items()}


def skip_unpaired(climb: Climb, program: Program, pairs: Mapping[str, SitePair], level: str) -> None:
    """List the ops of both programs that have no counterpart and are in no region."""
    taken = {pair.candidate.node for pair in pairs.values()}
    inside = covered(climb.program, pairs)
    for site in climb.program.sites:
        if site.kind == "op" and site.node not in pairs and site.node not in inside:
            climb.skipped.append(Skipped(site.name, "baseline", "no counterpart in the candidate", level=level))
    reason = "written with other ops: no counterpart in the baseline"
    for site in program.sites:
        if site.kind == "op" and site.node not in taken:
            climb.skipped.append(Skipped(site.name, "candidate", reason, level=level))


def observable(climb: Climb, program: Program) -> OutputPlan:
    """Return which ops of `program` an engine for the cases of a check can have as outputs; the rest is skipped."""
    nodes = [site.node for site in program.sites if site.kind == "op"]
    sizes = {"sequence": 1, "cache": 1, "batch": 1}
    if climb.program.generates:
        longest = max(climb.cases, key=lambda case: case.batch * case.cache_length)
        assert longest.input_ids is not None
        sizes = {"batch": longest.batch, "sequence": longest.input_ids.shape[1], "cache": longest.cache_length}
    plan = plan_outputs(program, nodes, sizes=sizes, byte_budget=BYTE_BUDGET)
    for node, reason in plan.left_out.items():
        climb.skipped.append(Skipped(program.sites.by_node[node][0].name, "candidate", reason, level=Place.ENGINE))
    constant = [node for node, derived in plan.derived.items() if derived.source is From.WEIGHTS]
    for node in constant:
        name = program.sites.by_node[node][0].name
        climb.skipped.append(Skipped(name, "both", "depends on weights alone: folded by compilers", level=Place.ENGINE))
    kept = {node: derived for node, derived in plan.derived.items() if node not in constant}
    return OutputPlan(plan.added, kept, plan.left_out, plan.num_bytes)


def engine_nodes(climb: Climb, engine: Engine, observed: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Baseline node -> (output name, engine site, method), for the engine's outputs that the baseline's program has.

    Args:
        climb: With the pairs of the program that `engine` was built from.
        engine: With debug outputs.
        observed: Which nodes of its program to look at.
    """
    nodes = result_nodes(climb.program, engine)
    table = {entry.node: entry for entry in engine.manifest.added_outputs}
    for node, pair in climb.pairs.items():
        own = pair.candidate.node
        if own in table and own in observed:
            nodes[node] = (table[own].name, pair.candidate.name, pair.method)
    return nodes


def result_nodes(baseline: Program, engine: Engine) -> dict[str, tuple[str, str, str]]:
    """Baseline node -> (output name, engine site, method) for results and updated caches."""
    node_of = {entry.name: entry.node for entry in engine.manifest.outputs}
    nodes = {}
    for name, node in baseline.output_nodes.items():
        if name in node_of:
            sites = engine.sites.by_node.get(node_of[name])
            nodes[node] = (name, sites[0].name if sites else name, "name")
    return nodes


def sizes_of(cases: Sequence[Case]) -> dict[str, Any]:
    """The ranges that an engine for `cases` must be built with."""
    causal = [case for case in cases if case.input_ids is not None]
    if not causal:
        return {}
    return {"max_batch_size": max(c.batch for c in causal), "max_seq_len": max(c.cache_length for c in causal)}
