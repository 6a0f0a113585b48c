"""Results that say little or nothing: constants, and results that no input reaches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from glassengine.judge.end_to_end import results_of
from glassengine.judge.graphs.between import ancestors
from glassengine.judge.graphs.by_result import paired_results
from glassengine.judge.verdict.score import Score
from glassengine.program.representation.program import Program


def vacuous(program: Program, scores: Sequence[Score]) -> Iterator[str]:
    """Yield a sentence for each result of the baseline that is constant, or depends on no input.

    Args:
        program: The baseline's.
        scores: Of all sides, the untouched baseline's first.
    """
    independent = [name for name in results_of(program) if not _reads_inputs(program, program.output_nodes[name])]
    constant = dict.fromkeys(name for score in scores[:1] for name in score.results.constant)
    for name in independent:
        yield f"the baseline's {name} depends on no input: it says nothing of what computes on them"
    for name in constant:
        if name not in independent:
            yield f"all elements of the baseline's {name} are the same number on these inputs: it shows few mistakes"


def memorized(program: Program, scores: Sequence[Score]) -> Iterator[str]:
    """Yield a sentence for each result that depends on an input in the baseline alone."""
    for score in scores:
        own = score.side.program
        if own is None or own is program:
            continue
        names = {node: name for name, node in program.output_nodes.items() if name in results_of(program)}
        for ours, theirs in paired_results(program, own).items():
            if ours in names and _reads_inputs(program, ours) and not _reads_inputs(own, theirs):
                yield f"the candidate's {names[ours]} depends on no input"


def _reads_inputs(program: Program, node: str) -> bool:
    ports = {port.node for port in program.inputs}
    found = program.node(node)
    return found.name in ports or any(other.name in ports for other in ancestors(found))
