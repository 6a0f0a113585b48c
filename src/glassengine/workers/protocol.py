"""What is asked of workers of any kind."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

Item = TypeVar("Item")

ATTEMPTS = 3
"""How often a request is made before what it asks for counts as what kills workers."""

AHEAD = 4
"""Requests under way, for each worker: one is slow, and the others go on."""


@dataclass(frozen=True)
class Died:
    """What comes in place of a result where each worker that was asked has died.

    Attributes:
        reason: Of the last one: "killed by signal 9".
    """

    reason: str


class Workers(Protocol):
    """A number of workers that run one function."""

    @property
    def count(self) -> int:
        """How many there are."""

    def run(self, requests: Iterable[bytes], *, attempts: int = ATTEMPTS) -> Generator[bytes | Died, None, None]:
        """Yield the result of each request, in their order; who closes the iterator stops what is under way."""

    def close(self) -> None:
        """End all workers."""


def windowed(start: Callable[[bytes], Item], requests: Iterable[bytes], size: int) -> Iterator[Item]:
    """Yield what `start` returns of each request, in their order; at most `size` of them are started and not taken."""
    under_way: deque[Item] = deque()
    waiting = iter(requests)
    while True:
        under_way.extend(start(request) for request in itertools.islice(waiting, size - len(under_way)))
        if not under_way:
            return
        yield under_way.popleft()
