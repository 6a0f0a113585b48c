"""Bisect a release engine that is wrong, by engines that differ from it by a few outputs each."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from glassengine.diagnose.ladder.climb import Climb, engine_nodes, observable, sizes_of
from glassengine.diagnose.ladder.judging import judge
from glassengine.engine.build.build import build_program
from glassengine.judge.sides.engine import EngineSide
from glassengine.judge.sides.protocol import Guarantee, Place, float_nodes
from glassengine.judge.verdict.score import Score
from glassengine.program.representation.program import Program
from glassengine.progress import Progress, Work
from glassengine.results import FLAGGED, Hint, Skipped


def bisect_release(climb: Climb, backend: str | None, progress: Progress) -> None:
    """Find the op at which the release engine goes wrong; adds the score of the build that showed it.

    Args:
        climb: With the score of the release engine.
        backend: Of the engines that are built.
        progress: Told how many builds there will be at most, and of each.
    """
    release = next(score for score in climb.scores if score.side.place is Place.RELEASE)
    wrong = [node for node in climb.program.output_nodes.values() if node in release.divergences]
    if not wrong:
        return
    program = climb.built or climb.program
    # Names of nodes are those of what is built; the baseline's are found by site.
    sites = {node: entry[0].name for node, entry in program.sites.by_node.items()}
    ours = {site.name: site.node for site in climb.program.sites if site.kind == "op"}
    plan = observable(climb, program)
    nodes = [node for node in plan.added if sites.get(node) in ours and node in float_nodes(program, ("op",))]
    last = program.output_nodes[next(n for n, node in climb.program.output_nodes.items() if node == wrong[0])]
    progress(Work.BISECTING.says(f"bisecting among {len(nodes)} ops: at most {most_builds(len(nodes))} builds"))
    scores: dict[str, Score] = {}

    def observe(asked: Sequence[str]) -> tuple[Collection[str], bool]:
        progress(Work.BISECTING.says(f"building with outputs at {', '.join(asked)}"))
        with tempfile.TemporaryDirectory(prefix="glassengine-bisect-") as folder:
            engine = build_program(program, Path(folder) / "e", backend=backend, outputs=asked, **sizes_of(climb.cases))
            table = engine_nodes(climb, engine, asked)
            options: dict[str, Any] = {"place": Place.BISECTION, "guarantee": Guarantee.FEW_OUTPUTS}
            score = Score(EngineSide(engine, table, program=program, **options), climb.program)
            model = climb.chooser()
            judge(climb, [Score(model, climb.program), score], model=model)
        flagged = {pair.site for pair in score.pairs if pair.verdict in FLAGGED}
        bad = [node for node in asked if sites[node] in flagged]
        scores.update(dict.fromkeys(bad, score))
        results = {climb.program.sites.by_node[node][0].name for node in climb.program.output_nodes.values()}
        return bad, bool(flagged & results)

    with torch.no_grad():
        found = bisect(program, nodes, last, observe)
    for node in found.vanished:
        reason = "as an output of the engine it makes the mistake vanish"
        climb.skipped.append(Skipped(sites[node], "candidate", reason, level=Place.BISECTION))
    if found.first_wrong is None:
        _note(release, wrong[0], found.suspects, sites, found.num_builds)
        return
    score = scores[found.first_wrong]
    climb.scores.insert(climb.scores.index(release), score)
    _note(score, ours[sites[found.first_wrong]], found.suspects, sites, found.num_builds)


def _note(score: Score, node: str, suspects: Sequence[str], sites: dict[str, str], num_builds: int) -> None:
    """Say on the divergence how far the search came."""
    divergence = score.divergences.get(node)
    if divergence is None:
        return
    text = f"{num_builds} builds: everything that feeds this op is right"
    if len(suspects) > 1:
        named = ", ".join(sites.get(suspect, suspect) for suspect in suspects[:5])
        text = f"{num_builds} builds: one of {len(suspects)} ops made it wrong: {named}"
    hints = (Hint("other", text, 1.0, evidence="bisection"), *divergence.hints)
    score.divergences[node] = replace(divergence, hints=hints)


NUM_OUTPUTS = 3
"""Outputs that a build adds: each more shortens the search and disturbs the engine."""

_SPARE = 2
"""Builds beyond those of a chain of ops: branches cannot always be cut evenly."""


Observe = Callable[[Sequence[str]], tuple[Collection[str], bool]]
"""Builds and runs with outputs at these nodes: returns those that are wrong, and whether the results still are."""


@dataclass
class ReleaseBisection:
    """How a search ended.

    Attributes:
        first_wrong: The earliest node that is known to be wrong; None where only the results are.
        suspects: Nodes that may have made it so: one, unless the search ended early.
        num_builds: Builds it took.
        vanished: Nodes that made the mistake vanish when they were outputs.
    """

    first_wrong: str | None
    suspects: tuple[str, ...]
    num_builds: int = 0
    vanished: list[str] = field(default_factory=list)


def most_builds(num_nodes: int) -> int:
    """Return the number of builds that a search among `num_nodes` ops takes at most."""
    return math.ceil(math.log(max(num_nodes, 1) + 1, NUM_OUTPUTS + 1)) + _SPARE


def bisect(program: Program, nodes: Collection[str], wrong: str, observe: Observe) -> ReleaseBisection:
    """Find the first op that is wrong.

    Args:
        program: What the engine is built from.
        nodes: Those that can be outputs.
        wrong: Node of a result that is wrong without any.
        observe: Runs the engine with a few outputs.
    """
    above = _above(program)
    known_right: set[str] = set()
    found = ReleaseBisection(None, ())
    last, limit = wrong, most_builds(len(nodes))
    while True:
        suspects = [n for n in above[last] if n in nodes and n not in known_right]
        asked = _spread([n for n in suspects if n not in found.vanished], above, set(suspects))
        if not asked or found.num_builds == limit:
            found.suspects = (*suspects, last)
            return found
        found.num_builds += 1
        bad, is_wrong = observe(asked)
        if not bad and not is_wrong:
            # Observing here changes the engine: these outputs are no evidence.
            found.vanished += asked
            continue
        wrong_ones = [node for node in asked if node in bad]
        if wrong_ones:
            last = found.first_wrong = wrong_ones[0]
        for node in asked:
            if node not in bad:
                known_right |= {node, *above[node]}


def _above(program: Program) -> dict[str, list[str]]:
    """Node -> everything that it is computed from, in graph order."""
    order = {node: index for index, node in enumerate(program.graph.nodes)}
    table: dict[Node, set[Node]] = {}
    for node in program.graph.nodes:
        table[node] = set(node.all_input_nodes).union(*(table[source] for source in node.all_input_nodes))
    return {node.name: [n.name for n in sorted(sources, key=order.__getitem__)] for node, sources in table.items()}


def _spread(nodes: Sequence[str], above: dict[str, list[str]], suspects: set[str]) -> list[str]:
    """Return up to `NUM_OUTPUTS` of `nodes`, in order, that cut the suspects into parts of about one size."""
    sizes = {node: sum(source in suspects for source in above[node]) + 1 for node in nodes}
    chosen = []
    for part in range(1, NUM_OUTPUTS + 1):
        wanted = len(suspects) * part / (NUM_OUTPUTS + 1)
        left = [node for node in nodes if node not in chosen]
        if left:
            chosen.append(min(left, key=lambda node: abs(sizes[node] - wanted)))
    return [node for node in nodes if node in chosen]
