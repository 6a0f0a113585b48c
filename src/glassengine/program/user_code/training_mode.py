"""Training mode as the user left it: which modules are in it, and whether it changes what a forward returns."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from glassengine.program.user_code.module_state import holding, own_copies

_MOST_NAMES = 4


def in_training(module: nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that are in training mode, "" for the module itself."""
    return tuple(path for path, part in module.named_modules() if getattr(part, "training", False))


def is_whole(module: nn.Module, training: Collection[str]) -> bool:
    """Whether all of a module is in training mode: how every module is made, and perhaps not meant."""
    return len(training) == sum(1 for _ in module.named_modules())


@contextlib.contextmanager
def as_given(module: nn.Module, training: Collection[str]) -> Iterator[None]:
    """Put the modules of these paths into training mode meanwhile; their statistics are given back."""
    if not training:
        yield
        return
    parts = dict(module.named_modules())
    with holding(module, None):
        for path in training:
            parts[path].training = True
        try:
            yield
        finally:
            for path in training:
                parts[path].training = False


def that_matter(module: nn.Module, training: Collection[str], arguments: Mapping[str, Any]) -> list[str]:
    """Return the modules whose training mode changes what a forward returns; none if it changes nothing.

    A draw of random numbers in training mode counts, whatever it gives: the next one is another.

    Args:
        module: In evaluation mode.
        training: Paths of the modules that were in training mode.
        arguments: Of a forward.

    Raises:
        Exception: Any error of its forward.
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        draws = Draws()  # type: ignore[no-untyped-call]
        with draws, holding(module, None):
            plain = module(**own_copies(arguments))
        before, draws.number = draws.number, 0
        with draws, as_given(module, training):
            trained = module(**own_copies(arguments))
    ours, theirs = ([x for x in pytree.tree_leaves(one) if isinstance(x, torch.Tensor)] for one in (plain, trained))
    same = len(ours) == len(theirs) and all(torch.equal(*both) for both in zip(ours, theirs, strict=True))
    if same and draws.number <= before:
        return []
    parts = dict(module.named_modules())
    reading = [path for path in training if _reads_mode(parts[path])]
    return reading or [path for path in training if path] or list(training)


def in_words(side: str, names: Collection[str]) -> str:
    """Return that modules of a side are in training mode."""
    shown = ", ".join(name or "the model itself" for name in list(names)[:_MOST_NAMES])
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    what = f"{len(names)} modules of the {side} are" if len(names) > 1 else f"1 module of the {side} is"
    return f"{what} in training mode: {shown}{more}"


def _reads_mode(part: nn.Module) -> bool:
    """Whether the mode of this very module can matter: its forward reads it, and drops something if it drops."""
    code = getattr(type(part).forward, "__code__", None)
    return code is not None and "training" in code.co_names and getattr(part, "p", 1) != 0


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that draw random numbers."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))
