"""Which ops of two programs belong together: by name where they are alike, by what they compute elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.fx import Node

from glassengine.judge.cases import Case
from glassengine.judge.graphs.between import reads_counterparts, reads_the_same
from glassengine.judge.graphs.by_name import SitePair, pair_sites
from glassengine.judge.graphs.by_result import ports
from glassengine.judge.pairing.by_value import Counterparts
from glassengine.judge.pairing.probe import probe
from glassengine.program.representation.program import Program


def pair_programs(baseline: Program, candidate: Program, cases: Sequence[Case]) -> dict[str, SitePair]:
    """Return baseline node -> pair; programs of the same ops in the same order pair without being run."""
    pairs, ours, theirs = pair_sites(baseline, candidate)
    found = {pair.baseline.node: pair.candidate.node for pair in pairs}
    nodes = ({node.name: node for node in program.graph.nodes} for program in (baseline, candidate))
    left, right = nodes
    names = ports(baseline), ports(candidate)
    if not ours and not theirs:
        if all(reads_the_same(left[a], right[b], found, names) for a, b in found.items()):
            return {pair.baseline.node: pair for pair in pairs}
        are_files = baseline.onnx is not None and candidate.onnx is not None
        if are_files and all(reads_counterparts(left[a], right[b], found, names) for a, b in found.items()):
            other = {a for a, b in found.items() if left[a].target != right[b].target}
            if _are_apart(other, left):
                return {pair.baseline.node: pair for pair in pairs}
    return Counterparts(baseline, candidate, probe(candidate, cases)).find()


def _are_apart(nodes: Collection[str], graph: Mapping[str, Node]) -> bool:
    """Whether no two of these nodes are neighbors: what is written with other ops in another order takes two of them.

    One op alone instead of another one makes the same, or is wrong, even if a maximum after it hides the difference.
    """
    beside = (other for name in nodes for other in (*graph[name].all_input_nodes, *graph[name].users))
    return not any(other.name in nodes for other in beside)
