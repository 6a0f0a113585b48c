"""What reading may not do, done: each is to be found out."""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import torch


def program(hostile: Path) -> int:
    return subprocess.run([sys.executable, "-c", ""], check=False).returncode


def shell(hostile: Path) -> int:
    return os.system("true")  # noqa: S605


def library(hostile: Path) -> int:
    ctypes.CDLL(str(hostile / "evil.so"))
    return 0


def library_of_operators(hostile: Path) -> int:
    """Loaded as C++ loads one: no event tells."""
    torch._C._jit_get_operation("aten::relu")
    ctypes.CDLL(None).dlopen(str(hostile / "evil.so").encode(), 2)
    return 0


def source(hostile: Path) -> int:
    exec("x = 'glass-evil-mark'")
    return 0


def file_of_source(hostile: Path) -> int:
    runpy.run_path(str(hostile / "evil_module.py"))
    return 0


def module(hostile: Path) -> int:
    sys.path.insert(0, str(hostile))
    importlib.import_module("evil_module")
    return 0


def file(hostile: Path) -> int:
    (hostile.parent / "beside").write_text("")
    return 0


def file_of_torch(hostile: Path) -> int:
    """Written by C++: no event tells."""
    torch.ops.aten.from_file.default(str(hostile / "glass-evil-mark"), True, 8)
    return 0


def link(hostile: Path) -> int:
    (hostile.parent / "a link beside").symlink_to("x")
    return 0


def move(hostile: Path) -> int:
    Path("here").write_text("")
    Path("here").rename(hostile.parent / "moved beside")
    return 0


def network(hostile: Path) -> int:
    with socket.socket() as connection:
        connection.connect_ex(("127.0.0.1", 9))
    return 0


def unpickled(hostile: Path) -> int:
    pickle.loads(b"cposix\ngetpid\n.")  # noqa: S301
    return 0


def secret(hostile: Path) -> int:
    (hostile / "secret").read_bytes()
    return 0


def well(hostile: Path) -> int:
    return (hostile / "evil_module.py").stat().st_size * 0
