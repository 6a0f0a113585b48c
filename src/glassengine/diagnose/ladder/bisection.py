"""Bisection by outputs: where does a release engine go wrong, if looking at every op makes the mistake vanish?

Each build adds a few outputs and no more, so that it stays close to the release engine; they lie in the part of the
graph that is still under suspicion: above what is known to be wrong, and not above anything that is known to be right.
The accumulated floor decides, as it does for the release engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from glassengine.program.representation.program import Program

NUM_OUTPUTS = 3
"""Outputs that a build adds: each more shortens the search and disturbs the engine."""

_SPARE = 2
"""Builds beyond those of a chain of ops: branches cannot always be cut evenly."""


Observe = Callable[[Sequence[str]], tuple[Collection[str], bool]]
"""Builds and runs with outputs at these nodes: returns those that are wrong, and whether the results still are."""


@dataclass
class Bisection:
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


def bisect(program: Program, nodes: Collection[str], wrong: str, observe: Observe) -> Bisection:
    """Find the first op that is wrong.

    Args:
        program: What the engine is built from.
        nodes: Those that can be outputs.
        wrong: Node of a result that is wrong without any.
        observe: Runs the engine with a few outputs.
    """
    above = _above(program)
    known_right: set[str] = set()
    found = Bisection(None, ())
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
