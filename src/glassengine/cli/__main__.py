"""Entry point of the command `glass` and of `python -m glassengine`."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
from typing import Any


def run() -> None:
    """Run the command line of this process and exit with its status."""
    # A recorded script is to be collected as it would be alone.
    collects_seldom = sys.argv[1:2] != ["record"]
    if collects_seldom:
        # Commands make few cycles and millions of objects, most of them of modules that stay.
        gc.set_threshold(1_000_000, 10, 10)
    try:
        from glassengine.cli.main import main
        from glassengine.environment import set_command
    except KeyboardInterrupt:  # while modules are imported, before anything could report it
        sys.exit(130)
    set_command()
    status = main()
    if collects_seldom:
        _leave(status)
    sys.exit(status)


def _leave(status: int) -> None:
    """End the process as Python does, but leave its memory to the system: to take it apart costs up to two seconds."""
    end_threads: Any = vars(threading)["_shutdown"]
    end_others: Any = vars(atexit)["_run_exitfuncs"]
    end_threads()
    end_others()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return  # Python says what it makes of that
    os._exit(status)


if __name__ == "__main__":
    run()
