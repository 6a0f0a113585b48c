"""Gradients of activations and parameters, the steps they belong to, and what an optimizer made of them.

Schedules of pipelines add several microbatches up to one update and run the backwards in any order. What a parameter
has after the first of them belongs to the first step, and what it has after the last one, the sum over all, to the last
step: as in a run that takes one microbatch after the other.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from glassengine.capture.intake import Intake
from glassengine.capture.module_names import ModuleNames
from glassengine.sites import with_call


class Microbatches:
    """Counts the microbatches of an update."""

    def __init__(self, count: int, intake: Intake, awaited: Callable[[], Iterable[int]]) -> None:
        self.are_several = count > 1
        self._count, self._intake, self._awaited = count, intake, awaited
        # Those of the update, and the last one before it.
        self._steps: set[int] = set()
        self._before = -1
        self._backwards: list[int] = []
        self._num_added: Counter[Tensor] = Counter()

    def step_of(self, parameter: Tensor) -> int | None:
        """Return the step that what is added to a parameter now belongs to; None if to none that is known."""
        own = self._intake.step_of_backward()
        self._steps.update(step for step in self._awaited() if step > self._before)
        steps = self._of_update()
        is_over = self._num_added[parameter] >= self._count or (own is not None and steps and own > steps[-1])
        if is_over and len(steps) == self._count:
            self._before = steps[-1]
            self._steps = {step for step in self._steps if step > self._before}
            self._num_added.clear()
            self._backwards.clear()
            steps = self._of_update()
        number = self._num_added[parameter]
        self._num_added[parameter] += 1
        if own is not None:
            if own not in self._backwards:
                self._backwards.append(own)
            number = self._backwards.index(own)
        step = steps[number] if number < len(steps) else own
        return own if step is None or self._intake.has_ended(step) else step

    def _of_update(self) -> list[int]:
        return sorted(self._steps)[: self._count]


def watch(tensor: Tensor, site: str, step: int, intake: Intake) -> Any:
    """Deliver the gradient of `tensor` as `site` when a backward computes it, and as `@1` the second one's.

    Returns the handle that ends it, where nothing else will: a leaf outlives the graph of the step.
    """
    seen = 0

    def arrived(gradient: Tensor | None) -> None:
        nonlocal seen
        if gradient is None:
            return  # of what a custom function has no gradient for
        path, colon, port = site.partition(":")
        intake.note_backward(step)
        if seen and not intake.takes_again:
            return
        intake.take(f"{with_call(path, seen)}{colon}{port}" if seen else site, step, gradient)
        seen += 1

    handle = tensor.register_hook(arrived)  # type: ignore[no-untyped-call]
    return handle if tensor.is_leaf else None


class ParameterHooks:
    """Delivers the gradient of every parameter each time a backward has added to it, and the state after a step.

    Gradients that data-parallel ranks average are delivered when that is done.

    Sites: `<parameter>:grad`, `<parameter>@1:grad` for the second backward of a step, and so on; after a step of the
    optimizer `<parameter>:param` and `<parameter>:state.<name>`, e.g. `:state.exp_avg`.

    Args:
        names: The names of the model.
        intake: Gets the tensors.
        current_step: Says which step a backward or an update belongs to; None when to none.
        gradients: Whether gradients are delivered.
        optimizer: Whose updates are delivered; True for those of every optimizer.
        microbatches: Where backwards may come after the forwards of other steps.
    """

    def __init__(
        self,
        names: ModuleNames,
        intake: Intake,
        current_step: Callable[[], int | None],
        *,
        gradients: bool,
        optimizer: torch.optim.Optimizer | bool | None,
        microbatches: Microbatches,
    ) -> None:
        self._microbatches = microbatches
        self._names = names.parameters()
        # What ranks exchange is in place when the backward ends, and not before.
        self._is_exchanged = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in names.known)
        # Of each backward that has not ended; those that fail never do.
        self._waiting: dict[int, list[tuple[int, Tensor]]] = {}
        self._intake = intake
        self._current_step = current_step
        self._gradients = gradients
        self._optimizer = optimizer
        # The last backward of which the end is awaited.
        self._backward = -1
        # Of each step that has not ended, how often what was delivered.
        self._num_seen: dict[int, Counter[str]] = {}
        self._hooks = contextlib.ExitStack()
        # What has been computed of a parameter in a backward, and not been added to it.
        self._coming_ones: dict[Tensor, Tensor] = {}
        # Those whose step goes on, and those that ended within the step of another one.
        self._updating: list[torch.optim.Optimizer] = []
        self._inner: list[torch.optim.Optimizer] = []
        self._step_of_updates: int | None = None

    def attach(self) -> None:
        """Install the hooks."""
        if self._gradients:
            for parameter in self._names:
                if parameter.requires_grad:
                    handle = parameter.register_post_accumulate_grad_hook(self._accumulated)  # type: ignore[no-untyped-call]
                    self._hooks.enter_context(handle)
                    if self._microbatches.are_several and not self._is_exchanged:
                        coming = functools.partial(self._coming, parameter)
                        self._hooks.enter_context(parameter.register_hook(coming))  # type: ignore[no-untyped-call]
        if self._optimizer:
            self._hooks.enter_context(register_optimizer_step_pre_hook(self._begins))
            self._hooks.enter_context(register_optimizer_step_post_hook(self._ends))

    def detach(self) -> None:
        """Remove every hook."""
        self._hooks.close()

    def _coming(self, parameter: Tensor, gradient: Tensor) -> None:
        """Note a gradient that a schedule may take to itself (zero bubble): it adds it up when the backward is over."""
        if not self._coming_ones:
            torch.autograd.Variable._execution_engine.queue_callback(self._taken)
        self._coming_ones[parameter] = gradient

    def _taken(self) -> None:
        for parameter, gradient in self._coming_ones.items():
            step = self._microbatches.step_of(parameter)
            if step is not None:
                total = gradient if parameter.grad is None else parameter.grad + gradient
                self._deliver(step, self._names[parameter], ":grad", total)
        self._coming_ones.clear()

    def _accumulated(self, parameter: Tensor) -> None:
        self._coming_ones.pop(parameter, None)
        several = self._microbatches.are_several
        step = self._microbatches.step_of(parameter) if several else self._current_step()
        if step is None or parameter.grad is None:
            return
        backward = torch._C._current_graph_task_id()
        queue = torch.autograd.Variable._execution_engine.queue_callback
        if not self._is_exchanged:
            if backward != self._backward:
                self._backward = backward
                queue(lambda: self._intake.hold(step))
            self._deliver(step, self._names[parameter], ":grad", parameter.grad)
            return
        if backward not in self._waiting:
            self._waiting[backward] = []
            # What is called first then comes after all that was asked for meanwhile, by who exchanges them too.
            queue(lambda: queue(lambda: self._exchanged(backward)))
        self._waiting[backward].append((step, parameter))

    def _exchanged(self, backward: int) -> None:
        waiting = self._waiting.pop(backward, [])
        for step, parameter in waiting:
            if parameter.grad is not None:
                self._deliver(step, self._names[parameter], ":grad", parameter.grad)
        for step in {step for step, _ in waiting}:
            self._intake.hold(step)

    def _begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = self._current_step()
        if step != self._step_of_updates or optimizer in self._updating:  # one before it failed
            self._step_of_updates = step
            self._updating.clear()
            self._inner.clear()
        self._updating.append(optimizer)

    def _ends(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Deliver what the outermost of several made: those that share the state among ranks call others, and go on."""
        if optimizer in self._updating:
            del self._updating[self._updating.index(optimizer) :]
        if self._updating:
            self._inner.append(optimizer)
            return
        each, self._inner = [optimizer, *self._inner], []
        if self._optimizer is True or any(one is known for one in each for known in _wrapped(self._optimizer)):
            self._updated(each)

    def _updated(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        groups = optimizers[0].param_groups
        step = self._current_step()
        if step is None or not any(p in self._names for group in groups for p in group["params"]):
            return
        for group in groups:
            for parameter in group["params"]:
                name = self._names.get(parameter)
                if name is None:
                    continue
                self._deliver(step, name, ":param", parameter)
                state: dict[str, Any] = next(
                    (one.state[parameter] for one in optimizers if one.state.get(parameter)), {}
                )
                for key, value in state.items():
                    if isinstance(value, Tensor):
                        self._deliver(step, name, f":state.{key}", value)
        self._intake.hold(step)

    def _deliver(self, step: int, name: str, port: str, tensor: Tensor) -> None:
        counts = self._num_seen.get(step)
        if counts is None:
            for ended in [known for known in self._num_seen if self._intake.has_ended(known)]:
                del self._num_seen[ended]
            counts = self._num_seen[step] = Counter()
        call = counts[name + port]
        counts[name + port] += 1
        self._intake.take(f"{with_call(name, call)}{port}", step, tensor)


def _wrapped(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer, and those that wrappers of it call (accelerate's, Lightning's), which alone have hooks."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "optimizer", None)
