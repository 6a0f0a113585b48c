"""`python -m glassengine`: the command `glass` of this Python."""

from __future__ import annotations

from glassengine.cli.__main__ import run

if __name__ == "__main__":
    run()
