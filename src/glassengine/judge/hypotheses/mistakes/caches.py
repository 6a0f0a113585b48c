"""Caches that are read wrongly: what an attention sees of earlier steps is lost, moved, exchanged or rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from glassengine.judge.hypotheses.mistakes.masks import MASK, masked, seen_by
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis, bound, reading
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind

_MOST_LOST = 32
_KEY, _VALUE = 1, 2
_WHICH = {"keys and values": (_KEY, _VALUE), "keys": (_KEY,), "values": (_VALUE,)}
IN_8_BITS = "the {} are cached in 8 bits, with a scale for each row"
Change = Callable[[torch.Tensor], torch.Tensor]


def of_caches(question: Question) -> Iterator[Hypothesis]:
    """Yield: an attention behind a cache that reads something else for the tokens of earlier steps."""
    for node in reversed(question.trial.ops):
        if op_name(node) == "index_copy":
            yield Hypothesis("dtype", IN_8_BITS.format("keys or values"), {node: lambda call: _in_8_bits(call.value)})
        if traits_of(node).rounding is not Rounding.ATTENTION:
            continue
        args, _ = bound(node.target, node.args, node.kwargs)
        mask = question.trial.tensor(args[MASK])
        query, key, value = (question.trial.values[args[place]] for place in range(3))
        rows, columns = query.shape[-2], key.shape[-2]
        seen = torch.ones(rows, columns, dtype=torch.bool) if mask is None else seen_by(mask, rows, columns)
        slots = seen.reshape(-1, columns).any(0).nonzero().flatten()
        if len(slots) <= rows or key.shape != value.shape:
            continue  # nothing comes from a cache
        for lost in [*range(1, min(len(slots) - rows, _MOST_LOST)), len(slots) - rows]:
            kept = seen.clone()
            kept[..., slots[len(slots) - rows - lost : len(slots) - rows]] = False
            tokens = "tokens" if lost > 1 else "token"
            text = f"the cache lacks the last {lost} {tokens} of the {len(slots) - rows} from earlier steps"
            yield Hypothesis("stale", text, {node: masked(kept)})
        for kind, text, change in _changes(slots, rows, key):
            for which, places in _WHICH.items():
                edit = reading({place: change((None, key, value)[place]) for place in places})  # type: ignore[arg-type]
                yield Hypothesis(kind, text.format(which), {node: edit})
        joined_values = {_KEY: _joined(value, key, slots, rows), _VALUE: _joined(key, value, slots, rows)}
        text = "keys and values of earlier steps are exchanged in the cache"
        yield Hypothesis("swapped", text, {node: reading(joined_values)})


def _changes(slots: torch.Tensor, rows: int, key: torch.Tensor) -> Iterator[tuple[Kind, str, Change]]:
    """Yield the words for a change, and the change, of keys or of values [..., L, D]."""
    newest, before = slots[-rows:], slots[-rows - 1 : -1]
    for by in (1, -1):
        yield "position", f"the {{}} in the cache are moved by {by} slot", partial(_taken, slots, slots.roll(by))
    yield "stale", "the {} of the newest token are not written to the cache", partial(_taken, newest, before)
    yield "position", "the {} of the newest token overwrite those before it", partial(_taken, before, newest)
    yield "other", "the {} of the newest token are zero in the cache", lambda one: one.index_fill(-2, newest, 0.0)
    for dim, text in ((0, "of another row of the batch"), (1, "of another head")):
        if key.dim() == 4 and key.shape[dim] > 1:
            numbers = torch.arange(key.shape[dim])
            for order in (numbers.flip(0), numbers.roll(1)):
                change = partial(_reordered, dim, order, slots, rows)
                yield "permuted", f"the {{}} of earlier steps are those {text}", change
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        yield "dtype", f"the {{}} are cached in {str(dtype).removeprefix('torch.')}", partial(_rounded, dtype)
    yield "dtype", IN_8_BITS, _in_8_bits


def _taken(slots: torch.Tensor, sources: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
    return _put(one, slots, one[..., sources, :])


def _reordered(dim: int, order: torch.Tensor, slots: torch.Tensor, rows: int, one: torch.Tensor) -> torch.Tensor:
    return _joined(one.index_select(dim, order), one, slots, rows)


def _rounded(dtype: torch.dtype, one: torch.Tensor) -> torch.Tensor:
    return one.to(dtype).to(one.dtype)


def _in_8_bits(one: torch.Tensor) -> torch.Tensor:
    scale = one.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (one / scale).round() * scale, one)


def _put(one: torch.Tensor, slots: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    found = one.clone()
    found[..., slots, :] = made
    return found


def _joined(earlier: torch.Tensor, now: torch.Tensor, slots: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor with the earlier slots of one and all others of another."""
    return _put(now, slots[:-rows], earlier[..., slots[:-rows], :])
