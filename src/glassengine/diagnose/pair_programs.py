"""Which ops of two programs belong together: by name where they are alike, by what they compute elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from glassengine.compare.pairing import SitePair, pair_sites
from glassengine.diagnose.between import reads_the_same
from glassengine.diagnose.cases import Case
from glassengine.diagnose.counterparts import Counterparts
from glassengine.diagnose.paired_results import ports
from glassengine.diagnose.probe import probe
from glassengine.program.program import Program


def pair_programs(baseline: Program, candidate: Program, cases: Sequence[Case]) -> dict[str, SitePair]:
    """Return baseline node -> pair; programs of the same ops in the same order pair without being run."""
    pairs, ours, theirs = pair_sites(baseline, candidate)
    found = {pair.baseline.node: pair.candidate.node for pair in pairs}
    nodes = ({node.name: node for node in program.graph.nodes} for program in (baseline, candidate))
    left, right = nodes
    names = ports(baseline), ports(candidate)
    if not ours and not theirs and all(reads_the_same(left[a], right[b], found, names) for a, b in found.items()):
        return {pair.baseline.node: pair for pair in pairs}
    return Counterparts(baseline, candidate, probe(candidate, cases)).find()
