"""Which results of two programs belong together: those of one name, and in order what other names are left.

Two implementations need not call alike what they return: `logits` is `softmax_1` in an ONNX file, and has no name where
a module returns a tensor. A result that went unpaired would go unjudged, and the last op of a model with it.
"""

from __future__ import annotations

from glassengine.program.module_state import STATE
from glassengine.program.program import Program


def paired_results(baseline: Program, candidate: Program) -> dict[str, str]:
    """Return node of `baseline` -> node of `candidate` that makes the same result.

    Caches go together by name alone, and the rest in order only where both sides have as many left.
    """
    left, right = _read_by_others(baseline), _read_by_others(candidate)
    found = {node: right[name] for name, node in left.items() if name in right}
    ours = [node for name, node in left.items() if name not in right and name not in baseline.caches.values()]
    theirs = [node for name, node in right.items() if name not in left and name not in candidate.caches.values()]
    if len(ours) == len(theirs):
        found |= dict(zip(ours, theirs, strict=True))
    return found


def _read_by_others(program: Program) -> dict[str, str]:
    """Return the results of a program without what it remembers for its next step."""
    return {name: node for name, node in program.output_nodes.items() if not name.startswith(STATE)}


def ports(program: Program) -> dict[str, str]:
    """Return placeholder -> name of the input."""
    return {port.node: port.name for port in program.inputs}
