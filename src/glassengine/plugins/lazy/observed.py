"""Values that someone looks at besides the user's code: taps, and what a recording waits for.

Each is one more output of the graph that makes it anyway, under the name of its site. So observing costs no execution,
and what a tensor was when it was observed is what is seen of it, whatever is written to it later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from glassengine import taps
from glassengine.capture.calls.observed_call import modules_being_called
from glassengine.plugins.lazy.memory import viewed
from glassengine.plugins.lazy.tensor import LazyTensor
from glassengine.plugins.lazy.values import LazyCall, LazyValue
from glassengine.sites import ROOT, tap_site


class Awaited:
    """What someone waits for without running a graph; kept alive by who waits.

    Attributes:
        value: What is waited for.
        on_run: Called when a graph has run, whether or not it made this value.

    Args:
        site: Name of the output of the graph, unless the value has one.
    """

    __slots__ = ("__weakref__", "on_run", "value")

    def __init__(self, value: LazyValue, site: str, on_run: Callable[[], None]) -> None:
        value.site = value.site or site
        self.value = value
        self.on_run = on_run
        _awaited[id(self)] = weakref.ref(self)

    def __del__(self) -> None:
        """Forget it."""
        _awaited.pop(id(self), None)

    @property
    def data(self) -> torch.Tensor | None:
        """Its data; None while it is pending."""
        return self.value.data if viewed(self.value) else None


_awaited: dict[int, weakref.ref[Awaited]] = {}


def awaited() -> list[Awaited]:
    """Return what is waited for, in the order in which it was asked for."""
    found = (reference() for reference in list(_awaited.values()))
    return [one for one in found if one is not None]


def observed(calls: Mapping[int, LazyCall], outputs: Collection[LazyValue]) -> Iterator[LazyValue]:
    """Yield the values of some calls that someone looks at and that are not among the outputs, each once.

    Args:
        calls: By number.
        outputs: What the graph is run for.
    """
    seen = {id(value) for value in outputs}
    read = (value for number in sorted(calls) for value in calls[number].reads if value.site)
    for value in (*read, *(one.value for one in awaited())):
        if value.data is None and id(value) not in seen and value.call.number in calls:  # type: ignore[union-attr]
            seen.add(id(value))
            yield value


def mark_taps() -> None:
    """Let a tap of a lazy tensor name its value."""
    taps.set_lazy(LazyTensor, _mark)


def _mark(name: str, tensor: LazyTensor) -> None:
    value = tensor._lazy.get()
    value.site = value.site or tap_site(called_path() or ROOT, name)


def called_path() -> str:
    """Return the path in the outermost module that is being called of the innermost; "" where there is only one."""
    called: nn.Module | None = None
    root: nn.Module | None = None
    for module in modules_being_called():
        called, root = called or module, module
    if root is None or called is root:
        return ""
    if isinstance(root, (DataParallel, DistributedDataParallel)):
        root = root.module
    return next((path for path, module in root.named_modules() if module is called), "")
