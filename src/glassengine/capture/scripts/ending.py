"""End a script as the end of its interpreter would: its threads, the pools it left open, and what it registered.

Python ends the non-daemon threads first, calling what `threading._register_atexit` got before it waits for them, and
then calls what `atexit` got, the last first. A script may end within a process that goes on: what that process had
before is left alone.
"""

from __future__ import annotations

import atexit
import concurrent.futures.process
import concurrent.futures.thread  # noqa: F401
import contextlib
import inspect
import multiprocessing
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

_POLL = 0.05  # seconds


@contextlib.contextmanager
def script_ended(*, ends_process: bool = False) -> Iterator[None]:
    """On leaving, end what was begun meanwhile: threads and executors, functions registered for the end, processes.

    Args:
        ends_process: This process ends with the script: its main thread has then ended for the threads that watch it.
    """
    threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
    with _registered_at_exit() as registered:
        num_before = len(_thread_functions())
        try:
            yield
        finally:
            if ends_process:
                threading._shutdown()  # type: ignore[attr-defined]
            _end_threads(threads, num_before)
            _call(registered)
            _end_threads(threads, num_before)  # which these functions began
            for child in set(multiprocessing.active_children()) - children:
                if not child.daemon:
                    child.join()


def _thread_functions() -> list[Callable[[], object]]:
    """Return what is called before the interpreter waits for its threads; the live list."""
    found: list[Callable[[], object]] = getattr(threading, "_threading_atexits", [])
    return found


def _end_threads(before: set[threading.Thread], num_before: int) -> None:
    """Wait for the threads that are not in `before`, daemons left out; executors that keep theirs waiting are shut."""
    functions = _thread_functions()
    while len(functions) > num_before:
        _call([(functions.pop(), (), {})])
    while left := [thread for thread in set(threading.enumerate()) - before if not thread.daemon]:
        for thread in left:
            executor = _executor_of(thread)
            if executor is not None:
                # Work that is waiting is done, as at the end of the interpreter.
                executor.shutdown(wait=False)
        left[0].join(_POLL)


def _executor_of(thread: threading.Thread) -> Executor | None:
    """Return the executor that `thread` works for, if it does: a pool of threads, or of processes."""
    references = [*getattr(thread, "_args", ())[:1], getattr(thread, "executor_reference", None)]
    for reference in references:
        executor = reference() if callable(reference) else None
        if isinstance(executor, Executor):
            return executor
    return None


def _root(function: Any) -> str:
    return str(getattr(function, "__module__", None) or "").partition(".")[0]


_Registered = list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]]


@contextlib.contextmanager
def _registered_at_exit() -> Iterator[_Registered]:
    """Collect what is registered with `atexit` meanwhile, which the interpreter then does not call itself."""
    collected: _Registered = []
    register, unregister = atexit.register, atexit.unregister

    def collect(function: Any, /, *args: Any, **kwargs: Any) -> Any:
        # What is of Python itself (finalizers, say) is the process's, not its first user's; what cannot be called
        # raises there.
        is_python = inspect.isroutine(function) and _root(function) in sys.stdlib_module_names
        if is_python or not callable(function):
            return register(function, *args, **kwargs)
        collected.append((function, args, kwargs))
        return function

    def forget(function: Any, /) -> None:
        collected[:] = [item for item in collected if item[0] != function]
        unregister(function)

    atexit.register, atexit.unregister = collect, forget
    try:
        yield collected
    finally:
        atexit.register, atexit.unregister = register, unregister
        for function, args, kwargs in collected:
            register(function, *args, **kwargs)  # since something stopped us


def _call(registered: _Registered) -> None:
    """Call and forget functions, the last first; what one raises is printed and stops no other."""
    while registered:
        function, args, kwargs = registered.pop()
        try:
            function(*args, **kwargs)
        except SystemExit:
            pass
        except Exception:
            sys.stderr.write(f"Exception ignored in atexit callback: {function!r}\n")
            traceback.print_exc()
