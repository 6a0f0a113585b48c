"""`python -P -m glassengine.compare.chunk PLAN NUMBER`: judges chunks of a plan, one of many jobs without a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from glassengine.compare.jobs import judge_planned
from glassengine.errors import GlassError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status.

    Args:
        arguments: Those of the process when None.
    """
    parser = argparse.ArgumentParser(prog="python -P -m glassengine.compare.chunk", description=__doc__)
    parser.add_argument("plan", nargs="?", type=Path, help="file of glass compare --plan")
    parser.add_argument("number", nargs="?", type=int, help="number of this job, from 0, e.g. $SLURM_ARRAY_TASK_ID")
    parser.add_argument("--of", type=int, metavar="N", help="number of jobs; default: one for each chunk")
    given = parser.parse_args(arguments)
    if given.plan is None or given.number is None:
        parser.error("PLAN and NUMBER are needed")
    try:
        done = judge_planned(given.plan, given.number, given.of)
    except GlassError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    sys.stdout.write(f"chunks {', '.join(map(str, done)) or 'none'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
