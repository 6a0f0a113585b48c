"""What was not judged, each with its reason: results without a counterpart, random draws, sites that no side has."""

from __future__ import annotations

from collections.abc import Sequence

from glassengine.judge.replay.values import called
from glassengine.judge.sides.countable import float_nodes
from glassengine.judge.sides.protocol import Place
from glassengine.judge.verdict.fineness import region_nodes
from glassengine.judge.verdict.missing import lacking
from glassengine.judge.verdict.score import Score
from glassengine.ops.traits import traits_of
from glassengine.program.onnx.operators.control import never_run
from glassengine.program.onnx.operators.fallback import is_of_runtime_alone
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.program import Program
from glassengine.results import Skipped


def not_judged(program: Program, scores: Sequence[Score], main: Score, known: Sequence[Skipped]) -> list[Skipped]:
    """Return what was left out of the judgement of all sides, beside what is `known` of it.

    Args:
        program: The baseline's.
        scores: Of all sides.
        main: The one that the verdict rests on.
        known: Sites that are listed already.
    """
    return [
        *_results_left_out(scores),
        *_unobserved(main, program, known),
        *_reordered(scores, program),
        *_without_value(program),
        *_never_run(program),
        *_of_runtime_alone(program),
    ]


def _results_left_out(scores: Sequence[Score]) -> list[Skipped]:
    return [
        Skipped(name, "both", f"not compared end to end: {why}", rung=score.side.rung)
        for score in scores
        for name, why in score.results.not_compared.items()
    ]


def _reordered(scores: Sequence[Score], program: Program) -> list[Skipped]:
    reason = "inside of experts: the program computes them in another order"
    return [
        Skipped(site.name, "both", reason, rung=score.side.rung)
        for score in scores
        if score.side.reordered
        for site in program.sites
        if site.kind == "module" and ":in" not in site.name and site.name.startswith(score.side.reordered)
    ]


def _without_value(program: Program) -> list[Skipped]:
    nodes = [node for node in program.graph.nodes if traits_of(node).is_arbitrary and is_tensor_node(node)]
    reasons = {True: "random: drawn by every run", False: "memory not yet written"}
    return [
        Skipped(program.sites.by_node[node.name][0].name, "both", reasons[bool(traits_of(node).is_random)])
        for node in nodes
    ]


def _of_runtime_alone(program: Program) -> list[Skipped]:
    """Operators of a runtime of its own: what is compared with it is not judged by anybody else."""
    nodes = [node for node in program.graph.nodes if is_of_runtime_alone(called(node)[0].target)]
    sites = [sites[0].name for node in nodes if (sites := program.sites.by_node.get(node.name))]
    return [Skipped(site, "both", "compared with ONNX Runtime, which alone says what it computes") for site in sites]


def _never_run(program: Program) -> list[Skipped]:
    """Branches and loops of an ONNX file that no input led into."""
    ops = {called(node)[0]: node for node in program.graph.nodes if program.sites.by_node.get(node.name)}
    return [
        Skipped(program.sites.by_node[node.name][0].name, "both", f"no input led into its {name}")
        for op, node in ops.items()
        for name in never_run(op.target)
    ]


def _unobserved(score: Score, program: Program, skipped: Sequence[Skipped]) -> list[Skipped]:
    """Float sites that are neither judged nor explained yet."""
    if score.side.place is Place.RECORD:
        return [Skipped(site, "candidate", "not in the record", rung=Place.RECORD) for site in lacking(score, program)]
    if score.side.program is None:
        return []
    known = {item.site for item in skipped}
    missing = float_nodes(program, ("op",)) - score.judged_nodes - region_nodes(score, program).keys()
    sites = [program.sites.by_node[node][0].name for node in missing]
    return [
        Skipped(s, "candidate", "the candidate has no such tensor", rung=score.side.rung)
        for s in sorted(sites)
        if s not in known
    ]
