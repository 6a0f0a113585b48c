"""Long work that was interrupted: what it had found until then, which is never ok."""

from __future__ import annotations

from glassengine.results.comparison import Comparison


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM after something was found.

    Attributes:
        partial: What was found until then, marked as incomplete.
    """

    def __init__(self, partial: Comparison) -> None:
        super().__init__("interrupted")
        self.partial = partial
