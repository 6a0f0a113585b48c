"""An ONNX file as a user runs it: results are those of that session, and the cost of its optimizations is named."""

from __future__ import annotations

from collections.abc import Sequence

from glassengine.errors import UsageError
from glassengine.numerics.metrics.drift import decibels
from glassengine.program import LoadedModel
from glassengine.program.onnx.stored.options import SessionSettings
from glassengine.program.onnx.stored.session import OnnxModel
from glassengine.results import Findings, ResultComparison

_LEAST = 1.0
"""In dB: less is the rounding of another order."""
_PART = 6.0
"""What the optimizations change is part of a difference if it is at most so many dB smaller than that."""


def as_run(baseline: LoadedModel, candidate: LoadedModel | None, settings: SessionSettings) -> None:
    """Let the results of ONNX files be those of a user's session: of the candidate with `settings`.

    Raises:
        UsageError: There are settings, and no file that they are for.
    """
    for model, its_own in ((baseline, SessionSettings()), (candidate, settings)):
        if model is not None and isinstance(model.module, OnnxModel):
            model.module.settings = its_own
    if settings.given and (candidate is None or not isinstance(candidate.module, OnnxModel)):
        raise UsageError("--session-options are for an ONNX file as candidate", expected="--candidate model.onnx")


def with_level(found: Findings, model: LoadedModel, written: Sequence[ResultComparison] = ()) -> Findings:
    """Name the level of optimization where it is the cause of a difference.

    Args:
        found: With the results of a user's session.
        model: What was run.
        written: The same results of the graph as it is written, where they were compared.
    """
    module, texts = model.module, []
    if not isinstance(module, OnnxModel) or module.settings is None:
        return found
    known = {one.name: one.snr_db for one in written}
    for one in (*found.costs, *found.results):
        before, (noise, signal) = known.get(one.name), module.apart.get(one.candidate_name, (0.0, 0.0))
        if one.snr_db is None or not noise or not signal:
            continue
        between = decibels(noise / signal)
        if before is not None and before - one.snr_db >= _LEAST:
            texts.append(f"cost {before - one.snr_db:.1f} dB of {one.name}: {before:.1f} dB without them")
        elif before is None and not one.agrees and between < one.snr_db + _PART:
            texts.append(f"change {one.name}: {between:.1f} dB from the graph as it is written")
    if not texts:
        return found
    notes = [f"ONNX Runtime's optimizations at level {module.settings.level!r} {text}" for text in dict.fromkeys(texts)]
    found.notes, found.explanation = [*notes, *found.notes], notes[0]
    return found
