"""Judges a chunk: a pure function of paths, options and numbers, the same in this process and in any other.

What is opened is kept for the next chunk of the same comparison. What measures tensors is imported with the first one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from glassengine.compare.bench import Bench
from glassengine.compare.matching.maps import load_map
from glassengine.compare.units import Answer, Chunk, Request, answer_to_bytes, asked_from_bytes, failure_of
from glassengine.recording.read.source import open_source

_MOST_OPEN = 2


def judge_chunk(asked: bytes) -> bytes:
    """Return the figures of a chunk; what is asked and found is `units.Asked` and `units.Answer`, as bytes."""
    found = asked_from_bytes(asked)
    try:
        answer = opened(found.request.key())(found.chunk)
    except Exception as error:
        answer = Answer(failure=failure_of(error))
    return answer_to_bytes(answer)


@functools.lru_cache(maxsize=_MOST_OPEN)
def opened(request: bytes) -> Callable[[Chunk], Answer]:
    """Return what answers chunks of a comparison."""
    found = Request.of(request)
    left, right = open_source(found.baseline), open_source(found.candidate)
    return answers_of(Bench.of(found, left, right, None if found.map is None else load_map(found.map)))


def answers_of(bench: Bench) -> Callable[[Chunk], Answer]:
    """Return what answers chunks of a comparison that is open, in this process."""

    @functools.cache
    def answering() -> Callable[[Chunk], Answer]:
        from glassengine.compare.answering import Answering

        return Answering(bench).answer

    return lambda chunk: answering()(chunk)
