"""Observe an eager module: the outputs of all its submodules and its taps, under their site names."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from glassengine.capture.calls.observed_call import ObservedCall, out_of_reach
from glassengine.errors import UsageError
from glassengine.program import load_model, made_up_inputs
from glassengine.program.kinds.causal_lm import is_pretrained
from glassengine.sites import ROOT, HasSites, port_leaves, port_site, tap_site, with_call
from glassengine.taps import tap, tap_sink

T = TypeVar("T")
Observe = Callable[[str, torch.Tensor], None]


@contextlib.contextmanager
def observing(module: nn.Module, observe: Observe, *, called_as: Mapping[str, str] | None = None) -> Iterator[None]:
    """Call `observe(site, tensor)` for every module output and tap of each forward of `module`, in execution order.

    The tensors are live: a later in-place op changes them, so an observer that keeps one must copy it. Call counts
    restart whenever `module` itself is entered; what runs outside of it (a submodule called by itself, activations
    computed again in a backward) is not observed.

    Args:
        module: Any module.
        observe: The observer.
        called_as: `Program.called_as`, where the names are to be those of a program. Hooks know a module with several
            aliases by its first one only.

    Raises:
        UsageError: A tap has the name of a submodule, or its name is used twice in one call of its module.
    """
    with _Calls(module, called_as or {}).listening(observe, observe):
        yield


def named_network_outputs(target: nn.Module | HasSites, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over (`<module path>.<name>`, value) of every tap (row A2).

    Args:
        target: A program or an engine, whose sites are given; or a module, which is run once on the other arguments,
            or on made-up ones where it needs some and has none, and whose tap values (copies) are given.
        *args: Arguments of the module.
        **kwargs: Keyword arguments of the module.

    Raises:
        UsageError: A tap has the name of a submodule, or its name is used twice in one call of its module; or `target`
            is something else, as what torch.export made, which knows no taps.
    """
    if isinstance(target, HasSites):
        return target.named_network_outputs()
    if not isinstance(target, nn.Module):
        raise UsageError(
            "taps are those of a module or a program",
            got=type(target).__name__,
            expected="a module, a program or an engine; torch.export leaves no taps in what it makes",
        )
    if not args and not kwargs and (is_pretrained(target) or not _can_be_called(target)):
        kwargs = dict(made_up_inputs(load_model(target))[0])
    outputs: dict[str, torch.Tensor] = {}

    def keep(site: str, tensor: torch.Tensor) -> None:
        outputs[site] = tensor.detach().clone()

    with _Calls(target, {}).listening(None, keep):
        target(*args, **kwargs)
    return iter(outputs.items())


class NetworkOutputs:
    """Mixin that gives a ported module the methods `register_network_output` and `named_network_outputs`."""

    def register_network_output(self, name: str, value: T) -> T:
        """Name an intermediate tensor; see `tap`."""
        return tap(name, value)

    def named_network_outputs(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Run the module once and iterate over its taps; see the function of this name."""
        return named_network_outputs(self, *args, **kwargs)  # type: ignore[arg-type]  # a module, too


def _can_be_called(module: nn.Module) -> bool:
    try:
        inspect.signature(module.forward).bind()
    except TypeError:
        return False
    return True


class _Calls:
    """The calls that are open in one forward of a module, and what was tapped in it."""

    def __init__(self, root: nn.Module, called_as: Mapping[str, str]) -> None:
        self._root = root
        self._paths = {submodule: name or ROOT for name, submodule in root.named_modules()}
        self._called_as = called_as
        self._num_calls: Counter[str] = Counter()
        self._open: list[tuple[nn.Module, str]] = []
        self._tapped: set[str] = set()

    @contextlib.contextmanager
    def listening(self, on_output: Observe | None, on_tap: Observe) -> Iterator[None]:
        """Install hooks and the tap sink."""

        def before(submodule: nn.Module, args: Any, kwargs: Any) -> None:
            if submodule is self._root:
                self._num_calls.clear()
                self._tapped.clear()
            elif not self._open:
                return
            path = self._paths[submodule]
            name = with_call(path, self._num_calls[path])
            self._num_calls[path] += 1
            self._open.append((submodule, self._called_as.get(name, name)))

        def after(submodule: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if not self._open:
                return
            _, where = self._open.pop()
            if on_output is not None:
                for port, tensor in port_leaves(":out", result):
                    on_output(port_site(where, port), tensor)

        def sink(name: str, tensor: torch.Tensor) -> None:
            if self._open:
                on_tap(self._tap_site(name), tensor)

        hidden = {part for submodule in self._paths for part in out_of_reach(submodule)}
        # What compiled code calls is a part of it: hooks inside would be compiled too.
        handles = [ObservedCall(submodule, before, after) for submodule in self._paths if submodule not in hidden]
        try:
            with tap_sink(sink):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _tap_site(self, name: str) -> str:
        submodule, where = self._open[-1]
        if name in dict(submodule.named_children()):
            raise UsageError(f"tap {name!r} has the name of a submodule of {where!r}", hint="give the tap another name")
        site = tap_site(where, name)
        if site in self._tapped:
            raise UsageError("a tap name is used twice in one call of its module", got=site, hint="rename one of them")
        self._tapped.add(site)
        return site
