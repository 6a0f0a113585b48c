"""Observe an eager module: the outputs of all its submodules and its taps, under their site names."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from glassengine.errors import UsageError
from glassengine.program.program import Program
from glassengine.sites import ROOT, port_leaves, port_site, tap_site, with_call
from glassengine.taps import tap_sink


@contextlib.contextmanager
def observing(module: nn.Module, observe: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call `observe(site, tensor)` for every module output and tap of one forward of `module`, in execution order.

    The tensors are live: a later in-place op changes them, so an observer that keeps one must copy it. Call counts
    restart whenever `module` itself is entered.
    """
    paths = {submodule: name or ROOT for name, submodule in module.named_modules()}
    calls: Counter[str] = Counter()
    stack: list[str] = []

    def before(submodule: nn.Module, args: Any) -> None:
        if submodule is module:
            calls.clear()
            stack.clear()
        path = paths[submodule]
        stack.append(with_call(path, calls[path]))
        calls[path] += 1

    def after(submodule: nn.Module, args: Any, result: Any) -> None:
        where = stack.pop()
        for port, tensor in port_leaves(":out", result):
            observe(port_site(where, port), tensor)

    handles = []
    for submodule in paths:
        handles.append(submodule.register_forward_pre_hook(before))
        handles.append(submodule.register_forward_hook(after))
    try:
        with tap_sink(lambda name, tensor: observe(tap_site(stack[-1] if stack else ROOT, name), tensor)):
            yield
    finally:
        for handle in handles:
            handle.remove()


def named_network_outputs(target: nn.Module | Program, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Yield (`<module path>.<name>`, value) for every tap (row A2).

    Args:
        target: A program, whose sites are yielded; or a module, which is run once on the other arguments and whose tap
            values (copies) are yielded.

    Raises:
        UsageError: A tap name is used twice in one call of one module.
    """
    if isinstance(target, Program):
        yield from ((site.name, site) for site in target.sites if site.kind == "tap")
        return
    found: dict[str, torch.Tensor] = {}
    outputs = {name or ROOT for name, _ in target.named_modules()}

    def observe(site: str, tensor: torch.Tensor) -> None:
        path = site.split("@")[0].split(":")[0]
        if ":" in site or path in outputs:
            return
        if site in found:
            raise UsageError("a tap name is used twice in one call of its module", got=site, hint="rename one of them")
        found[site] = tensor.detach().clone()

    with observing(target, observe):
        target(*args, **kwargs)
    yield from found.items()
