"""`glass run` of an engine that does not generate: one forward, its results printed, recorded or written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glassengine.cli.documents import answer
from glassengine.cli.options import err, out, settings
from glassengine.errors import UsageError

MAX_PRINTED = 64
"""A tensor of more elements is printed as a few figures."""


def run(engine: Any, given: Mapping[str, Any], others: Mapping[str, Any]) -> int:
    """Run once and show what came out.

    Args:
        engine: Loaded, of kind "module".
        given: Arguments of `Engine.forward`.
        others: Flag -> value, or None where it was not given: what means nothing here.

    Raises:
        UsageError: A flag of generation was given, or the inputs do not fit.
        UnknownNameError: A pattern of `--debug` names nothing.
    """
    meaningless = [f"--{name.replace('_', '-')}" for name, value in others.items() if value is not None]
    if meaningless:
        raise UsageError(
            f"the engine {engine.manifest.name!r} runs in one forward and generates nothing",
            got=", ".join(meaningless),
            hint="leave them out; --record DIR writes its tensors",
        )
    result = engine.forward(**given)
    answer(lambda: {"engine": str(engine.directory), **result.to_dict()}, lambda: _print(result))
    return 0


def _print(result: Any) -> None:
    for name, tensor in result.outputs.items():
        out.print(f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}", markup=False)
        out.print(_values(tensor), markup=False, highlight=False)
    if not settings.quiet:
        err.print(f"forward {result.seconds * 1e3:.1f} ms")
        if result.recording:
            err.print(f"recorded {Path(result.recording)}: glass show {result.recording}")


def _values(tensor: Any) -> str:
    if tensor.numel() <= MAX_PRINTED:
        return str(tensor)
    values = tensor.double()
    low, mean, high = (float(value) for value in (values.min(), values.mean(), values.max()))
    return f"  min {low:.4g}, mean {mean:.4g}, max {high:.4g}; all values: --json or --record DIR"
