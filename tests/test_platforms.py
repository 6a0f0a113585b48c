"""Import, help, `compare` and `show` need nothing that macOS or Windows lacks, as a patched platform shows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

# Other packages are imported as they are on this machine; only our own code sees the other platform.
PATCHED = """
import sys, os, signal, socket
import torch, numpy, safetensors.torch, rich.console, typer, jinja2, fsspec, msgspec, zlib_ng
import multiprocessing, subprocess, tempfile, asyncio
import importlib.metadata, importlib.resources, concurrent.futures.process, shutil, ctypes
import logging.handlers, typer.main, sysconfig
sysconfig.get_config_vars()
platform = sys.argv.pop(1)
absent = {
    "darwin": ({"os": ["posix_fallocate", "sched_getaffinity", "memfd_create", "O_TMPFILE"], "signal": []}, []),
    "win32": (
        {
            "os": ["posix_fallocate", "sched_getaffinity", "memfd_create", "O_TMPFILE", "fork", "getuid", "geteuid",
                   "killpg", "getpgid", "setsid", "sysconf", "O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY", "fchmod",
                   "pread", "register_at_fork", "sync", "mkfifo"],
            "signal": ["SIGALRM", "SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "setitimer", "pthread_sigmask"],
        },
        ["fcntl", "resource", "pwd", "grp", "termios", "posix"],
    ),
}[platform]
for module, names in absent[0].items():
    for name in names:
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
for name in absent[1]:
    sys.modules[name] = None
sys.platform = platform
from glassengine.cli.main import main
for line in sys.argv[1:]:
    print("status", main(line.split()), line, flush=True)
"""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    torch.save({"a": torch.arange(8.0), "b": torch.ones(4, 4)}, folder / "one.pt")
    torch.save({"a": torch.arange(8.0), "b": torch.full((4, 4), 1.1)}, folder / "two.pt")
    return folder


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_commands_work_without_what_only_linux_has(platform: str, dumps: Path) -> None:
    lines = {"--help": (0, "Commands"), "compare one.pt two.pt -q": (1, "NOT OK"), "show one.pt": (0, "float32[8]")}
    command = [sys.executable, "-c", PATCHED, platform, *lines]
    done = subprocess.run(command, cwd=dumps, capture_output=True, text=True, check=False, timeout=600)
    for line, (status, shown) in lines.items():
        assert f"status {status} {line}\n" in done.stdout and shown in done.stdout, done.stdout + done.stderr
