"""`python -m glassengine`: the command `glass` of this Python."""

import os
import sys

if __name__ == "__main__":
    # Python has put the working directory first, which may be one of others: see `starting`.
    if not sys.flags.safe_path and __file__ != f"{sys.path[0]}{os.sep}glassengine{os.sep}__main__.py":
        del sys.path[0]
    from glassengine.cli.__main__ import run

    run()
