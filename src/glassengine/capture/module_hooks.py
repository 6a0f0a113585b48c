"""Hooks modules and delivers the tensors of a forward: calls, taps, caches, gradients of activations."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.capture.calls import (
    NO_TENSOR,
    CacheSites,
    EntryPoints,
    Recomputed,
    can_be_called,
    first_argument,
    generation_facts,
    is_shape_inference_call,
    tensors_in,
    token_ids,
)
from glassengine.capture.gradients import watch
from glassengine.capture.intake import Intake, StepCounter
from glassengine.capture.module_names import KnownModule, ModuleNames, OfThread, OpenCalls
from glassengine.capture.observed_call import ObservedCall, is_interruption, num_running, out_of_reach, why_unseen
from glassengine.recording.write.policy import RecordingPolicy
from glassengine.sites import ROOT, tap_site, with_call
from glassengine.taps import tap_sink

MAX_REASON = 300


class Delivery:
    """Gives what a forward shows to an intake."""

    def __init__(self, root: nn.Module, paths: Mapping[nn.Module, str], intake: Intake, *, gradients: bool) -> None:
        self.has_taps = False
        self._caches = CacheSites(root, paths)
        self._intake = intake
        self._gradients = gradients

    def deliver(self, forward: OpenCalls, where: str, port: str, tree: Any) -> None:
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

    def deliver_caches(self, forward: OpenCalls, *, whole: bool) -> None:
        """Deliver the caches that were seen in a forward, of all layers where the whole model was called."""
        try:
            for cache, where in forward.caches.values():
                for path, port, tensor in self._caches.tensors(cache, where, whole=whole):
                    num_calls = forward.num_calls.get(path + port, 0)
                    forward.num_calls[path + port] = num_calls + 1
                    site = with_call(path, num_calls) + port
                    self._intake.take_cache(site, forward.step, tensor)
        except Exception as error:
            if is_interruption(error):
                raise
            self._intake.leave_out(".:kv", forward.step, f"{type(error).__name__}: {error}"[:MAX_REASON])
        forward.caches.clear()

    def deliver_tap(self, forward: OpenCalls, name: str, tensor: Tensor) -> None:
        """Deliver a tap of the innermost call."""
        self.has_taps = True
        if not forward.open or not forward.records or torch.compiler.is_compiling():
            return
        site = tap_site(forward.open[-1][1], name)
        self._intake.take(site, forward.step, tensor)
        if self._gradients and tensor.requires_grad:
            self.watch_gradient(tensor, f"{site}:grad_out", forward)

    def watch_gradient(self, tensor: Tensor, site: str, forward: OpenCalls) -> None:
        """Deliver the gradient of a tensor when a backward has it."""
        forward.watched_sites.add(site)
        handle = watch(tensor, site, forward.step, self._intake)
        if handle is not None:
            forward.watched.append(handle)


_NO_STEP = -1
_NO_BACKWARD = -1


class _Forks:
    """How many forks lie between this process and the one that was started: asking for its number takes longer."""

    count = 0

    @classmethod
    def note(cls) -> None:
        """Count one more; called in the child."""
        cls.count += 1


os.register_at_fork(after_in_child=_Forks.note)


class ModuleHooks:
    """Observes one model.

    Args:
        root: The model.
        intake: Gets the tensors.
        policy: Says which steps are wanted.
        gradients: Whether gradients of activations are delivered too.
        holds_steps: Leave a step open when its forward ends, for what comes later: until the next one begins.
        most_held: How many steps are left open so.
    """

    def __init__(
        self,
        root: nn.Module,
        intake: Intake,
        policy: RecordingPolicy,
        *,
        gradients: bool = False,
        holds_steps: bool = False,
        most_held: int = 1,
    ) -> None:
        self.names = ModuleNames(root)
        self.steps = StepCounter()
        self._intake = intake
        self._policy = policy
        self._gradients = gradients
        self._holds_steps = holds_steps
        self._most_held = most_held
        paths = {module: known.paths[0] for module, known in self.names.known.items()}
        self._delivery = Delivery(root, paths, intake, gradients=gradients)
        self._first_argument = first_argument(root)
        self._root = root
        self._entry_points = EntryPoints(self.names.known.values())
        self.recomputed = Recomputed(self._delivery.watch_gradient if gradients else None)
        self._local = OfThread()
        self._open: dict[int, OpenCalls] = {}
        self._held: dict[int, tuple[OpenCalls, list[list[int]]]] = {}
        self.generation: dict[str, Any] = {}
        self._forks = _Forks.count
        self._handles: dict[str, ObservedCall] = {}
        self._replaced: list[str] = []
        self._rests = self._is_narrow = self._tells_calls = False
        self._may_rest = not (gradients or holds_steps)
        self._resting = threading.Lock()
        self._insides = frozenset(inside for module in self.names.known for inside in out_of_reach(module))

    def attach(self) -> None:
        """Observe every module that can be; what is delivered is what the next module gets."""
        self.names.log_aliases()
        for module, known in self.names.known.items():
            if module not in self._insides:
                self._handles[known.paths[0]] = ObservedCall(module, *self._observers(known))

    def detach(self) -> None:
        """Observe no more."""
        for path, handle in self._handles.items():
            if handle.was_replaced:
                self._replaced.append(path)
            handle.remove()
        self._handles.clear()
        self.names.stop_logging()

    def finish(self, stopped: str | None = None) -> None:
        """Complete every step that is still open; those whose forward has not ended are marked as stopped."""
        for forward in list(self._open.values()):
            interrupted = forward.in_call
            forward.open.clear()
            # Its thread may have gone, and with it what was set up there.
            with contextlib.suppress(ValueError):
                forward.leave.close()
            self._commit(forward, [], (stopped or "the end of the recording") if interrupted else None)
        for step in sorted(self._held):
            self._release(step)

    def not_called(self) -> list[str]:
        """Return the paths of modules of which no call was seen; containers, which cannot be called, are left out."""
        found = self.names.known.values()
        silent = [known for known in found if not known.is_called]
        # A call of a wrapper is one of what it wraps.
        called = {known.paths[0] for known in found if known.is_called}
        return sorted({known.paths[0] for known in silent if can_be_called(known.module)} - called)

    def not_seen(self) -> dict[str, str]:
        """Return why no call was seen of modules inside of others that were called, by path."""
        reasons = {}
        insides = {}
        for module, known in self.names.known.items():
            kind = why_unseen(module)
            if kind is not None and (known.is_called or isinstance(module, torch.jit.ScriptModule)):
                insides[known.paths[0]] = kind
        for path in self.not_called():
            for outer, kind in insides.items():
                if path == outer or outer == ROOT or path.startswith(f"{outer}."):
                    reasons[path] = f"runs inside of {kind}: that of {outer}"
                    break
        reasons |= dict.fromkeys(self._replaced, "was compiled while it was recorded, and not seen from then on")
        return reasons | dict.fromkeys(self.names.newcomers(), "came into the model while it was recorded")

    @property
    def is_open(self) -> bool:
        """Whether a call of the model is open in this thread."""
        forward = self._local.forward
        return forward is not None and bool(forward.open)

    @property
    def current_call(self) -> tuple[int, str] | None:
        """Step and path of the innermost call that is open in this thread; None where it is not recorded as one."""
        self._tells_calls = True
        forward = self._local.forward
        if forward is None or not forward.open or not forward.records:
            return None
        _, where, passed_on = forward.open[-1]
        return None if passed_on else (forward.step, where)

    @property
    def current_step(self) -> int | None:
        """The step that what happens now in this thread belongs to: the open one, or the last one that is held."""
        forward = self._current()
        return forward.step if forward is not None and forward.records else None

    @property
    def awaited_steps(self) -> list[int]:
        """The steps that are held and have gradients, if a backward comes."""
        return [step for step, (forward, _) in self._held.items() if forward.watched_sites]

    def _current(self) -> OpenCalls | None:
        forward = self._local.forward
        if forward is None:
            last = self._local.last
            # A backward on another device runs in threads of its own.
            held = self._held.get(last if last is not None else max(self._held, default=-1))
            forward = held and held[0]
        return forward

    def _observers(self, known: KnownModule) -> tuple[Callable[..., None], Callable[..., None]]:
        # They run thousands of times a second: what does not change is looked up once, and the calls of most modules
        # (once in a forward, inside of another one; one tensor goes in, one comes out) are noted right here.
        local, take = self._local, self._intake.take
        graph_task, forks, path = torch._C._current_graph_task_id, self._forks, known.paths[0]
        first, first_input = (known, path, False), path + ":in[0]"
        is_usual = not (known.is_root or len(known.paths) > 1 or known.is_wrapped or self._gradients)
        note_before, note_after = partial(self._note_before, known), partial(self._note_after, known)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if local.is_noting:
                local.wait(note_before, module, args, kwargs)
                return
            local.is_noting = True
            try:
                forward = local.forward
                if (
                    is_usual
                    and forward is not None
                    and forward.open
                    and path not in forward.num_calls
                    and not kwargs
                    and len(args) == 1
                    and type(args[0]) is Tensor
                    and module is known.module
                    and _Forks.count == forks
                    and graph_task() == _NO_BACKWARD
                ):
                    forward.num_calls[path] = 1
                    forward.open.append(first)
                    known.is_called = True
                    if forward.records:
                        take(first_input, forward.step, args[0])
                else:
                    note_before(module, args, kwargs)
                if local.waiting:
                    local.note_apart()
            finally:
                local.is_noting = False

        def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if local.is_noting:
                local.wait(note_after, module, args, kwargs, result)
                return
            local.is_noting = True
            try:
                forward = local.forward
                if (
                    is_usual
                    and forward is not None
                    and len(forward.open) > 1
                    and forward.open[-1][0] is known
                    and type(result) is Tensor
                    and module is known.module
                ):
                    _, where, passed_on = forward.open.pop()
                    if forward.records and not passed_on:
                        take(where, forward.step, result)
                else:
                    note_after(module, args, kwargs, result)
                if local.waiting:
                    local.note_apart()
            finally:
                local.is_noting = False

        return before, after

    def _note_before(self, known: KnownModule, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module is not known.module or _Forks.count != self._forks:
            return
        if torch._C._current_graph_task_id() != _NO_BACKWARD:
            self.recomputed.before(known, self._current(), args, kwargs)
            return
        forward, where = self._before(known, self._local.forward, args, kwargs)
        if where is None or not forward.records:
            return
        if args:
            self._delivery.deliver(forward, where, ":in", args)
        if kwargs:
            self._delivery.deliver(forward, where, ":in", kwargs)

    def _note_after(self, known: KnownModule, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        forward = self._local.forward
        if forward is not None and forward.open and module is known.module:
            self._after(known, forward, args, kwargs, result)
        elif self._gradients and module is known.module and torch._C._current_graph_task_id() != _NO_BACKWARD:
            self.recomputed.after(known, self._current(), result)

    def _before(
        self, known: KnownModule, forward: OpenCalls | None, args: Any, kwargs: Any
    ) -> tuple[OpenCalls, str | None]:
        """Note a call; return its forward and path with call, None where it passes on the call of its wrapper."""
        # What is interrupted while it observes a call does not hear of its end.
        if (
            forward is not None
            and forward.in_call
            and (not forward.open or (known.is_root and _is_stale(forward, known.module)))
        ):
            self._end(forward, [], "an interruption")
            forward = None
        if forward is None or not forward.open:
            forward = self._outermost(known, forward, args, kwargs)
        known.is_called = True
        return forward, self.names.enter(known, forward)

    def _after(self, known: KnownModule, forward: OpenCalls, args: Any, kwargs: Any, result: Any) -> None:
        if forward.open[-1][0] is not known:
            if not any(known is called for called, _, _ in forward.open):
                return
            while forward.open[-1][0] is not known:
                forward.open.pop()  # what observed them was interrupted, and the model caught that
        _, where, passed_on = forward.open.pop()
        error = sys.exc_info()[1] if result is None else None
        failed = error is not None and error is not forward.handled
        if forward.records and not passed_on and not failed:
            self._delivery.deliver(forward, where, ":out", result)
        if forward.open:
            return
        forward.leave.close()
        if failed:
            self._end(forward, [], f"{type(error).__name__}: {error}"[:MAX_REASON].removesuffix(": "))
        else:
            self._delivery.deliver_caches(forward, whole=known.is_root)
            if known.is_root:
                self._entry_points.note_result(forward.step, result)
                is_kept = forward.records or not forward.step
                rows = token_ids(args, kwargs, self._first_argument) if is_kept else []
                if forward.step == 0 and self.generation:
                    self.generation["prompt_lengths"] = [len(row) for row in rows]
                self._end(forward, rows, None)
            elif forward.step in self._held or forward.step == _NO_STEP:
                self._local.forward = None
        forward.in_call = False

    def _outermost(self, known: KnownModule, forward: OpenCalls | None, args: Any, kwargs: Any) -> OpenCalls:
        """Return the step that an outermost call belongs to."""
        if forward is not None and known.module in forward.alone:
            # Called by itself once more, and never the model: each of these calls is a step.
            self._end(forward, [], None)
            forward = None
        if forward is None:
            forward = self._local.forward = self._continued(known, args, kwargs) or self._new_step(args, kwargs)
        if not known.is_root and forward.step not in self._held:
            forward.alone.add(known.module)
        forward.in_call = True
        forward.handled = sys.exc_info()[1]
        if known.is_root:
            self._rest(forward)
        else:
            self._may_rest = False  # parts are called by themselves
        current = forward
        forward.leave.enter_context(tap_sink(lambda name, tensor: self._delivery.deliver_tap(current, name, tensor)))
        return forward

    def _rest(self, forward: OpenCalls) -> None:
        """Once all of the model was seen: observe what may be recorded, and nothing in a step that is left out."""
        is_known = self._may_rest and forward.step > 0 and not self._entry_points.may_follow()
        rests = is_known and not forward.records
        if rests == self._rests and (self._is_narrow or not is_known):
            return
        with self._resting:
            if is_known and any(one.records and one is not forward for one in list(self._open.values())):
                return  # in another thread
            if is_known and not self._is_narrow:
                for path in self._unwanted():
                    self._handles.pop(path).remove()
                self._is_narrow = True
            if rests != self._rests:
                self._rests = True
                for path, handle in self._handles.items():
                    if path != ROOT:
                        handle.remove() if rests else handle.attach()
                # Last, as what is interrupted in between is not attached as a whole.
                self._rests = rests

    def _unwanted(self) -> list[str]:
        """Return the paths of modules of which nothing may be recorded; none where others are named by their calls."""
        several = any(len(known.paths) > 1 or known.is_wrapped for known in self.names.known.values())
        if several or self._delivery.has_taps or self._tells_calls:
            return []
        return [path for path in self._handles if path != ROOT and not self._policy.may_want(path)]

    def _continued(self, known: KnownModule, args: Any, kwargs: Any) -> OpenCalls | None:
        """Return the last forward of this thread, if the call of a part of the model goes on where it ended."""
        held = self._held.get(-1 if self._local.last is None else self._local.last)
        step = held[0].step if held is not None else None
        if known.is_root or not self._entry_points.continues(known.module, step, (args, kwargs)):
            return None
        return held and held[0]

    def _new_step(self, args: Any, kwargs: Any) -> OpenCalls:
        if is_shape_inference_call(self._root, args, kwargs):
            return OpenCalls(_NO_STEP, False, threading.get_ident())
        own = [step for step, (held, _) in self._held.items() if held.thread == threading.get_ident()]
        for step in sorted(own)[: max(0, len(own) - self._most_held + 1)]:
            self._release(step)
        step = self.steps.next()
        if step == 0:
            self.generation = generation_facts()
        # A tracer passes placeholders, not values.
        records = self._policy.wants_step(step) and torch._C._get_tracing_state() is None
        forward = self._open[step] = OpenCalls(step, records, threading.get_ident())
        return forward

    def _end(self, forward: OpenCalls, token_ids: list[list[int]], stopped: str | None) -> None:
        forward.leave.close()
        self._local.forward = None
        if forward.step in self._held and stopped is None:
            return
        if stopped is None and forward.records and (self._holds_steps or self._entry_points.may_follow()):
            self._open.pop(forward.step, None)
            self._held[forward.step] = (forward, token_ids)
            self._local.last = forward.step
            self._intake.hold(forward.step, token_ids=token_ids)
        else:
            self._commit(forward, token_ids, stopped)

    def _release(self, step: int) -> None:
        forward, token_ids = self._held.pop(step)
        self._commit(forward, token_ids, None)

    def _commit(self, forward: OpenCalls, token_ids: list[list[int]], stopped: str | None) -> None:
        self._open.pop(forward.step, None)
        self._held.pop(forward.step, None)
        for handle in forward.watched:
            handle.remove()
        if forward.records:
            self._intake.commit(forward.step, token_ids=token_ids, stopped=stopped)


def _is_stale(forward: OpenCalls, module: nn.Module) -> bool:
    """Whether the open calls are left over: of a forward that ended while one of its calls was being observed."""
    outermost = forward.open[0][0].module
    return num_running(outermost) < (2 if outermost is module else 1)
