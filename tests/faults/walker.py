"""Runs scenes with a fault in children of a process that has everything imported, and judges what is left."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import gc
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
LIMIT_S = 60.0
WRITES = "create,mkdir,write,pwrite,writev,pwritev,rename,link,ftruncate,fallocate,sendfile,fsync,fdatasync"
TEMPORARY = re.compile(r"\.(part|tmp|new|temp|partial)\b|(^|/)(\.[^/]|tmp)")
TOLD = (2, 3, 4)


@dataclass(frozen=True)
class Fault:
    """A kind of fault: which calls it is for, the error, and whether it lasts from then on."""

    calls: str
    error: int
    lasting: bool = False
    seconds: int = 0


FAULTS = {
    "ENOSPC": Fault(WRITES, errno.ENOSPC),
    "ENOSPC, lasting": Fault(WRITES, errno.ENOSPC, lasting=True),
    "EIO": Fault(f"{WRITES},open,read,pread,unlink,close", errno.EIO),
    "EIO, lasting": Fault(f"{WRITES},open,read,pread,close", errno.EIO, lasting=True),
    "EMFILE, lasting": Fault("create,open", errno.EMFILE, lasting=True),
    "EINTR": Fault("create,open,write,pwrite,writev,read,pread,fsync,fdatasync,ftruncate,fallocate", errno.EINTR),
    "short": Fault("write,pwrite,writev,pwritev,read,pread", -1),
    "short, lasting": Fault("write,pwrite,writev,pwritev,read,pread", -1, lasting=True),
    "ENOMEM": Fault("mmap", errno.ENOMEM),
    "clock back": Fault("clock", -2, lasting=True, seconds=-7200),
    "clock ahead": Fault("clock", -2, lasting=True, seconds=86400 * 400),
}
# What nothing may come of: the call is made again, or time is told by another clock.
HARMLESS = ("EINTR", "short", "short, lasting", "clock back", "clock ahead")


def told(path: str) -> str:
    """Return a path without what differs from try to try."""
    return re.sub(r"(?<=tmp)[A-Za-z0-9_]{6,8}(?![A-Za-z0-9_])|\d{3,}|[0-9a-f]{12,}", "#", path)


@dataclass
class Try:
    """One try.

    Attributes:
        called: What was called, a line each; those that failed end with FAILS.
        ended: Exit status; minus the signal; or -1 for a hang.
        left: What is on disk.
        kept: What of it is there on purpose, in words.
        problem: What may not be; "" for nothing.
    """

    called: list[str]
    ended: int
    left: list[str]
    problem: str
    kept: list[str] = field(default_factory=list)

    @property
    def failed(self) -> tuple[str, str] | None:
        """The call that failed first, and its file; None where none did."""
        for line in self.called:
            if line.endswith(" FAILS"):
                _, call, path = line.removesuffix(" FAILS").split(" ", 2)
                return call, told(re.sub(r".*/written-[^/]*/?", "", path))
        return None


class Walker:
    """Runs scenes in children, with a fault in each."""

    def __init__(self, folder: Path) -> None:
        import scenes
        import torch

        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        self.scenes = scenes.SCENES
        self._folder = folder
        self._shim = ctypes.CDLL(os.environ["LD_PRELOAD"].split()[0])

    def once(self, name: str, kind: str, at: int) -> Try:
        """Run a scene with a fault at the `at`-th call; 0 is none."""
        scene, fault = self.scenes[name], FAULTS[kind]
        shared = self._folder / f"shared-{name}"
        if not shared.exists():
            self._prepare(scene, shared)
        folder = Path(tempfile.mkdtemp(prefix="written-", dir=self._folder))
        log = self._folder / "calls"
        for path in (log, shared / "reached"):
            path.unlink(missing_ok=True)
        if scene.before is not None:
            scene.before(folder, shared)
        status, text = self._child(lambda: self._run(scene, folder, shared, fault, at, log))
        found = Try(log.read_text().splitlines() if log.exists() else [], status, _files(folder), "")
        found.problem = (
            _ended_badly(scene, found, text, kind, at)
            or _left_behind(scene, found, fault)
            or self._look(scene, folder, shared, found)
        )
        if not found.problem and scene.goes_on and status in (0, *TOLD) and not (shared / "reached").exists():
            found.problem = "" if "error" in text else f"the program did not go on: {text[-300:]}"
        shutil.rmtree(folder)
        return found

    def _prepare(self, scene: Any, shared: Path) -> None:
        """Make what the scene needs, and import what it does, so that no child does it again."""
        shared.mkdir()
        trial, names = self._folder / "trial", self._folder / "names"
        trial.mkdir()

        def everything() -> None:
            scene.prepare(shared)
            if scene.before is not None:
                scene.before(trial, shared)
            scene.run(trial, shared)
            problem = scene.left(trial, shared, True)
            assert not problem, problem
            names.write_text("\n".join(sys.modules))

        status, text = self._child(everything)
        assert status == 0, text
        for name in names.read_text().split("\n"):
            if name not in sys.modules and not name.startswith("__"):
                with contextlib.suppress(BaseException):
                    importlib.import_module(name)
        shutil.rmtree(trial)
        gc.collect()
        gc.freeze()

    def _child(self, work: Any) -> tuple[int, str]:
        """Do something in a child, which leaves as Python does; return its exit status, and what it said."""
        said = self._folder / "said"
        said.unlink(missing_ok=True)
        if (child := os.fork()) == 0:
            file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for target in (1, 2):
                os.dup2(file, target)
            _end(work)
        status = _waited(child)
        return status, said.read_text(errors="replace")

    def _run(self, scene: Any, folder: Path, shared: Path, fault: Fault, at: int, log: Path) -> Any:
        calls = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._shim.fault_arm(
            os.fsencode(folder), fault.calls.encode(), ctypes.c_int(fault.error), ctypes.c_long(at),
            ctypes.c_int(fault.lasting), ctypes.c_long(fault.seconds), ctypes.c_int(calls),
        )  # fmt: skip
        return scene.run(folder, shared)

    def _look(self, scene: Any, folder: Path, shared: Path, found: Try) -> str:
        """Look at what is there in a child: to look may have its own bugs. Then do the same again without a fault."""
        answer = self._folder / "found"
        answer.unlink(missing_ok=True)
        again = found.ended != 0 or any(map(TEMPORARY.search, found.left))

        def looked(well: bool) -> str:
            try:
                problem: str = scene.left(folder, shared, well)
            except BaseException:
                problem = f"what is left cannot be read\n{traceback.format_exc()[-1500:]}"
            return problem

        def look() -> None:
            problem = looked(found.ended == 0)
            if not problem and again:
                # Nothing stands in the way of the next one.
                try:
                    scene.run(folder, shared)
                    problem = looked(True)
                except BaseException:
                    problem = f"the next one does not end well\n{traceback.format_exc()[-1500:]}"
            answer.write_text(problem)
            os._exit(0)

        status, text = self._child(look)
        return answer.read_text() if status == 0 else f"to look ended with {status}: {text[-500:]}"


def _left_behind(scene: Any, found: Try, fault: Fault) -> str:
    """Return what temporary files are there that should not be; notes those that are kept on purpose."""
    temporary = [path for path in found.left if TEMPORARY.search(path)]
    failed = {line.split()[1] for line in found.called if line.endswith(" FAILS")}
    # What cannot be taken away, or not be found because no directory can be opened, stays.
    stays = "unlink" in failed or (fault.lasting and fault.error in (errno.EMFILE, errno.EIO) and "open" in failed)
    keeps = "|".join(filter(None, (scene.keeps, scene.keeps_lasting if fault.lasting else "", "." if stays else "")))
    found.kept = [path for path in temporary if keeps and re.search(keeps, path)]
    temporary = [path for path in temporary if path not in found.kept]
    return f"temporary files: {temporary}" if temporary else ""


def _ended_badly(scene: Any, found: Try, text: str, kind: str, at: int) -> str:
    status = found.ended
    if status == -1:
        return f"a hang\n{text[-1500:]}"
    if status < 0:
        return f"signal {-status - 1}\n{text[-1500:]}"
    if status not in (0, 1, 2, 3, 4) or "Traceback (most recent" in text:
        return f"exit status {status}\n{text[-1800:]}"
    may_end = scene.may_end and found.failed is not None and re.search(scene.may_end, " ".join(found.failed))
    if status != 0 and (scene.never_fails or at == 0 or (kind in HARMLESS and not may_end)):
        return f"exit status {status}, and this never fails\n{text[-1500:]}"
    return ""


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())


def _end(work: Any) -> None:
    """Do the work, and leave as Python does."""
    from glassengine.cli.errors import exit_status

    def done() -> int:
        result = work()
        return result if type(result) is int else 0

    try:
        status = exit_status(done)
    except BaseException:
        traceback.print_exc()
        status = 99
    end: Any = vars(threading)["_shutdown"], vars(atexit)["_run_exitfuncs"]
    try:
        for each in end:
            each()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(status)


def _waited(child: int) -> int:
    """Return the exit status, minus the signal less one, or -1 for a hang."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        found, how = os.waitpid(child, os.WNOHANG)
        if found:
            return os.WEXITSTATUS(how) if os.WIFEXITED(how) else -os.WTERMSIG(how) - 1
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1
