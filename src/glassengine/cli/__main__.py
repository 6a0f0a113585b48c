"""Entry point of the command `glass` and of `python -m glassengine`."""

from __future__ import annotations

import gc
import sys


def run() -> None:
    """Run the command line of this process and exit with its status."""
    if sys.argv[1:2] != ["record"]:
        # Commands make few cycles and millions of objects. A recorded script is to be collected as it would be alone.
        gc.set_threshold(100_000, 10, 10)
    try:
        from glassengine.cli.main import main
        from glassengine.cli.options import settings
    except KeyboardInterrupt:  # while modules are imported, before anything could report it
        sys.exit(130)
    settings.owns_process = True
    sys.exit(main())


if __name__ == "__main__":
    run()
