"""The tensors of both sides, step by step: of many steps all of them do not fit into memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from glassengine.recording.layout.layout import Entry


def by_step(left: Sequence[Entry], right: Sequence[Entry]) -> Iterator[tuple[dict[int, Entry], dict[int, Entry]]]:
    """Yield the entries of each step on both sides, by their places; of all steps at once where they are mixed."""
    if not all(one <= other for side in (left, right) for one, other in itertools.pairwise(e.step for e in side)):
        yield dict(enumerate(left)), dict(enumerate(right))
        return
    groups = [itertools.groupby(enumerate(side), key=lambda numbered: numbered[1].step) for side in (left, right)]
    heads = [next(group, None) for group in groups]
    while any(head is not None for head in heads):
        step = min(head[0] for head in heads if head is not None)
        found: list[dict[int, Entry]] = [{}, {}]
        for i, head in enumerate(heads):
            if head is not None and head[0] == step:
                found[i] = dict(head[1])
                heads[i] = next(groups[i], None)
        yield found[0], found[1]
