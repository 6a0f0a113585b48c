"""Try the catalogue on one question and tell what holds."""

from __future__ import annotations

import torch

from glassengine.diagnose.hypotheses.catalogue import FAMILIES
from glassengine.diagnose.hypotheses.question import Question
from glassengine.diagnose.hypotheses.trial import OutOfWork
from glassengine.results import Hint


@torch.no_grad()
def explain(question: Question) -> list[Hint]:
    """Return the first mistake of the catalogue that makes what the candidate made; none where nothing does."""
    try:
        for score, family in FAMILIES:
            for hypothesis in family(question):
                if question.explains(question.trial.changed(hypothesis.edits)):
                    return [Hint(hypothesis.kind, hypothesis.text, score)]
    except OutOfWork:
        pass
    return []
