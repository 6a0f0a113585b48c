"""Keeps what a check has found when it is interrupted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import reduce

from glassengine.diagnose.ladder.encoder_decoder import joined
from glassengine.results import Comparison, Interrupted, incomplete


@contextlib.contextmanager
def kept(concluded: Callable[[], Comparison], earlier: Sequence[Comparison] = ()) -> Iterator[None]:
    """Raise `Interrupted`, with what was found, where the block is interrupted and anything was found.

    Args:
        concluded: Returns what was found until it is called.
        earlier: What was found of the programs before this one, when the block begins.
    """
    before = tuple(earlier)
    try:
        yield
    except Interrupted:
        raise
    except KeyboardInterrupt as error:
        found = None
        with contextlib.suppress(Exception):  # nothing to compare yet, or a tensor was half judged
            found = incomplete(reduce(joined, [*before, concluded()]))
        if found is None:
            raise
        raise Interrupted(found) from error
