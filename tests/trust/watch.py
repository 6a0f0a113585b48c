"""Runs command lines, each in a child of its own, and says what they did that reading may not do.

    python tests/trust/watch.py HOSTILE OWN < lines > answers

HOSTILE is where files of others lie, OWN where the commands may write. A line is JSON, the words of a command line, or
one word that names a function of `misdeeds`; an answer is {"status", "output", "found"}. The first line is a list of
command lines that are run before, so that no child imports the same again. What is watched: Python's audit events, what
is mapped as code afterwards (libraries that C++ loads raise no event), and the files beside.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import site
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

MARK = "glass-evil-mark"
"""Stands in all code of the hostile files, and is the beginning of the names of the files that it would write."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PROGRAMS = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn", "webbrowser.open")
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate")
# What looks at the machine: processor, compilers, libraries of the system.
_LOOKING = ("lscpu", "ldconfig", "gcc", "g++", "cc", "c++", "ld", "uname", "nvidia-smi", "git", "objdump", "clang")


def roots() -> list[str]:
    """Where installed code lies."""
    paths = [*sysconfig.get_paths().values(), *site.getsitepackages(), sys.base_prefix, "/usr", "/lib", "/lib64"]
    return sorted({os.path.realpath(path) for path in [*paths, *sys.path] if path})


class Watch:
    """An audit hook. What it sees that may not be is in `found`."""

    def __init__(self, hostile: Path, own: Path) -> None:
        self.hostile, self.own = str(hostile), str(own)
        self.roots = roots()
        self.found: list[str] = []
        self.on = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        self.on = False
        try:
            self._seen(event, arguments)
        finally:
            self.on = True

    def _seen(self, event: str, arguments: tuple[Any, ...]) -> None:
        told = f"{event} {arguments!r}"[:400]
        is_import = event == "import" and str(arguments[1] or "").startswith(self.hostile)
        if is_import or (event == "exec" and self._is_theirs(arguments[0])):
            self.found.append(f"code: {told}")
        elif event in _PROGRAMS:
            words = arguments[1] if event == "subprocess.Popen" else arguments
            first = words if isinstance(words, str) else str(words[0]) if words else ""
            if MARK in told or self.hostile in told or os.path.basename(first.split()[0]) not in _LOOKING:  # noqa: PTH119
                self.found.append(f"program: {told}")
        elif event == "ctypes.dlopen" and os.sep in str(arguments[0] or "") and not self._is_installed(arguments[0]):
            self.found.append(f"library: {told}")
        elif event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            if isinstance(arguments[2], int) and arguments[2] & _WRITING and not self._may_write(arguments[0]):
                self.found.append(f"written: {told}")
            elif Path(os.fsdecode(arguments[0])).name == "secret":
                self.found.append(f"opened: {told}")
        elif event in _CHANGES and not all(map(self._may_write, _changed(event, arguments))):
            self.found.append(f"changed: {told}")
        elif event in ("socket.connect", "socket.bind", "socket.getaddrinfo"):
            self.found.append(f"network: {told}")
        elif event == "pickle.find_class" and not str(arguments[0]).startswith(("torch", "collections", "_codecs")):
            self.found.append(f"pickle: {told}")

    def _is_theirs(self, code: Any) -> bool:
        waiting = [code] if isinstance(code, types.CodeType) else []
        while waiting:
            one = waiting.pop()
            if one.co_filename.startswith(self.hostile) or MARK in repr((one.co_names, one.co_consts)):
                return True
            waiting += [constant for constant in one.co_consts if isinstance(constant, types.CodeType)]
        return False

    def _is_installed(self, path: Any) -> bool:
        real = os.path.realpath(os.fsdecode(path))
        return any(real.startswith(root + os.sep) for root in self.roots) and not real.startswith(self.hostile)

    def _may_write(self, path: Any) -> bool:
        # What is worked out of a recording is kept in it.
        if isinstance(path, int) or Path(os.fsdecode(path)).name == "statistics.log":
            return True
        real = os.path.realpath(os.fsdecode(path))
        return real.startswith((self.own, "/dev/null", "/dev/shm", "/proc/self", f"/proc/{os.getpid()}"))

    def mapped(self) -> Iterator[str]:
        """Yield files that are mapped as code and are not installed."""
        for line in Path("/proc/self/maps").read_text().splitlines():
            words = line.split(None, 5)
            if "x" in words[1] and len(words) == 6 and words[5].startswith("/") and not self._is_installed(words[5]):
                yield f"library: {words[5]} is mapped as code"


def _changed(event: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the paths that are changed; the first one of a link is only what it points to."""
    if event in ("os.symlink", "os.link"):
        return arguments[1:2]
    return arguments[:2] if event == "os.rename" else arguments[:1]


def beside(folders: list[Path]) -> dict[str, tuple[int, int]]:
    """Return what lies in these folders, with sizes and times."""
    found = {}
    for folder in folders:
        for path in [folder, *folder.rglob("*")]:
            with contextlib.suppress(OSError):
                state = path.lstat()
                found[str(path)] = (state.st_size, state.st_mtime_ns if path.is_file() else 0)
    return found


def main() -> int:
    hostile, own = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    answers = os.fdopen(os.dup(1), "w")
    import misdeeds

    import glassengine.cli.main  # noqa: F401

    _warm(json.loads(sys.stdin.readline()), own)
    watch = Watch(hostile, own)
    sys.addaudithook(watch)
    for text in sys.stdin:
        words = json.loads(text)
        receive, send = os.pipe()
        before = beside([hostile, own / "cwd"])
        child = os.fork()
        if child == 0:
            _child(words, watch, own, send, misdeeds)
        os.close(send)
        with os.fdopen(receive, "rb") as pipe:
            data = pipe.read()
        _, how = os.waitpid(child, 0)
        answer = json.loads(data) if data else {"status": -1, "output": "", "found": [f"a crash: {how}"]}
        after = beside([hostile, own / "cwd"])
        changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
        answer["found"] += [f"a file: {name}" for name in changed if "statistics" not in name]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


def _warm(lines: list[list[str]], own: Path) -> None:
    """Import what these lines need; a child finds out, as it may start threads."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        from glassengine.cli.main import main as glass

        os.chdir(own / "cwd")
        for line in lines:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(BaseException):
                glass([*line, "-q", "--no-progress"])
        with os.fdopen(send, "w") as pipe:
            pipe.write("\n".join(sys.modules))
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as pipe:
        names = pipe.read().split("\n")
    os.waitpid(child, 0)
    for name in names:
        if name not in sys.modules and not name.startswith("__"):
            with contextlib.suppress(BaseException):
                importlib.import_module(name)


def _child(words: list[str], watch: Watch, own: Path, send: int, misdeeds: Any) -> None:
    from glassengine.cli.main import main as glass

    answer: dict[str, Any] = {"status": -1, "output": "", "found": []}
    out = io.StringIO()
    os.chdir(own / "cwd")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            watch.on = True
            if len(words) == 1:
                answer["status"] = getattr(misdeeds, words[0])(Path(watch.hostile))
            else:
                answer["status"] = glass([*words, "--no-progress"])
    except BaseException:
        out.write(traceback.format_exc())
    watch.on = False
    answer["output"] = out.getvalue()[-3000:]
    answer["found"] = [*dict.fromkeys(watch.found), *dict.fromkeys(watch.mapped())]
    with os.fdopen(send, "w") as pipe:
        pipe.write(json.dumps(answer))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
