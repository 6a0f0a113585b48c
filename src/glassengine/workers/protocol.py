"""The interface of all kinds of workers."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from glassengine.errors import GlassError

Item = TypeVar("Item")

ATTEMPTS = 3
"""How often a request is made before it counts as one that kills workers."""

AHEAD = 4
"""Requests under way for each worker: one is slow, and the others go on."""


@dataclass(frozen=True)
class Died:
    """In place of a result: each worker that ran the request has died.

    Attributes:
        reason: Of the last one: "killed by signal 9".
    """

    reason: str


@dataclass(frozen=True)
class Failed:
    """In place of a result: the error that the function raised."""

    error: Exception


class Workers(Protocol):
    """A number of workers that run one function."""

    @property
    def count(self) -> int:
        """How many there are."""

    def run(self, requests: Iterable[Any], *, attempts: int = ATTEMPTS) -> Generator[Any, None, None]:
        """Yield the result of each request, or `Died`, in their order; closing the iterator stops what is under way.

        Raises:
            GlassError: The function raised it.
            RuntimeError: The function raised another error.
        """

    def close(self) -> None:
        """End all workers."""


class InProcess:
    """This process."""

    count = 1

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def run(self, requests: Iterable[Any], *, attempts: int = ATTEMPTS) -> Generator[Any, None, None]:
        """Yield the result of each request."""
        yield from map(self._function, requests)

    def close(self) -> None:
        """Do nothing."""


def result_or_error(function: Callable[[Any], Any], request: Any) -> Any:
    """Return a result, or `Failed` with an error that can be pickled."""
    try:
        return function(request)
    except GlassError as error:
        return Failed(error)
    except Exception as error:
        return Failed(RuntimeError(f"a worker has failed: {type(error).__name__}: {error}"))


def windowed(start: Callable[[Any], Item], requests: Iterable[Any], size: int) -> Iterator[Item]:
    """Yield what `start` returns of each request, in their order; at most `size` of them are started and not taken."""
    under_way: deque[Item] = deque()
    waiting = iter(requests)
    while True:
        under_way.extend(start(request) for request in itertools.islice(waiting, size - len(under_way)))
        if not under_way:
            return
        yield under_way.popleft()
