"""Entry point of the command `glass` and of `python -m glassengine.cli`."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command line of this process and exit with its status."""
    from glassengine.cli.main import main

    sys.exit(main())


if __name__ == "__main__":
    run()
