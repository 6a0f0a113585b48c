"""An ONNX file as a user runs it: its results are of that session, and what the graph's optimizations change is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from glassengine.errors import UsageError
from glassengine.numerics.metrics.drift import decibels
from glassengine.program import LoadedModel
from glassengine.program.onnx.stored.options import SessionSettings
from glassengine.program.onnx.stored.session import OnnxModel
from glassengine.results import Comparison, ResultComparison

_LEAST_COST = 1.0
"""In dB: less is the rounding of another order."""
_PART = 6.0
"""What the optimizations change is part of a difference if it is at most so many dB smaller than that."""


def as_run(baseline: LoadedModel, candidate: LoadedModel | None, settings: SessionSettings) -> None:
    """Let the results of ONNX files be those of a user's session: of the candidate with `settings`.

    Raises:
        UsageError: There are settings, and no file that they are for.
    """
    if isinstance(baseline.module, OnnxModel):
        baseline.module.settings = SessionSettings()
    if candidate is not None and isinstance(candidate.module, OnnxModel):
        candidate.module.settings = settings
    elif settings.given:
        raise UsageError(
            "--session-options are for an ONNX file as candidate",
            got="an engine" if candidate is None else candidate.spec,
            expected="--candidate model.onnx",
        )


def with_level(found: Comparison, model: LoadedModel, plain: Sequence[ResultComparison] = ()) -> Comparison:
    """Name the level of optimization where it is the cause of a difference.

    Args:
        found: With the results of a user's session.
        model: What was run.
        plain: The same results of the graph as it is written, where they were compared.
    """
    module = model.module
    if not isinstance(module, OnnxModel) or module.settings is None:
        return found
    who = f"ONNX Runtime's optimizations at level {module.settings.level!r}"
    texts = []
    if plain:
        written = {one.name: one.snr_db for one in plain}
        for one in found.results:
            before, after = written.get(one.name), one.snr_db
            if before is not None and after is not None and before - after >= _LEAST_COST:
                texts.append(f"{who} cost {before - after:.1f} dB of {one.name}: {before:.1f} dB without them")
    else:
        for one in found.results:
            noise, signal = module.apart.get(one.candidate_name, (0.0, 0.0))
            between = decibels(noise / signal) if noise and signal else None
            if between is not None and not one.agrees and one.snr_db is not None and between < one.snr_db + _PART:
                texts.append(f"{who} change {one.name}: {between:.1f} dB from the graph as it is written")
    texts = list(dict.fromkeys(texts))
    if not texts:
        return found
    reason = found.not_ok_because
    if reason is not None and found.standing in ("results differ", "over budget"):
        reason = f"{reason}; {texts[0]}"
    return dataclasses.replace(found, notes=(*texts, *found.notes), not_ok_because=reason)
