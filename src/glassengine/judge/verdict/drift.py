"""The drift of a side of a check: sums gathered while it is judged, and the table that they make.

Rows are module outputs; of a program without modules (an ONNX file) the outputs of its nodes. What the ops between two
rows introduce is charged to the row that they flow into first. Results come last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from glassengine.judge.end_to_end import EndToEnd
from glassengine.numerics.drift import DriftSums, shared
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.verdict import Reference
from glassengine.program.representation.program import Program
from glassengine.results import DriftRow

_ENOUGH = 0.5
"""Share of the rows of the finest side that a side observed at modules must have, to make the table."""


@dataclass
class Drift:
    """What one side loses: baseline node -> its own site for it, and the sums."""

    sums_by_node: dict[str, tuple[str, DriftSums]] = field(default_factory=dict)

    def add(
        self, node: str, site: str, reference: Reference, candidate: torch.Tensor, predicted: torch.Tensor | None
    ) -> None:
        """Add the value of a node in one step; of several sites of one node the first counts."""
        own, sums = self.sums_by_node.setdefault(node, (site, DriftSums()))
        if own == site:
            sums.add(reference.native, candidate, reference.valid, predicted)

    def merge(self, later: Drift) -> None:
        """Add what was found over later cases of the same side."""
        for node, (site, sums) in later.sums_by_node.items():
            own, mine = self.sums_by_node.setdefault(node, (site, DriftSums()))
            if own == site:
                mine.merge(sums)


def is_less_precise(candidate: torch.dtype | None, baseline: str) -> bool:
    """Whether a candidate of one dtype computes with fewer digits than a baseline of another."""
    own = getattr(torch, baseline, None)
    if candidate is None or not isinstance(own, torch.dtype):
        return False
    floats = candidate.is_floating_point and own.is_floating_point
    return floats and unit_roundoff(candidate) > unit_roundoff(own)


def table(program: Program, sides: Sequence[tuple[Drift, EndToEnd]]) -> tuple[DriftRow, ...]:
    """Return the rows of the candidate, in order of execution, results last.

    Args:
        program: The baseline's.
        sides: The same candidate, observed in one way or another, the one that is closest to what users run last.
    """
    if not sides:
        return ()
    rows = [_rows(program, drift) for drift, _ in sides]
    most = max(len(one) for one in rows)
    chosen = next(one for one in reversed(rows) if len(one) >= _ENOUGH * most)
    results = next((ends.drift_rows() for _, ends in reversed(sides) if ends.compared), ())
    return (*shared(chosen), *results)


def _rows(program: Program, drift: Drift) -> list[DriftRow]:
    kinds = {
        site.node: site for site in reversed(list(program.sites)) if site.kind == "module" and ":" not in site.name
    }
    ends = {node.name for node in program.graph.output_node().all_input_nodes}
    inner = [node for node in drift.sums_by_node if node in kinds and node not in ends]
    kind = "module" if inner else "op"
    chosen = set(inner) if inner else drift.sums_by_node.keys() - ends
    losses = _charged(program, drift, chosen)
    found = []
    for node in program.graph.nodes:
        if node.name not in chosen:
            continue
        own, sums = drift.sums_by_node[node.name]
        site = kinds[node.name] if inner else program.sites.by_node[node.name][0]
        if sums.num_tensors:
            found.append(sums.row(site.name, own, kind, losses.get(node.name)))
    return found


def _charged(program: Program, drift: Drift, rows: set[str]) -> dict[str, float]:
    """Return row -> what it and all that flows into it first introduce, where anything is known of it."""
    owner: dict[str, str] = {}
    order = {node.name: index for index, node in enumerate(program.graph.nodes)}
    charged: dict[str, float] = {}
    for node in reversed(program.graph.nodes):
        below = [owner[user.name] for user in node.users if user.name in owner]
        if node.name in rows:
            owner[node.name] = node.name
        elif below:
            owner[node.name] = min(below, key=lambda name: order[name])
        loss = drift.sums_by_node[node.name][1].loss if node.name in drift.sums_by_node else None
        if loss is not None and node.name in owner:
            charged[owner[node.name]] = charged.get(owner[node.name], 0.0) + loss
    return charged
