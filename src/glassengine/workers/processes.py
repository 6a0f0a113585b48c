"""Workers that are processes of this machine, each with a thread here that asks it."""

from __future__ import annotations

import contextlib
import pickle
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from glassengine import starting
from glassengine.workers import pipe
from glassengine.workers.pipe import receive, send
from glassengine.workers.protocol import AHEAD, ATTEMPTS, Died, Failed, windowed


class Processes:
    """Processes that answer requests on stdin; each is started when it is first needed, and again when it has died.

    Unlike those of `multiprocessing`, they begin with nothing of this process's state, do not run a script again that
    has no `if __name__ == "__main__"`, and one that dies takes no other with it.

    Args:
        function: Of one argument, and of a module that can be imported.
        count: How many.
        command: Starts one that runs the function; None for this interpreter.
    """

    def __init__(self, function: Callable[[Any], Any], count: int, command: Sequence[str] | None = None) -> None:
        self.count = count
        self._command = command or starting.python(pipe.__name__, function.__module__, function.__name__)
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        self._children = [_Child(self._command) for _ in range(count)]
        for child in self._children:
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="worker")

    def run(self, requests: Iterable[Any], *, attempts: int = ATTEMPTS) -> Generator[Any, None, None]:
        """Yield the result of each request; see `protocol.Workers`."""
        started: list[Future[Any]] = []
        stopped = threading.Event()

        def start(request: Any) -> Future[Any]:
            started[:] = [one for one in started if not one.done()]
            started.append(self._threads.submit(self._ask, request, attempts, stopped))
            return started[-1]

        try:
            for future in windowed(start, requests, AHEAD * self.count):
                found = future.result()
                if isinstance(found, Failed):
                    raise found.error
                yield found
        finally:
            stopped.set()
            under_way = [one for one in started if not one.cancel() and not one.done()]
            if under_way:
                # The results of these would not be read.
                for child in self._children:
                    child.kill()

    def close(self) -> None:
        """End all processes."""
        for child in self._children:
            child.kill(for_good=True)
        self._threads.shutdown(cancel_futures=True)

    def _ask(self, request: Any, attempts: int, stopped: threading.Event) -> Any:
        child = self._idle.get()
        try:
            for _ in range(attempts):
                answer = child.ask(request)
                if not isinstance(answer, Died) or stopped.is_set():
                    break
            return answer
        finally:
            self._idle.put(child)


class _Child:
    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_over = False

    def ask(self, request: Any) -> Any:
        with self._lock:
            if self._is_over:
                return Died("it was ended")
            if self._process is None or self._process.poll() is not None:
                self._process = starting.start(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            process = self._process
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError, EOFError, ValueError, pickle.UnpicklingError):
            send(process.stdin, request)
            return receive(process.stdout)
        self._end(process)
        return Died(_ending(process.returncode))

    def kill(self, *, for_good: bool = False) -> None:
        with self._lock:
            self._is_over |= for_good
            process = self._process
        if process is None:
            return
        process.kill()
        if for_good:
            self._end(process)

    @staticmethod
    def _end(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for file in (process.stdin, process.stdout):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-status).name}"
    return f"killed by signal {-status}"
