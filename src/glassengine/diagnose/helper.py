"""`python -m glassengine.diagnose.helper`: a process of `glass check --jobs`, which answers the one that started it."""

from __future__ import annotations

from glassengine.diagnose.ladder.helper import answer
from glassengine.workers.pipe import serve

if __name__ == "__main__":
    serve(answer)
