"""The untouched candidate: its module outputs are observed where its program was paired, under any names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from glassengine.judge.graphs.by_name import SitePair
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.protocol import Observed, Place
from glassengine.judge.step_inputs import Given, by_name
from glassengine.program.representation.program import Program

_NAMED = ("module", "tap")


@dataclass
class UntouchedCandidate(ModuleSide):
    """A candidate's module.

    Args:
        names: Baseline node -> names of the candidate's module outputs and taps that are its counterpart; None where
            the candidate has no program, and only names are known.
    """

    names: Mapping[str, Sequence[str]] | None = field(default=None, kw_only=True)
    place: Place = field(default=Place.UNTOUCHED, kw_only=True)

    def step(self, inputs: Given) -> None:
        """Run one forward; as `ModuleSide.step`."""
        self.arranged.begin_step(by_name(inputs))
        super().step(inputs)

    def observed(self, node: str) -> list[Observed]:
        """Return the values of the counterparts of what modules and taps of the baseline make at `node`."""
        found = super().observed(node)
        if self.names is None:
            return found
        sites = {site.name: site.kind for site in self.baseline.sites.by_node.get(node, ())}
        found = [seen for seen in found if sites[seen.site] not in _NAMED]
        if not any(kind in _NAMED for kind in sites.values()):
            return found
        for name in self.names.get(node, ()):
            if name in self._values:
                method = "name" if name in sites else "content"
                found.append(Observed(self.arranged(node, self._values[name]), name, method))
        return found


def own_names(program: Program, pairs: Mapping[str, SitePair]) -> dict[str, list[str]]:
    """Return baseline node -> names of a candidate's module outputs and taps that are its counterpart.

    Args:
        program: The candidate's.
        pairs: Baseline node -> pair.
    """
    found = {}
    for node, pair in pairs.items():
        sites = program.sites.by_node.get(pair.candidate.node, ())
        names = [site.name for site in sites if site.kind in _NAMED]
        if names:
            found[node] = names
    return found
