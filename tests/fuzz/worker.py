"""Reads what is in folders, and says how that ended: one process that forks a child for a handful of folders at a time.

    python tests/fuzz/worker.py SHARED < tasks > answers

A task is one line of JSON: {"folder", "line", "kind" rules...}; an answer is one line of JSON: {"status", "seconds",
"bytes", "problem", "output"}. A child that dies takes nothing with it: what it was reading is named.

`problem` is "" or what a reader may not do:
    a bug              exit status 70, with the traceback
    a crash            the process died of a signal
    a hang             more than `MAX_SECONDS`, and Ctrl-C did not end it within a second; "slow" where it did
    memory             more than `MAX_BYTES` beyond what was in use
    code               a program, a library or Python of the folder was run
    a file outside     written or changed beside the folder
    a text             control characters, or JSON that is none, on stdout
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import stream

MAX_BYTES = 1 << 30
ADDRESS_SPACE = 4 << 30  # beyond what is in use: memory that is claimed and never touched costs nothing
MAX_SECONDS = float(os.environ.get("FUZZ_MAX_SECONDS", "20"))
MAX_CPU_SECONDS = 15.0
CTRL_C_SECONDS = 1.5
_OUTPUT_BYTES = 1 << 20
# ESC and its like, C1, and characters that turn text around; a terminal acts on them.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Watch:
    """What the code of this child does that it may not: filled by an audit hook."""

    def __init__(self) -> None:
        self.folder = ""
        self.may_run_code = True
        self.found = ""

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folder or self.may_run_code or self.found:
            return
        if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
            # What looks at the machine reads nothing of the folder.
            if self.folder in repr(arguments):
                self.found = f"code: {event} {arguments!r}"[:500]
        elif event == "ctypes.dlopen" and self.folder in str(arguments[0]):
            self.found = f"code: {arguments[0]} was loaded"
        elif event == "exec" and str(getattr(arguments[0], "co_filename", "")).startswith(self.folder):
            self.found = f"code: {arguments[0].co_filename} was run"
        elif event == "import" and str(arguments[1] or "").startswith(self.folder):
            self.found = f"code: {arguments[1]} was imported"


def main() -> int:
    shared = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    sys.setrecursionlimit(1000)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import readers  # noqa: F401
    import torch

    import glassengine.cli.main  # noqa: F401

    torch.set_num_threads(1)
    for text in sys.stdin:
        tasks = json.loads(text)
        if "stream" in tasks:
            import direct_kinds

            kind = direct_kinds.ALL[tasks["stream"]["kind"]]
            for found in stream.streamed(tasks["stream"], kind, sys.modules[__name__]):
                answers.write(json.dumps(found) + "\n")
        elif "warm" in tasks:
            _warm(tasks["warm"], shared)
            answers.write("{}\n")
        else:
            for answer in _ran(tasks["tasks"], shared):
                answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


def _warm(tasks: list[dict[str, Any]], shared: Path) -> None:
    """Import what these need, so that no child does it again; a child finds out, as the readers may start threads."""
    file = Path(tempfile.mkstemp()[1])
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            capture = Capture()
            for task in tasks:
                run(task, shared, Watch(), {}, capture)
        file.write_text("\n".join(sys.modules))
        os._exit(0)
    os.waitpid(child, 0)
    for name in file.read_text().split("\n"):
        if name not in sys.modules and not name.startswith(("__", "transformers_modules")):
            with contextlib.suppress(BaseException):
                importlib.import_module(name)
    file.unlink()


def _ran(tasks: list[dict[str, Any]], shared: Path) -> list[dict[str, Any]]:
    """Run tasks in children, one after the other until one dies, which the next one goes on from."""
    found: list[dict[str, Any]] = []
    while len(found) < len(tasks):
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receive)
            _child(tasks[len(found) :], shared, os.fdopen(send, "w"))
        os.close(send)
        with os.fdopen(receive, "rb", buffering=0) as pipe:
            found += _answers(child, pipe, len(tasks) - len(found))
    return found


def _answers(child: int, pipe: Any, expected: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    pending = b""
    interrupted = False
    patience = Patience(child)
    while len(found) < expected:
        ready, _, _ = select.select([pipe], [], [], CTRL_C_SECONDS if interrupted else MAX_SECONDS / 10)
        data = os.read(pipe.fileno(), 1 << 16) if ready else None
        if data:
            pending += data
            *complete, pending = pending.split(b"\n")
            found += [json.loads(line) for line in complete]
            patience = Patience(child)
            if interrupted and complete:
                where = found[-1].get("where", "")
                found[-1]["problem"] = f"slow: more than {MAX_SECONDS:g} s; Ctrl-C ended it\n{where}"
                os.kill(child, signal.SIGKILL)
                break
        elif data is None and not interrupted:
            if patience.lost():
                interrupted = True
                os.kill(child, signal.SIGINT)
        else:
            if data is None:
                os.kill(child, signal.SIGKILL)
            break
    _, how = os.waitpid(child, 0)
    if len(found) < expected and not (found and (found[-1]["problem"] or found[-1]["status"] == 130)):
        problem = f"a crash: signal {os.WTERMSIG(how)}" if os.WIFSIGNALED(how) else f"left with {os.WEXITSTATUS(how)}"
        problem = "a hang: Ctrl-C did not end it" if interrupted else problem
        found.append({"status": -1, "problem": problem, "seconds": 0.0, "bytes": 0, "output": ""})
    return found


class Capture:
    """What is written to stdout and stderr, also by native code: files without a name in their place."""

    def __init__(self) -> None:
        self._files = [os.memfd_create(name) for name in ("stdout", "stderr")]
        for number, file in enumerate(self._files, 1):
            os.dup2(file, number)
        # As Python opens them where the locale is of UTF-8: what cannot be encoded is an error on stdout.
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="strict", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)

    def taken(self, most: int) -> tuple[str, str]:
        """Return what was written since the last call."""
        found = []
        for written, file in zip((sys.stdout, sys.stderr), self._files, strict=True):
            with contextlib.suppress(ValueError):
                written.flush()
            found.append(os.pread(file, most, 0).decode("utf-8", "surrogateescape"))
            os.ftruncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
        return found[0], found[1]


class Patience:
    """Says when a child takes too long: by its own time, as this machine may do other things, or where it waits."""

    def __init__(self, child: int) -> None:
        self._child = child
        self._first = self._last = self._used()
        self._since = time.monotonic()

    def _used(self) -> float:
        words = Path(f"/proc/{self._child}/stat").read_text().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def lost(self) -> bool:
        used = self._used()
        if used - self._last > 0.02:
            self._last, self._since = used, time.monotonic()
        return used - self._first > MAX_CPU_SECONDS or time.monotonic() - self._since > MAX_SECONDS


def limited() -> tuple[Watch, Capture]:
    """Limit this child, and watch it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + ADDRESS_SPACE,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 30,) * 2)
    watch = Watch()
    sys.addaudithook(watch)
    return watch, Capture()


def _child(tasks: list[dict[str, Any]], shared: Path, pipe: Any) -> None:
    watch, capture = limited()
    for task in tasks:
        answer: dict[str, Any] = {}
        try:
            run(task, shared, watch, answer, capture)
        except BaseException:
            answer["problem"] = f"a bug: it left\n{traceback.format_exc()}"
        watch.folder = ""
        answer.setdefault("status", -1)
        for name, value in (("problem", ""), ("seconds", 0.0), ("bytes", 0), ("output", "")):
            answer.setdefault(name, value)
        pipe.write(json.dumps(answer) + "\n")
        pipe.flush()
        if answer["problem"] or answer["status"] == 130:
            break
    os._exit(0)


class _Memory:
    """Of this process, in bytes: files of the kernel that stay open."""

    def __init__(self) -> None:
        self._status = os.open("/proc/self/status", os.O_RDONLY)
        self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)

    def begin(self) -> int:
        """Forget what was used at most until now, and return what is used."""
        with contextlib.suppress(OSError):
            os.pwrite(self._clear, b"5", 0)
        return self._now(b"VmRSS:")

    def most(self) -> int:
        return self._now(b"VmHWM:")

    def _now(self, what: bytes) -> int:
        text = os.pread(self._status, 1 << 13, 0)
        return int(text[text.index(what) + len(what) :].split(None, 1)[0]) << 10


@functools.cache
def _memory(process: int) -> _Memory:
    return _Memory()


def run(task: dict[str, Any], shared: Path, watch: Watch, answer: dict[str, Any], capture: Capture) -> None:
    """Run one task, and fill in its answer."""
    import direct
    import planted
    import readers

    from glassengine.cli import errors
    from glassengine.cli.main import main as glass

    here = Path(task["folder"])
    around = here.parent
    beside = _beside(around)
    traces: list[str] = []
    real = errors._print

    def printed(error: Any, status: int) -> int:
        if status in (70, 130):
            traces.append(traceback.format_exc())
        return real(error, status)

    errors._print = printed
    name = task["line"][0]
    os.chdir(around)
    memory = _memory(os.getpid())
    before = memory.begin()
    watch.may_run_code, watch.found, watch.folder = bool(task.get("code")), "", str(around)
    began, cpu = time.monotonic(), time.process_time()
    try:
        if name.startswith("["):
            reader = next(found for room in (direct, readers, planted) if (found := getattr(room, name[1:-1], None)))
            answer["status"] = errors.exit_status(lambda: reader(here, shared))
        else:
            answer["status"] = glass([*task["line"], "--no-progress"])
    finally:
        errors._print = real
        watch.folder = ""
        text, complaints = capture.taken(_OUTPUT_BYTES)
    answer["seconds"] = round(time.monotonic() - began, 3)
    answer["bytes"] = memory.most() - before
    answer["output"] = text
    cpu = time.process_time() - cpu
    complaints = complaints[:20_000]
    answer["error"] = complaints[-600:]
    answer["where"] = traces[-1] if traces else ""
    answer["problem"] = (
        (f"a bug: exit status 70\n{traces[-1] if traces else complaints}" if answer["status"] == 70 else "")
        or ("a bug: a traceback\n" + complaints if "Traceback (most" in complaints else "")
        or watch.found
        or (f"memory: {answer['bytes'] >> 20} MiB" if answer["bytes"] > MAX_BYTES else "")
        or (f"slow: {cpu:.0f} s of processor time" if cpu > MAX_CPU_SECONDS else "")
        or _outside(beside, _beside(around))
        or _text(task["line"], complaints, text)
    )


def _beside(around: Path) -> dict[str, tuple[int, int]]:
    """Return what lies beside the folder, with times and sizes."""
    found: dict[str, tuple[int, int]] = {}
    waiting = [str(around)]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.name in ("inside", "temporary"):
                    continue
                state = entry.stat(follow_symlinks=False)
                is_file = entry.is_file(follow_symlinks=False)
                found[entry.path] = (state.st_size, state.st_mtime_ns if is_file else 0)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
    return found


def _outside(before: dict[str, Any], after: dict[str, Any]) -> str:
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return f"a file outside: {changed}" if changed else ""


def _text(line: list[str], complaints: str, text: str) -> str:
    is_json = "--json" in line
    for shown in (complaints, "" if is_json else text):
        control = _CONTROLS.search(shown)
        if control is not None:
            return f"a text: {control[0]!r} after {shown[max(0, control.start() - 60) : control.start()]!r}"
    if is_json and text and len(text) < _OUTPUT_BYTES:
        try:
            json.loads(text, parse_constant=_no_constant)
        except ValueError as error:
            return f"a text: stdout is no JSON, {error}: {text[:80]!r}"
    return ""


def _no_constant(name: str) -> None:
    raise ValueError(name)


if __name__ == "__main__":
    sys.exit(main())
