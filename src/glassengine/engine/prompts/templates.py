"""Chat templates, which are foreign programs: run in jinja's sandbox, in a process that is stopped in time.

The sandbox keeps a template from the machine, and does not keep it from filling memory or running for ever: repeated
texts, nested loops, widths of formats. Each of them ends with the process, which may take so much memory and time.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable

from glassengine.errors import CorruptError
from glassengine.reading.files import read_text

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MOST_SECONDS = 20.0
MOST_MEMORY = 512 << 20
MOST_BYTES = 16 << 20
_ENDED, _RAISED = b"+", b"-"


def bounded(
    render: Callable[[], str],
    *,
    what: str = "a chat template",
    memory: int | None = None,
    seconds: float | None = None,
    most: int | None = None,
    quiet: bool = False,
) -> str:
    """Return what `render` returns; what it changes is not seen here.

    Where processes cannot be forked it is called as it is.

    Args:
        render: Foreign code.
        what: How to call it in an error.
        memory: Bytes beyond what this process has; None for `MOST_MEMORY`.
        seconds: Until it is stopped; None for `MOST_SECONDS`.
        most: Bytes of text; None for `MOST_BYTES`.
        quiet: Whether nothing that it prints to stderr is seen.

    Raises:
        CorruptError: It raised, or took too much time or memory.
    """
    if resource is None or sys.platform == "darwin":
        return _called(render, what)
    memory = MOST_MEMORY if memory is None else memory
    seconds = MOST_SECONDS if seconds is None else seconds
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on, wherever there are threads. The child runs this template, and no code that takes locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _render(render, reader, writer, (memory, seconds), quiet=quiet)
    os.close(writer)
    try:
        answer = _answer(reader, what, seconds, MOST_BYTES if most is None else most)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    text = answer[1:].decode("utf-8", "replace")
    if answer[:1] == _ENDED:
        return text
    raise CorruptError(f"{what} failed", got=text or "its process ended: too much memory, or a crash")


def _called(render: Callable[[], str], what: str) -> str:
    """Return its result, here; compiled code may fail with something other than an `Exception`."""
    try:
        return render()
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CorruptError(f"{what} failed", got=f"{type(error).__name__}: {error}"[:4000]) from error


def _render(render: Callable[[], str], reader: int, writer: int, bounds: tuple[int, float], *, quiet: bool) -> None:
    """Write the text and end the process; nothing of what belongs to the parent is run."""
    try:
        os.close(reader)
        # Ctrl-C reaches the parent as well, which alone stops this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            faulthandler.disable()  # it may write elsewhere
        memory, cpu = _address_space() + bounds[0], int(bounds[1]) + 1
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # compiled code aborts where it gets no memory
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        try:
            answer = _ENDED + render().encode("utf-8", "replace")
        except BaseException as error:
            answer = _RAISED + f"{type(error).__name__}: {error}"[:4000].encode("utf-8", "replace")
        view = memoryview(answer)
        while view:
            view = view[os.write(writer, view) :]
    finally:
        os._exit(0)


def _answer(reader: int, what: str, seconds: float, most: int) -> bytes:
    end = time.monotonic() + seconds
    answer = bytearray()
    while True:
        left = end - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            raise CorruptError(f"{what} does not end", got=f"{seconds:.0f} seconds")
        piece = os.read(reader, 1 << 16)
        if not piece:
            return bytes(answer)
        answer += piece
        if len(answer) > most:
            raise CorruptError(f"{what} writes too much", got=f"more than {most:,} bytes")


def _address_space() -> int:
    """Return the bytes of address space that this process has, most of which belongs to libraries and mapped files."""
    return int(read_text("/proc/self/statm", most=1000).split()[0]) * os.sysconf("SC_PAGE_SIZE")
