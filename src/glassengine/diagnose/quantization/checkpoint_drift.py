"""The drift of a quantized checkpoint: what each of its modules loses, on the inputs that it had itself.

Both sides run one forward after the other; of the baseline the outputs of one forward are kept, up to a budget. When a
module of the candidate has run, the baseline's own module of that name runs on the same inputs: what differs is what
the candidate's weights introduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.numerics.metrics.drift import DriftSums, shared
from glassengine.results import DriftRow

BYTE_BUDGET = 1 << 30
"""Most bytes of outputs that are kept of one forward of the baseline."""

_Key = tuple[str, int]


@torch.no_grad()
def checkpoint_drift(
    baseline: nn.Module, candidate: nn.Module, forwards: Sequence[Mapping[str, Any]]
) -> tuple[DriftRow, ...]:
    """Return the rows of the modules without children that both sides have, in the order in which they first run."""
    modules = [_leaves(side) for side in (baseline, candidate)]
    names = [name for name in modules[0] if name in modules[1]]
    sums: dict[str, DriftSums] = {}
    for forward in forwards:
        kept: dict[_Key, Tensor] = {}
        left = BYTE_BUDGET

        def keep(key: _Key, args: Any, kwargs: Any, output: Tensor, kept: dict[_Key, Tensor] = kept) -> None:
            nonlocal left
            left -= output.nbytes
            if left >= 0:
                kept[key] = output.clone()

        def compare(key: _Key, args: Any, kwargs: Any, output: Tensor, kept: dict[_Key, Tensor] = kept) -> None:
            expected = kept.pop(key, None)
            if expected is not None:
                predicted = modules[0][key[0]](*args, **kwargs)
                own = sums.setdefault(key[0], DriftSums())
                own.add(expected, output, predicted=predicted if isinstance(predicted, Tensor) else None)

        for side, table, observer in ((baseline, modules[0], keep), (candidate, modules[1], compare)):
            with _listening({name: table[name] for name in names}, observer):
                side(**forward)
    return shared([own.row(name, name, "module", own.loss) for name, own in sums.items() if own.num_tensors])


def _leaves(side: nn.Module) -> dict[str, nn.Module]:
    return {name: one for name, one in side.named_modules() if not list(one.children())}


@contextmanager
def _listening(modules: Mapping[str, nn.Module], observe: Callable[[_Key, Any, Any, Tensor], None]) -> Iterator[None]:
    """Hand over every call of `modules` that returns a tensor; calls are counted by module."""
    calls: dict[str, int] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[name] = calls.get(name, -1) + 1
            if isinstance(output, Tensor):
                observe((name, calls[name]), args, kwargs, output)

        return hook

    handles = [one.register_forward_hook(hook_of(name), with_kwargs=True) for name, one in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
