"""Judges the cases of a check in several processes: `glass check MODEL --candidate PORT --jobs N`.

This process judges the first case and merges the others in their order. Each worker prepares the same check from its
arguments and judges one case at a time. No case depends on another one, so the result is that of one process.
"""

from __future__ import annotations

import logging
import pickle
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import torch

from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.judging import judge, severity_counter
from glassengine.errors import BackendError, first_line
from glassengine.judge.end_to_end import Severity
from glassengine.judge.verdict.run import first_inputs, leave_out_gauges
from glassengine.progress import Progress, Work
from glassengine.workers import Died
from glassengine.workers.processes import Processes

logger = logging.getLogger("glassengine")

_case: int | None = None
"""In a worker, the case that is wanted."""


class _Judged(BaseException):
    """Ends the check of a worker; its argument is what was found of the case: scores, severity, tokens."""


def judge_cases(climb: Climb, request: bytes | None, jobs: int, progress: Progress) -> None:
    """Judge all cases of a climb; what other processes find is merged into its scores.

    Args:
        climb: With its sides.
        request: As `CheckRequest.for_workers` returns it.
        jobs: Number of processes, this one among them.
        progress: Called with an event after each step of this process, and after each case of another one.

    Raises:
        BackendError: A worker ended, or failed.
    """
    count, cases = severity_counter(climb, progress), climb.cases
    if _case is not None:
        judge(climb, climb.scores, cases=[cases[_case]], on_step=count)
        raise _Judged([score.found_parts() for score in climb.scores], climb.severity, climb.chosen)
    if request is None or len(cases) < 2:
        if request is not None:
            logger.warning("one process judges the check: it has one case")
        judge(climb, climb.scores, on_step=count)
        return
    num_workers = min(jobs, len(cases)) - 1
    with ThreadPoolExecutor(num_workers) as threads, closing(Processes(answer, num_workers)) as workers:

        def asked(number: int) -> bytes | Died:
            result: bytes | Died = next(
                workers.run([pickle.dumps((number, torch.get_num_threads(), request))], attempts=1)
            )
            return result

        waiting = deque(threads.submit(asked, number) for number in range(1, len(cases)))
        try:
            judge(climb, climb.scores, cases=cases[:1], on_step=count)
            while waiting:
                waiting[0].result()  # an interrupt that comes here leaves it waiting
                _merge(climb, waiting.popleft())
                done = len(cases) - len(waiting)
                progress(Work.JUDGING.says(f"judging: {done} of {len(cases)} cases", done, len(cases)))
        except KeyboardInterrupt:
            for future in waiting:
                if future.done():
                    _merge(climb, future)
            raise
    leave_out_gauges(climb.scores, first_inputs(climb.program, cases[0]))


def answer(request: bytes) -> bytes:
    """Judge one case of a check in a worker, and return what was found, or the first line of an error."""
    global _case
    _case, num_threads, asked = pickle.loads(request)  # noqa: S301 (sent by the process that started this one)
    torch.set_num_threads(num_threads)
    try:
        wanted = pickle.loads(asked)  # noqa: S301
        wanted.route(wanted)
    except _Judged as judged:
        return pickle.dumps(judged.args)
    except Exception as error:
        return pickle.dumps(first_line(error) or type(error).__name__)
    return pickle.dumps("the check ended without judging a case")


def _merge(climb: Climb, future: Future[bytes | Died]) -> None:
    """Add what was found of a case."""
    result = future.result()
    found = result.reason if isinstance(result, Died) else pickle.loads(result)  # noqa: S301 (of a process of ours)
    if isinstance(found, str):
        raise BackendError(
            "a process that judged a case has failed", got=found, hint="--jobs with fewer processes, or more memory"
        )
    scores, severity, chosen = found
    for score, later in zip(climb.scores, scores, strict=True):
        score.merge(later)
    for level, later in severity.items():
        climb.severity.setdefault(level, Severity()).merge(later)
    climb.chosen |= chosen
