"""`glass check --invariant`: a model, an engine or a script beside itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import glassengine as glass
from glassengine import asked, commands
from glassengine.cli.documents import answer
from glassengine.cli.options import print_answer, progress, settings
from glassengine.cli.record import read_script_line
from glassengine.errors import UsageError
from glassengine.report.terminal_without_tensors import invariance


def check(target: Sequence[str], invariant: Sequence[str], given: Sequence[str], options: Mapping[str, Any]) -> int:
    """Judge a target under changes, print what was found, and return the exit status.

    Args:
        target: A model, or the words of a script.
        invariant: The changes.
        given: Flags that were given, which a check without a candidate may not know.
        options: Of `glass.check_invariant`.

    Raises:
        UsageError: A flag has no meaning here.
    """
    if not invariant:
        raise UsageError("more than one BASELINE", got=" ".join(target), hint="glass check BASELINE --candidate TARGET")
    for flag in given:
        raise UsageError(f"{flag} is not for --invariant: one model is compared with itself", hint="leave it out")
    line = read_script_line(target)
    if line is None:
        if len(target) > 1:
            raise UsageError("more than one BASELINE", got=" ".join(target), hint="--invariant run -- script.py ARGS")
        asked.model(target[0])
    with progress(f"comparing {' '.join(target)} with itself"):
        result = (
            glass.check_invariant(target[0], invariant=invariant, **options)
            if line is None
            else commands.check_invariant_script(line.script, line.arguments, line.is_module, invariant=invariant)
        )
    answer(result.to_dict, lambda: print_answer(invariance(result, settings.words)))
    return 0 if result.ok else 4 if result.too_little else 1
