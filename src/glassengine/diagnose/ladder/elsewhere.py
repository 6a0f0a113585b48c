"""Other processes replay the sides of a check against a record: `glass check MODEL --candidate RECORD --jobs N`.

The reference, the bookkeeping and every verdict stay in this process, which runs as ever and takes from the others what
they have found (`judge.replay.foretold`): so that what comes out is that of one process to the last bit. A record of
single ops is cut by steps and ops, which any number of processes share. A side that is judged by segments is one
sequence of steps, for one process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import uuid
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import torch

from glassengine.compare.session import absolute_path
from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.helper import Asked, Found, Subject, answer
from glassengine.errors import UsageError
from glassengine.judge.replay.foretold import Findings, HelpedReplay
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.protocol import Side
from glassengine.judge.sides.recorded_ranks import RecordedRanks
from glassengine.judge.step_inputs import Given
from glassengine.judge.verdict.score import Score
from glassengine.stores.places import place
from glassengine.workers import Died, Workers
from glassengine.workers.cluster import RayTasks
from glassengine.workers.processes import Processes

logger = logging.getLogger("glassengine")

_SIDES = 2


class Helpers:
    """Those who replay sides; none without a `subject`.

    Args:
        subject: What is checked.
        jobs: Processes, or tasks at a time.
        cluster: Address of a Ray cluster; None for processes of this machine.
    """

    def __init__(self, subject: Subject | None, jobs: int, cluster: str | None) -> None:
        self._subject, self._jobs, self._cluster = subject, jobs, cluster
        self._pools: Sequence[Workers] = ()
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Helpers:
        """Start them; they load the model while this process does."""
        if self._subject is None:
            return self
        if self._cluster is not None:
            tasks = RayTasks(answer, self._cluster, self._jobs if self._jobs > 1 else None)
            self._pools = [tasks] * _SIDES
        else:
            self._pools = [Processes(answer, count) for count in (1, self._jobs - 1)]
        self._threads = ThreadPoolExecutor(_SIDES, thread_name_prefix="opening")
        for pool in self._pools:
            self._threads.submit(self._open, pool)
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        for pool in dict.fromkeys(self._pools):
            pool.close()
        if self._threads is not None:
            self._threads.shutdown()

    def _open(self, pool: Workers) -> None:
        """Let one of them get ready; what goes wrong there is raised when something is asked of it."""
        assert self._subject is not None
        for _ in pool.run([msgspec.msgpack.encode(Asked(self._subject))], attempts=1):
            return

    @contextlib.contextmanager
    def helping(self, climb: Climb, num_climbs: int) -> Iterator[None]:
        """Let them replay the sides of a climb, where they can, as long as this lasts."""
        helped: list[tuple[Side, Replay]] = []
        with contextlib.ExitStack() as stack:
            for number, score in enumerate(climb.scores if self._pools else ()):
                own, why_not = score.side.replay, _why_not(climb, score, num_climbs)
                if why_not is not None or own is None:
                    logger.warning("the rung %r is judged in this process: %s", score.side.rung, why_not)
                    continue
                lane = stack.enter_context(closing(self._lane(climb, number, has_memory=own.has_memory)))
                score.side.replay = _helped(score.side, own, lane, climb)
                helped.append((score.side, own))
            try:
                yield
            finally:
                for side, own in helped:
                    assert isinstance(side.replay, HelpedReplay)
                    logger.info("rung %r: %d tensors were replayed elsewhere", side.rung, side.replay.num_taken)
                    side.replay = own

    def _lane(self, climb: Climb, side: int, *, has_memory: bool) -> Generator[Findings, None, None]:
        """Yield what is found of a side, step by step."""
        assert self._subject is not None
        pool, total = self._pools[side], climb.cases[0].num_steps
        if has_memory:
            # A process keeps its place; where a task runs next is not known, so that one does it all.
            size = total if self._cluster is not None else 1
            asks = [Asked(self._subject, side, at, min(at + size, total)) for at in range(0, total, size)]
            yield from _in_order(pool, asks)
            return
        names = [node.name for node in climb.program.graph.nodes if node.op == "call_function"]
        parts = [tuple(names[at :: pool.count]) for at in range(min(pool.count, len(names)))]
        asks = [Asked(self._subject, side, step, step + 1, part) for step in range(total) for part in parts]
        with closing(pool.run(map(msgspec.msgpack.encode, asks))) as results:
            for step in range(total):
                yield _joined([_step(pool, ask, next(results)) for ask in asks[step * len(parts) :][: len(parts)]])


def helpers(jobs: int, cluster: str | None, *, is_record: bool, **arguments: Any) -> Helpers:
    """Return those who help with a check.

    Args:
        jobs: As for `check`.
        cluster: As for `check`.
        is_record: Whether the candidate is a record.
        arguments: Of the check, those that a `Subject` has.

    Raises:
        UsageError: There is nothing for them to do, or they cannot be given the model.
    """
    if jobs < 1:
        raise UsageError("invalid --jobs", got=str(jobs), expected="a number from 1 on")
    if jobs == 1 and cluster is None:
        return Helpers(None, jobs, cluster)
    if not is_record:
        raise UsageError(
            "--jobs and --cluster are for a recorded candidate",
            got=str(arguments["candidate"]),
            expected="a recording, or a directory or file of tensors",
            hint="remove them, or record the candidate: glass record",
        )
    if not isinstance(arguments["baseline"], str | Path):
        raise UsageError(
            "other processes cannot be given a model that is open in this one",
            got=type(arguments["baseline"]).__name__,
            expected="a directory, or file.py:factory",
            hint="jobs=1",
        )
    if not isinstance(arguments["inputs"], str | None):
        raise UsageError(
            "other processes cannot be given tensors of this one",
            got="inputs",
            expected="a file, or file.py:factory",
            hint="jobs=1",
        )
    paths = {name: arguments[name] for name in ("baseline", "candidate", "map", "inputs", "adapter")}
    told = {name: None if path is None else _found_by(path) for name, path in paths.items()}
    return Helpers(Subject(**{**arguments, **told}, token=uuid.uuid4().hex), jobs, cluster)


def _found_by(path: str | Path) -> str:
    """Return a path as others find it; a factory keeps its name, and a hub id is none."""
    file, colon, factory = str(path).rpartition(":")
    if colon and file.endswith(".py") and place(file).exists():
        return f"{absolute_path(file)}:{factory}"
    return absolute_path(path) if place(path).exists() else str(path)


def _why_not(climb: Climb, score: Score, num_climbs: int) -> str | None:
    """Return why a side cannot be replayed elsewhere; None where it can."""
    if num_climbs > 1:
        return "the model is several programs"
    if len(climb.cases) > 1:
        return "the inputs are several cases"
    if score.side.replay is None:
        return "it is not replayed"
    if isinstance(score.side, RecordedRanks):
        return "it is put together from the parts of several ranks"
    return None if score.drift is None else "its drift needs all values"


def _helped(side: Side, own: Replay, lane: Iterator[Findings], climb: Climb) -> HelpedReplay:
    def rerun(steps: Sequence[Given]) -> None:
        twin = dataclasses.replace(side, replay=own)
        twin.begin(climb.cases[0])
        with torch.no_grad():
            for given in steps:
                twin.step(given)

    return HelpedReplay(own, rerun, lambda: next(lane))


def _in_order(pool: Workers, asks: Sequence[Asked]) -> Iterator[Findings]:
    """Yield what is found of steps that only one process does; what kills it is at the first of those that are lost."""
    with closing(pool.run(map(msgspec.msgpack.encode, asks))) as results:
        for ask, result in zip(asks, results, strict=True):
            if isinstance(result, Died):
                yield from itertools.repeat(Findings(lost={"": _told(result)}), asks[-1].end - ask.first)
                return
            yield from _found(result).steps


def _step(pool: Workers, ask: Asked, result: bytes | Died) -> Findings:
    """Return what is found; of ops that kill workers, of the halves, down to the one that does."""
    if not isinstance(result, Died):
        return _found(result).steps[0]
    if len(ask.nodes) < 2:
        return Findings(lost=dict.fromkeys(ask.nodes, _told(result)))
    middle, found = len(ask.nodes) // 2, []
    for nodes in (ask.nodes[:middle], ask.nodes[middle:]):
        half = msgspec.structs.replace(ask, nodes=nodes)
        with closing(pool.run([msgspec.msgpack.encode(half)], attempts=2)) as results:
            found.append(_step(pool, half, next(results)))
    return _joined(found)


def _joined(parts: Sequence[Findings]) -> Findings:
    """Return the findings of parts of one step; where all are lost, nothing is known of its inputs."""
    known = next((one for one in parts if one.machine), parts[0])
    lost = {node: why for one in parts for node, why in one.lost.items()}
    joined: Findings = msgspec.structs.replace(
        known, found=tuple(finding for one in parts for finding in one.found), lost=lost
    )
    return joined


def _found(result: bytes) -> Found:
    return msgspec.msgpack.decode(result, type=Found)


def _told(died: Died) -> str:
    return f"each worker that judged it was {died.reason}"
