"""What a helper does: replays a side of a check, for the process that asks.

It sets the check up as that process does: loads the model,
exports it, opens the record; and keeps that until it is asked about another one.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import lru_cache

import msgspec

from glassengine.diagnose.ladder.prepared import accumulation_of, climbs_of, given_to, with_record
from glassengine.errors import IncomparableError
from glassengine.judge.replay.foretold import Findings
from glassengine.judge.sides.module import threads_for
from glassengine.judge.sides.recorded_ranks import first_rank
from glassengine.judge.verdict.foreseen import Foresight, prescribed
from glassengine.program import load_model
from glassengine.progress import silent
from glassengine.recording.read.source import open_source


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What is checked: arguments of `check`, with paths as others find them.

    Attributes:
        token: Of one check: the files of another may have changed.
    """

    baseline: str
    candidate: str
    map: str | None
    inputs: str | None
    adapter: str | None
    dtype: str
    steps: int
    accumulation: str | None
    attn_implementation: str | None
    trust_remote_code: bool
    revision: str | None
    token: str


class Asked(msgspec.Struct, frozen=True):
    """What is asked: steps of a side, or nothing but to be ready.

    Attributes:
        side: 0 is the untouched model, 1 the record.
        first: Step.
        end: Step after the last one.
        nodes: Which tensors; all where there are none.
    """

    subject: Subject
    side: int = 0
    first: int = 0
    end: int = 0
    nodes: tuple[str, ...] = ()


class Found(msgspec.Struct, frozen=True):
    """What was found of each step."""

    steps: tuple[Findings, ...] = ()


@lru_cache(maxsize=1)
def _opened(key: bytes) -> tuple[Foresight, ...]:
    """Return the sides of a check; its model and threads are kept with them."""
    subject = msgspec.msgpack.decode(key, type=Subject)
    record = open_source(subject.candidate)
    of_first = first_rank(record)
    model = load_model(
        subject.baseline,
        dtype=subject.dtype,
        adapter=subject.adapter,
        attn_implementation=subject.attn_implementation,
        trust_remote_code=subject.trust_remote_code,
        revision=subject.revision,
    )
    model, given, _ = given_to(model, subject.inputs, of_first, alone=True)
    stack = ExitStack()
    stack.enter_context(threads_for(model.module))
    (climb,) = climbs_of(model, given, subject.steps, stack, silent, of_first)
    climb.accumulation = accumulation_of(subject.accumulation)
    with_record(climb, record, subject.map)
    (case,) = climb.cases
    if len(climb.scores) != 2:
        raise IncomparableError("a record is one side beside the model", got=f"{len(climb.scores)} sides")
    chooser = None if prescribed(case) else climb.chooser()
    sides = [score.side for score in climb.scores]
    return tuple(Foresight(climb.program, case, side, chooser if number else None) for number, side in enumerate(sides))


def answer(request: bytes) -> bytes:
    """Return what is found of what is `Asked`, as `Found`."""
    asked = msgspec.msgpack.decode(request, type=Asked)
    sides = _opened(msgspec.msgpack.encode(asked.subject))
    return msgspec.msgpack.encode(
        Found(tuple(sides[asked.side].findings(step, asked.nodes) for step in range(asked.first, asked.end)))
    )
