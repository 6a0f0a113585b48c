"""Introduced or inherited: which flagged ops are origins, and which merely carry an error on.

An error is inherited when an unbroken chain of flagged tensors leads to it. A tensor that is judged and clean breaks
the chain; one that could not be observed passes it on; the cache carries it into later steps. The verdict of an
origin is the worst of its chain: where a small mistake first shows, it may still be only suspicious.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Node

from glassengine.program.program import Program
from glassengine.results import Verdict, worst


@dataclass
class Origin:
    """One op that introduced an error, in the step where it first did."""

    step: int
    node: str
    verdict: Verdict
    num_inherited: int = 0


@dataclass
class OriginTracker:
    """Follows flagged tensors of one side through the steps of one case."""

    program: Program
    origins: dict[str, Origin] = field(default_factory=dict)
    _blame: dict[str, frozenset[str]] = field(default_factory=dict)
    _cache_blame: dict[str, frozenset[str]] = field(default_factory=dict)

    def begin_step(self) -> None:
        """Carry the blame of the caches over."""
        inputs = {port.name: port.node for port in self.program.inputs}
        self._cache_blame = {
            inputs[past]: self._blame.get(self.program.output_nodes[present], frozenset())
            for past, present in self.program.caches.items()
        }
        self._blame = {}

    def visit(self, node: Node, step: int, verdict: Verdict | None, *, introduced: bool | None = None) -> bool:
        """Record a tensor node; called for every one, in graph order.

        Args:
            node: The node.
            step: Of the case.
            verdict: None when it was not observed.
            introduced: Whether a replay found that the op itself made the error; None when only the graph can tell.

        Returns:
            Whether the node is flagged and its error inherited.
        """
        carried: frozenset[str] = frozenset()
        for source in node.all_input_nodes:
            carried |= self._blame_of(source)
        if verdict is None:
            self._blame[node.name] = carried
            return False
        if verdict not in ("suspicious", "wrong"):
            self._blame[node.name] = frozenset()
            return False
        if introduced or not carried:
            self.origins.setdefault(node.name, Origin(step, node.name, verdict))
            carried = frozenset({node.name})
            inherited = False
        else:
            inherited = True
        for name in carried:
            origin = self.origins[name]
            origin.verdict = worst([origin.verdict, verdict])
            origin.num_inherited += inherited
        self._blame[node.name] = carried
        return inherited

    def _blame_of(self, source: Node) -> frozenset[str]:
        """Blame of an input; nodes that are no tensors (the list that a split returns) pass on that of their own."""
        if source.name not in self._blame:
            found = self._cache_blame.get(source.name, frozenset())
            for earlier in source.all_input_nodes:
                found |= self._blame_of(earlier)
            self._blame[source.name] = found
        return self._blame[source.name]
