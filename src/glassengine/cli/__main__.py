"""Entry point of the command `glass` and of `python -m glassengine`."""

from __future__ import annotations

import gc
import sys


def run() -> None:
    """Run the command line of this process and exit with its status."""
    # A recorded script is to be collected as it would be alone.
    collects_seldom = sys.argv[1:2] != ["record"]
    if collects_seldom:
        # Commands make few cycles and millions of objects, most of them of modules that stay.
        gc.set_threshold(1_000_000, 10, 10)
    try:
        from glassengine.cli.main import main
        from glassengine.cli.options import settings
    except KeyboardInterrupt:  # while modules are imported, before anything could report it
        sys.exit(130)
    settings.owns_process = True
    status = main()
    if collects_seldom:
        gc.freeze()  # the process ends: to walk all objects once more would cost more than a second
    sys.exit(status)


if __name__ == "__main__":
    run()
