"""What the observers of a model deliver of a forward: tensors of calls, taps, caches, gradients of activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.capture.calls.interruption import is_interruption
from glassengine.capture.calls.leaves import KV_AXES, NO_TENSOR, CacheSites, tensors_in
from glassengine.capture.calls.names import Forward
from glassengine.capture.intake.gradients import watch
from glassengine.capture.intake.intake import Intake
from glassengine.sites import tap_site, with_call

MAX_REASON = 300


class Delivery:
    """Gives what a forward shows to an intake.

    Args:
        root: The model.
        paths: Module -> its path.
        intake: Gets the tensors.
        gradients: Whether gradients of activations are delivered too.
    """

    def __init__(self, root: nn.Module, paths: Mapping[nn.Module, str], intake: Intake, *, gradients: bool) -> None:
        self._caches = CacheSites(root, paths)
        self._intake = intake
        self._gradients = gradients

    def deliver(self, forward: Forward, where: str, port: str, tree: Any) -> None:
        """Deliver the tensors of the inputs or the result of a call."""
        caches: list[Any] = []
        try:
            if type(tree) is dict and not self._gradients:
                # The short way of keyword arguments.
                take, step = self._intake.take, forward.step
                for key, item in tree.items():
                    kind = type(item)
                    if kind is Tensor:
                        take(f"{where}{port}.{key}", step, item)
                    elif kind not in NO_TENSOR:
                        for name, tensor in tensors_in(f"{port}.{key}", item, caches=caches):
                            take(where + name, step, tensor)
            else:
                for name, tensor in tensors_in(port, tree, caches=caches):
                    site = where if name == ":out" else where + name
                    self._intake.take(site, forward.step, tensor)
                    if self._gradients and tensor.requires_grad:
                        side = ":grad_in" if port == ":in" else ":grad_out"
                        self.watch_gradient(tensor, where + side + name[len(port) :], forward)
        except Exception as error:
            if is_interruption(error):
                raise
            # A container of the user's that cannot be looked into; the model may never do so.
            self._intake.leave_out(where + port, forward.step, f"{type(error).__name__}: {error}"[:MAX_REASON])
        for cache in caches:
            forward.caches.setdefault(id(cache), (cache, set()))[1].add(where.partition("@")[0])

    def deliver_caches(self, forward: Forward, *, whole: bool) -> None:
        """Deliver the caches that were seen in a forward, of all layers where the whole model was called."""
        try:
            for cache, where in forward.caches.values():
                for path, port, tensor in self._caches.tensors(cache, where, whole=whole):
                    num_calls = forward.num_calls.get(path + port, 0)
                    forward.num_calls[path + port] = num_calls + 1
                    site = with_call(path, num_calls) + port
                    self._intake.take(site, forward.step, tensor, axes=KV_AXES if tensor.dim() == 4 else None)
        except Exception as error:
            if is_interruption(error):
                raise
            self._intake.leave_out(".:kv", forward.step, f"{type(error).__name__}: {error}"[:MAX_REASON])
        forward.caches.clear()

    def deliver_tap(self, forward: Forward, name: str, tensor: Tensor) -> None:
        """Deliver a tap of the innermost call."""
        if not forward.open or not forward.records or torch.compiler.is_compiling():
            return
        site = tap_site(forward.open[-1][1], name)
        self._intake.take(site, forward.step, tensor)
        if self._gradients and tensor.requires_grad:
            self.watch_gradient(tensor, f"{site}:grad_out", forward)

    def watch_gradient(self, tensor: Tensor, site: str, forward: Forward) -> None:
        """Deliver the gradient of a tensor when a backward has it."""
        forward.watched_sites.add(site)
        handle = watch(tensor, site, forward.step, self._intake)
        if handle is not None:
            forward.watched.append(handle)
