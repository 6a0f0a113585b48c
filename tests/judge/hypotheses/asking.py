"""What is said of one question."""

from __future__ import annotations

from glassengine.judge.hypotheses.explain import explanation
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.results import Hint


def explain(question: Question) -> list[Hint]:
    """Return the best mistake of the catalog that makes what the candidate made; none where nothing does."""
    found = explanation(question)
    return [] if found is None else [found.hint]
