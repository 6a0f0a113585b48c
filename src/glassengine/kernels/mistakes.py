"""Names the kind of mistake."""

from __future__ import annotations

from typing import Any

from glassengine.results.kernels import KernelMistake


def mistakes_of(found: Any, prepared: Any, candidate: Any, call: Any) -> tuple[KernelMistake, ...]:
    """Return the kinds of mistakes that make what a candidate made, the likeliest first."""
    return ()
