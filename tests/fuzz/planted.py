"""Readers that do what none may: each is to be found out."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from pathlib import Path


def bug(here: Path, shared: Path) -> int:
    raise KeyError("planted")


def crash(here: Path, shared: Path) -> int:
    return ctypes.string_at(0)[0]


def memory(here: Path, shared: Path) -> int:
    return len(bytearray(1200 << 20)) & 1


def too_much_memory(here: Path, shared: Path) -> int:
    return len(bytearray(64 << 30)) & 1


def slow(here: Path, shared: Path) -> int:
    time.sleep(60)
    return 0


def hang(here: Path, shared: Path) -> int:
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            continue


def program(here: Path, shared: Path) -> int:
    return subprocess.run([sys.executable, "-c", "", str(here)], check=False).returncode


def python(here: Path, shared: Path) -> int:
    exec(compile("x = 1", str(here / "evil.py"), "exec"))
    return 0


def outside(here: Path, shared: Path) -> int:
    (here.parent / "new").touch()
    return 0


def controls(here: Path, shared: Path) -> int:
    sys.stdout.write("\x1b[2J")
    return 0


def left(here: Path, shared: Path) -> int:
    sys.exit(3)


def well(here: Path, shared: Path) -> int:
    return 0
