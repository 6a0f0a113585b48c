"""Fail the n-th system call of everything that is written, for n = 1, 2, ... until there is no such call.

    python tests/faults/walk.py [--every N] [SCENE...]        `make faults`

A library for LD_PRELOAD, `shim.c`, fails the calls; it is compiled here. Only those on files below the folder that is
written count. Each try is a child of its own. Prints, for every scene and kind of fault, the calls after which it
was injected, how the program ended, and what was left on disk; then what may not be. Exit status 1 where there is that.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import errno
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
LIMIT_S = 60.0
WRITES = "create,mkdir,write,pwrite,writev,pwritev,rename,link,ftruncate,fallocate,sendfile,fsync,fdatasync"
CLOSING = "fsync,fdatasync,close"
TEMPORARY = re.compile(r"\.(part|tmp|new|temp|partial)\b|~$|^tmp|^\.tmp")


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
    "EMFILE, lasting": Fault("create,open", errno.EMFILE, lasting=True),
    "EINTR": Fault("create,open,write,pwrite,writev,read,pread,fsync,fdatasync,ftruncate", errno.EINTR),
    "short": Fault("write,pwrite,writev,pwritev,read,pread", -1),
    "ENOMEM": Fault("mmap", errno.ENOMEM),
    "clock back": Fault("clock", -2, lasting=True, seconds=-7200),
    "clock ahead": Fault("clock", -2, lasting=True, seconds=86400 * 400),
}


def compiled(folder: Path) -> Path | None:
    """Compile the shim with the system's compiler; None where there is none."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None or not sys.platform.startswith("linux"):
        return None
    target = folder / "shim.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", target, HERE / "shim.c", "-ldl"], check=True)
    return target


@dataclass
class Try:
    """One try: what was called, how it ended, what is left, and what is wrong with that."""

    called: list[str]
    ended: str
    left: list[str]
    problem: str


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
        self._shared: dict[str, Path] = {}

    def once(self, name: str, fault: Fault, at: int) -> Try:
        """Run a scene with a fault at the `at`-th call; 0 is none."""
        scene = self.scenes[name]
        shared = self._folder / f"shared-{name}"
        if not shared.exists():
            self._prepare(scene, shared)
        folder = Path(tempfile.mkdtemp(prefix="written-", dir=self._folder))
        log, said = self._folder / "calls", self._folder / "said"
        for path in (log, said, shared / "reached"):
            path.unlink(missing_ok=True)
        if (child := os.fork()) == 0:
            self._quiet(said)
            self._end(lambda: self._run(scene, folder, shared, fault, at, log))
        status = _waited(child)
        text = said.read_text(errors="replace")
        called = log.read_text().splitlines() if log.exists() else []
        left = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
        problem = self._ended_badly(scene, status, text, at) or self._left_badly(name, folder, shared, status == 0)
        if not problem and (temporary := [path for path in left if TEMPORARY.search(Path(path).name)]):
            # A disk that stays full or broken may keep what cannot be taken away.
            problem = f"temporary files: {temporary}"
        if not problem and name in ("record", "snapshots", "profile") and status in (0, 2, 4):
            begun = "reached" if (shared / "reached").exists() else ""
            problem = "" if begun or _refused_at_once(text) else f"the program did not go on: {text[-300:]}"
        shutil.rmtree(folder)
        return Try(called, str(status), left, problem)

    def _prepare(self, scene: Any, shared: Path) -> None:
        """Make what the scene needs, and import what it does, so that no child does it again."""
        shared.mkdir()
        trial, names = self._folder / "trial", self._folder / "names"
        trial.mkdir()
        if (child := os.fork()) == 0:
            self._quiet(self._folder / "said")
            scene.prepare(shared)
            scene.run(trial, shared)
            scene.left(trial, shared, True)
            names.write_text("\n".join(sys.modules))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, (self._folder / "said").read_text()
        for name in names.read_text().split("\n"):
            if name not in sys.modules and not name.startswith("__"):
                with contextlib.suppress(BaseException):
                    importlib.import_module(name)
        shutil.rmtree(trial)

    def _quiet(self, said: Path) -> None:
        file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for target in (1, 2):
            os.dup2(file, target)

    def _run(self, scene: Any, folder: Path, shared: Path, fault: Fault, at: int, log: Path) -> Any:
        signal.alarm(int(LIMIT_S) + 20)
        calls = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._shim.fault_arm(
            os.fsencode(folder), fault.calls.encode(), ctypes.c_int(fault.error), ctypes.c_long(at),
            ctypes.c_int(fault.lasting), ctypes.c_long(fault.seconds), ctypes.c_int(calls),
        )  # fmt: skip
        return scene.run(folder, shared)

    def _end(self, work: Any) -> None:
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

    def _ended_badly(self, scene: Any, status: int, text: str, at: int) -> str:
        if status == -1:
            return f"a hang\n{text[-1500:]}"
        if status < 0:
            return f"signal {-status - 1}\n{text[-1500:]}"
        if status not in (0, 1, 2, 3, 4) or "Traceback (most recent" in text:
            return f"exit status {status}\n{text[-1800:]}"
        if status != 0 and (scene.never_fails or at == 0):
            return f"exit status {status}, and this never fails\n{text[-1500:]}"
        return ""

    def _left_badly(self, name: str, folder: Path, shared: Path, well: bool) -> str:
        """Look at what is there in a child: to look may have its own bugs."""
        said = self._folder / "looked"
        said.unlink(missing_ok=True)
        if (child := os.fork()) == 0:
            self._quiet(self._folder / "looked-said")
            try:
                problem = self.scenes[name].left(folder, shared, well)
            except BaseException:
                problem = f"what is left cannot be read\n{traceback.format_exc()[-1500:]}"
            said.write_text(problem)
            os._exit(0)
        status = _waited(child)
        return said.read_text() if status == 0 else f"to look ended with {status}"


def _refused_at_once(text: str) -> bool:
    return "error" in text


def _waited(child: int) -> int:
    """Return the exit status, minus the signal, or -1 for a hang."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        found, how = os.waitpid(child, os.WNOHANG)
        if found:
            return os.WEXITSTATUS(how) if os.WIFEXITED(how) else -os.WTERMSIG(how) - 1
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def walk(walker: Walker, name: str, kind: str, every: int, seen: dict[str, list[str]]) -> tuple[list[str], int]:
    """Try a scene with a fault at every call; return lines of the table and how many problems there are."""
    fault = FAULTS[kind]
    ends: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    left: Counter[str] = Counter()
    at, problems = 1, 0
    while True:
        found = walker.once(name, fault, at)
        failed = [line.split() for line in found.called if line.endswith(" FAILS")]
        if not failed:
            break
        where = f"{failed[0][1]} {re.sub(r'.*/written-[^/]*/?', '', failed[0][2])}"
        where = re.sub(r"\d{3,}|[0-9a-f]{12,}", "#", where)
        calls[failed[0][1]] += 1
        ends[found.ended] += 1
        left[f"{len(found.left)} files"] += 1
        if found.problem:
            problems += 1
            lines = found.problem.strip().splitlines()
            mark = f"{name}: {lines[0][:200]} | {lines[-1][:200]}"
            mark = re.sub(r"written-\w+|\d{3,}", "#", mark)
            seen.setdefault(mark, []).append(f"{kind} at {at}: {where}\n{found.problem}")
        at += every
    if not calls:
        return [], 0
    tries = sum(calls.values())
    row = f"{name:18} {kind:16} {tries:5}  {_counted(calls):60}  exits {_counted(ends):24}  left {_counted(left)}"
    return [row], problems


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _counted(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--kind", action="append")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("scene", nargs="*")
    given = parser.parse_args()
    if "GLASS_FAULTS" in os.environ:
        return _walked(Walker(Path(os.environ["GLASS_FAULTS"])), given)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        shim = compiled(Path(name))
        if shim is None:
            say("skipped: there is no C compiler, or no LD_PRELOAD")
            return 0
        more = {"LD_PRELOAD": str(shim), "GLASS_FAULTS": name, "OMP_NUM_THREADS": "1", "CI": "1"}
        return subprocess.run([sys.executable, __file__, *sys.argv[1:]], env=os.environ | more, check=False).returncode


def _walked(walker: Walker, given: argparse.Namespace) -> int:
    seen: dict[str, list[str]] = {}
    total = 0
    for name in given.scene or walker.scenes:
        plain = walker.once(name, FAULTS["ENOSPC"], 0)
        if plain.problem:
            say(f"{name} without a fault: {plain.problem}")
            return 1
        for kind in given.kind or FAULTS:
            rows, problems = walk(walker, name, kind, given.every, seen)
            total += problems
            for row in rows:
                say(row)
    say(f"{total} problems of {len(seen)} kinds")
    for mark, places in seen.items():
        say(f"\n{len(places)} x {mark}\nfirst: {places[0]}")
    if given.json:
        say(json.dumps({"problems": total, "kinds": list(seen)}))
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
