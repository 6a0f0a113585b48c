"""Guesses at what went wrong in a run of several processes, from the parts of one tensor alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from glassengine.compare.hints import tensor_hints
from glassengine.compare.ranks import EXPLAINED, PutTogether, error_of
from glassengine.recording.layout import Entry
from glassengine.results import Hint

_MAX_ORDERED = 5
"""Ranks up to which every order of them is tried; beyond, exchanges of two."""


def rank_hints(source: PutTogether, entry: Entry, whole: Tensor) -> tuple[Hint, ...]:
    """Return what explains that `entry` is not `whole`: a reduction that is missing, an order, a rank, a bias.

    Args:
        source: Has `entry`.
        entry: A tensor that was judged wrong.
        whole: Its counterpart.
    """
    copies = source.copies(entry)
    if any(copy.shape != whole.shape for copy in copies.wholes) or not whole.is_floating_point():
        return ()
    worst = max(copies.wholes, key=lambda copy: error_of(copy, whole))
    error = error_of(worst, whole)
    if not 0 < error < math.inf:
        return ()
    if len(copies.wholes) > 1:
        found = list(_of_copies(copies.wholes, copies.ranks, whole, error))
    elif copies.dim is not None:
        parts = [(rank, part) for rank, part in source.parts(entry) if rank in copies.ranks[0]]
        found = list(_of_parts(parts, copies.dim, whole, error))
    else:
        found = []
    return (*found, *tensor_hints(whole.double(), worst, None))


def _of_copies(copies: Sequence[Tensor], ranks: Sequence[Sequence[int]], whole: Tensor, error: float) -> Iterator[Hint]:
    everyone = sorted(itertools.chain(*ranks))
    if error_of(torch.stack([copy.double() for copy in copies]).sum(0), whole) <= EXPLAINED * error:
        text = f"the results of ranks {_names(everyone)} add up to the baseline: a reduction (all-reduce) is missing"
        yield Hint("reduction", text, 0.95)
        return
    wrong = [of for of, copy in zip(ranks, copies, strict=True) if error_of(copy, whole) > EXPLAINED * error]
    if len(wrong) < len(ranks):
        yield Hint("rank", f"wrong in rank {_names(itertools.chain(*wrong))}, right in the others", 0.9)
        return
    if _error_but_for_a_vector(copies[0], whole) <= EXPLAINED * error:
        text = f"every row is off by the same vector: is a bias added in each of {len(everyone)} ranks, or in none?"
        yield Hint("bias", text, 0.8)


def _of_parts(parts: Sequence[tuple[int, Tensor]], dim: int, whole: Tensor, error: float) -> Iterator[Hint]:
    ranks, tensors = [rank for rank, _ in parts], [tensor for _, tensor in parts]
    for order in _orders(len(parts)):
        together = torch.cat([tensors[i] for i in order], dim)
        agrees = f"in the order of ranks {_names(ranks[i] for i in order)} they agree"
        if error_of(together, whole) <= EXPLAINED * error:
            yield Hint("order", f"{agrees}: shards are exchanged", 0.95)
            return
        if _error_but_for_a_vector(together, whole) <= EXPLAINED * error:
            text = "but for one vector in every row: shards of the weight are exchanged, those of the bias are not"
            yield Hint("order", f"{agrees} {text}", 0.9)
            return
    starts = itertools.accumulate((tensor.shape[dim] for tensor in tensors), initial=0)
    errors = [
        error_of(tensor, whole.narrow(dim, start, tensor.shape[dim]))
        for tensor, start in zip(tensors, starts, strict=False)
    ]
    wrong = [rank for rank, size in zip(ranks, errors, strict=True) if size > EXPLAINED * error]
    if len(wrong) < len(ranks):
        yield Hint("rank", f"wrong in the part of rank {_names(wrong)}, right in those of the others", 0.9)


def _orders(count: int) -> Iterator[tuple[int, ...]]:
    """Yield the orders to try, other than the own one."""
    own = tuple(range(count))
    if count <= _MAX_ORDERED:
        yield from (order for order in itertools.permutations(own) if order != own)
        return
    for j, k in itertools.combinations(own, 2):
        yield tuple(k if i == j else j if i == k else i for i in own)


def _error_but_for_a_vector(x: Tensor, whole: Tensor) -> float:
    """Return the error that is left when every row may be off by the same vector; infinite of a single row."""
    difference = x.double() - whole.double()
    rows = difference.reshape(-1, difference.shape[-1]) if difference.dim() else difference.reshape(1, 1)
    return error_of(rows.mean(0).expand_as(rows), rows) if len(rows) > 1 else math.inf


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
