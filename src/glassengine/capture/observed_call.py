"""Observes the calls of a module from around them, which costs a fifth of what hooks do; and what interrupts them.

`nn.Module.__call__` goes to `_compiled_call_impl` where an instance has one: that is how `module.compile()` works. What
is put there sees a call as the caller does: the arguments before, the result after all hooks, any exception, and
compiled code from outside. torch leaves it out of copies and pickles of the module.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, MethodType, NoneType
from typing import Any, TypeGuard

import torch
from torch import nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)


def is_interruption(error: BaseException) -> bool:
    """Return whether a signal handler raised `error`, as one that limits the time of a call does.

    It can arrive anywhere, in our code too, and is meant for the caller of the model.
    """
    if not isinstance(error, Exception):
        return True
    if isinstance(error, RecursionError):
        return False  # nor is there room to look
    handlers = {_code(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__ if handlers else None))


def _code(handler: object) -> object:
    if isinstance(handler, MethodType):
        handler = handler.__func__
    elif not hasattr(handler, "__code__"):
        handler = type(handler).__dict__.get("__call__")
    return getattr(handler, "__code__", None)


Before = Callable[[nn.Module, Any, Any], None]
After = Callable[[nn.Module, Any, Any, Any], None]

_CALL = "_compiled_call_impl"


class _Call:
    """Takes the place of a module's call; everyone who observes the module is among its observers.

    Attributes:
        compiled: What `module.compile()` had put there; None for a module that is not compiled.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any] | None) -> None:
        self.module = module
        self.compiled = compiled
        self.observers: tuple[ObservedCall, ...] = ()
        self._run: Callable[..., Any] = module._call_impl if compiled is None else compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _in_compiled_code():
            return self._run(*args, **kwargs)
        module, observers = self.module, self.observers
        for observer in observers:
            observer.before(module, args, kwargs)
        result = None
        try:
            result = self._run(*args, **kwargs)
        finally:
            for observer in observers:
                observer.after(module, args, kwargs, result)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        # Copying the attributes of a module one by one gives an unobserved module.
        return NoneType, ()


# What is compiled is what would be without us, under its own names: Dynamo begins with the frame inside of this one.
set_code_exec_strategy(_Call.__call__.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT))


class _Room:
    """Lets calls nest as deep as without us: of each four steps of recursion that a call takes, observing makes six."""

    users, before, raised = 0, 0, 0

    @classmethod
    def enter(cls) -> None:
        """Count one more observed module; the first one raises the limit."""
        if not cls.users:
            cls.before = sys.getrecursionlimit()
            cls.raised = cls.before * 3 // 2 + 100
            sys.setrecursionlimit(cls.raised)
        cls.users += 1

    @classmethod
    def leave(cls) -> None:
        """Count one less; the last one gives back the limit, unless the user has set another."""
        cls.users -= 1
        if not cls.users and sys.getrecursionlimit() == cls.raised:
            with contextlib.suppress(RecursionError):
                sys.setrecursionlimit(cls.before)


class _Hook:
    """A pre-hook that is not a part of the module: copies and pickles have one without effect."""

    def __init__(self, before: Before) -> None:
        self._before = before

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not _in_compiled_code():
            self._before(module, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        # A callable of the standard library that takes anything and returns None: it exists wherever a model is loaded.
        return getattr, (contextlib.nullcontext(), "__exit__")


class ObservedCall:
    """Observes the calls of one module until `remove`; does nothing while a compiler traces.

    Args:
        module: One that is not `out_of_reach`.
        before: Gets the module, its positional and its keyword arguments. Where pre-hooks are there
            already, the arguments are those they made.
        after: The same and the result; also when the call raises, with None for a result.
    """

    def __init__(self, module: nn.Module, before: Before, after: After) -> None:
        self.after = after
        self._module, self._before = module, before
        self._is_attached = False
        self.attach()

    def attach(self) -> None:
        """Observe, from the next call on."""
        if self._is_attached:
            return
        module = self._module
        self.before, self._hook = self._before, None
        if module._forward_pre_hooks:
            self.before = _nothing
            self._hook = module.register_forward_pre_hook(_Hook(self._before), with_kwargs=True)
        call = module.__dict__.get(_CALL)
        if not isinstance(call, _Call):
            call = module.__dict__[_CALL] = _Call(module, call)
        self._call = call
        call.observers += (self,)
        self._is_attached = True
        _Room.enter()

    @property
    def was_replaced(self) -> bool:
        """Whether `module.compile()` was called meanwhile: nothing sees its calls any more."""
        return self._is_attached and self._module.__dict__.get(_CALL) is not self._call

    def remove(self) -> None:
        """Observe no more; the module gets its own call back unless it has been compiled meanwhile."""
        if not self._is_attached:
            return
        self._is_attached = False
        call = self._call
        call.observers = tuple(other for other in call.observers if other is not self)
        own = call.module.__dict__
        if not call.observers and own.get(_CALL) is call:
            if call.compiled is None:
                del own[_CALL]
            else:
                own[_CALL] = call.compiled
        if self._hook is not None:
            self._hook.remove()
        _Room.leave()


def _in_compiled_code() -> bool:
    """Whether a compiler traces, or compiled code runs: what it calls between its graphs counts as a part of it."""
    return torch.compiler.is_compiling() or get_eval_frame_callback() is not None


def _nothing(module: nn.Module, args: Any, kwargs: Any) -> None:
    pass


def num_running(module: nn.Module) -> int:
    """Return how many calls of an observed module run in this thread."""
    count = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _Call.__call__.__code__ and frame.f_locals["self"].module is module:
            count += 1
        frame = frame.f_back
    return count


def modules_being_called() -> Iterator[nn.Module]:
    """Yield the modules whose calls are open in this thread, the innermost first; those of compiled code are not."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            yield frame.f_locals["self"]
        frame = frame.f_back


def has_compiled_call(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called."""
    call = module.__dict__.get(_CALL)
    return (call.compiled if isinstance(call, _Call) else call) is not None


def out_of_reach(module: nn.Module) -> Iterable[nn.Module]:
    """Return the modules, of `module` and those inside, whose calls cannot be observed."""
    if isinstance(module, torch.jit.ScriptModule):
        return [module]  # runs without Python
    # Copies of them run, which are made attribute by attribute and would call the originals.
    return module.module.modules() if _has_replicas(module) else ()


def why_unseen(module: nn.Module) -> str | None:
    """Return why calls of the modules inside of `module` are not seen, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted code"
    if _has_replicas(module):
        return "copies on several devices"
    compiled_forward = getattr(getattr(module, "forward", None), "_torchdynamo_orig_callable", None) is not None
    if has_compiled_call(module) or compiled_forward or "_orig_mod" in module._modules:
        return "compiled code"
    return None


def _has_replicas(module: nn.Module) -> TypeGuard[nn.DataParallel[Any]]:
    return isinstance(module, nn.DataParallel) and len(module.device_ids) > 1
