"""Mistakes that hide behind what a verdict leaves out, each with a right port that is written otherwise."""

from tests.diagnose.end_to_end.hidden_mistakes import limits, masks, memory, padding, positions, routers
from tests.diagnose.end_to_end.hidden_mistakes.entry import Entry, Written, inputs

CORPUS = masks.CORPUS + positions.CORPUS + routers.CORPUS + padding.CORPUS + memory.CORPUS + limits.CORPUS

__all__ = ["CORPUS", "Entry", "Written", "inputs"]
