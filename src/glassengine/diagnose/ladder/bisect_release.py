"""Bisect a release engine that is wrong, by engines that differ from it by a few outputs each."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from glassengine.diagnose.ladder.bisection import bisect, most_builds
from glassengine.diagnose.ladder.climb import Climb, engine_nodes, observable, sizes_of
from glassengine.diagnose.ladder.judging import judge
from glassengine.engine.build.build import build_program
from glassengine.judge.sides.engine import EngineSide
from glassengine.judge.sides.protocol import Guarantee, Place, float_nodes
from glassengine.judge.verdict.score import Score
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
    own = {node: entry[0].name for node, entry in program.sites.by_node.items()}
    ours = {site.name: site.node for site in climb.program.sites if site.kind == "op"}
    plan = observable(climb, program)
    nodes = [node for node in plan.added if own.get(node) in ours and node in float_nodes(program, ("op",))]
    last = program.output_nodes[next(n for n, node in climb.program.output_nodes.items() if node == wrong[0])]
    progress(Work.BISECTING.says(f"bisecting among {len(nodes)} ops: at most {most_builds(len(nodes))} builds"))
    seen: dict[str, Score] = {}

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
        bad = [node for node in asked if own[node] in flagged]
        seen.update(dict.fromkeys(bad, score))
        results = {climb.program.sites.by_node[node][0].name for node in climb.program.output_nodes.values()}
        return bad, bool(flagged & results)

    with torch.no_grad():
        found = bisect(program, nodes, last, observe)
    for node in found.vanished:
        reason = "as an output of the engine it makes the mistake vanish"
        climb.skipped.append(Skipped(own[node], "candidate", reason, rung=Place.BISECTION))
    if found.first_wrong is None:
        _note(release, wrong[0], found.suspects, own, found.num_builds)
        return
    score = seen[found.first_wrong]
    climb.scores.insert(climb.scores.index(release), score)
    _note(score, ours[own[found.first_wrong]], found.suspects, own, found.num_builds)


def _note(score: Score, node: str, suspects: Sequence[str], own: dict[str, str], num_builds: int) -> None:
    """Say on the divergence how far the search came."""
    divergence = score.divergences.get(node)
    if divergence is None:
        return
    text = f"{num_builds} builds: everything that feeds this op is right"
    if len(suspects) > 1:
        named = ", ".join(own.get(suspect, suspect) for suspect in suspects[:5])
        text = f"{num_builds} builds: one of {len(suspects)} ops made it wrong: {named}"
    hints = (Hint("other", text, 1.0, evidence="bisection"), *divergence.hints)
    score.divergences[node] = dataclasses.replace(divergence, hints=hints)
