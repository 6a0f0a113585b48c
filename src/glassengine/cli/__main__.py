"""Entry point of the command `glass` and of `python -m glassengine`."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command line of this process and exit with its status."""
    try:
        from glassengine.cli.main import main
        from glassengine.cli.options import settings
    except KeyboardInterrupt:  # while modules are imported, before anything could report it
        sys.exit(130)
    settings.owns_process = True
    sys.exit(main())


if __name__ == "__main__":
    run()
