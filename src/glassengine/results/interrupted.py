"""Long work that was interrupted: what it had found until then, which is never ok."""

from __future__ import annotations

from dataclasses import replace

from glassengine.results.comparison import Comparison, Skipped


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM after something was found.

    Attributes:
        partial: What was found until then, marked as incomplete.
    """

    def __init__(self, partial: Comparison) -> None:
        super().__init__("interrupted")
        self.partial = partial


def incomplete(found: Comparison, missing: str | None = None) -> Comparison:
    """Return what was found before an interruption: not ok, and it says how far the work was.

    Args:
        found: Until then.
        missing: What was not done; None counts the steps.
    """
    steps, total = len({(pair.case, pair.step) for pair in found.pairs}), sum(one.num_steps for one in found.inputs)
    text = f"interrupted: {missing or f'{min(steps, total)} of {total} steps were begun'}"
    mild = found.ok or found.too_little
    return replace(
        found,
        ok=False,
        too_little=mild,
        standing="too little judged" if mild else found.standing,
        not_ok_because=text if mild else f"{found.not_ok_because} ({text})",
        skipped=(*found.skipped, Skipped("*", "both", text)),
        notes=(text, *found.notes),
    )
