"""Numbers for the steps of a recording."""

from __future__ import annotations

import threading


class Steps:
    """Numbers what happens in all threads, from 0 on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.num_begun = 0

    def next(self) -> int:
        """Return the number of a step that begins."""
        with self._lock:
            self.num_begun += 1
            return self.num_begun - 1
