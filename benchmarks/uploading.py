"""What it costs to record into an object store: an S3 server of this machine, in a process of its own.

*Keeps up*: a loop that computes for a while and records a tensor in each step, into a directory and into the server by
turns; ratios are the medians of the rounds'. The loop includes its end: until the last byte is in the file, or in the
store. *Does not keep up*: uploads take a fixed number of bytes a second, fewer than the loop makes: the loop waits,
or leaves values out; what the process takes of memory and the spool of the disk is that of its bounds.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import glassengine as glass
from benchmarks.report import keep, surroundings
from glassengine.stores import objects

ROUNDS = 5
STEPS = 60
STEPS_BEHIND = 20
SIZE = 500
VALUES = 500_000  # of float32 in a step, in two sites
SPOOL = 64 << 20
SLOW_BYTES_A_SECOND = 48 << 20
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class Loop(torch.nn.Module):
    """Computes for some tens of milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.work = torch.nn.Linear(SIZE, SIZE)
        self.shown = torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = self.work(x)
        self.shown(x.flatten()[: VALUES // 2])
        return x


def run(path: str, steps: int, *, sites: list[str], **options: Any) -> float:
    """Record into a path; return the seconds until everything is there."""
    torch.manual_seed(0)
    net, x = Loop(), torch.randn(SIZE, SIZE)
    begun = time.perf_counter()
    with torch.no_grad(), glass.record(net, path, sites=sites, overwrite=True, **options):
        for _ in range(steps):
            net(x)
    return time.perf_counter() - begun


def main() -> None:
    torch.set_num_threads(1)
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert server.stdout is not None
    address = f"http://127.0.0.1:{int(server.stdout.readline())}"
    work = Path(tempfile.mkdtemp())
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ |= {"GLASS_SPOOL_DIR": str(work / "spool"), "AWS_ENDPOINT_URL": address}
    lines = [surroundings(), ""]
    try:
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        lines += _keeps_up(work)
        put, lock = objects.put, threading.Lock()

        def slow(path: Path, url: str) -> None:
            with lock:
                time.sleep(path.stat().st_size / SLOW_BYTES_A_SECOND)
            put(path, url)

        objects.put = slow
        for when_behind in ("wait", "cut"):
            lines += _is_behind(work, when_behind)
        objects.put = put
    finally:
        server.kill()
        shutil.rmtree(work)
    keep("uploading", "\n".join(lines))


def _keeps_up(work: Path) -> list[str]:
    run("s3://bucket/warm", 2, sites=["shown"])
    here, there = [], []
    for number in range(ROUNDS):
        both: list[Callable[[], None]] = [
            lambda: here.append(run(str(work / "here"), STEPS, sites=["shown"])),
            lambda: there.append(run("s3://bucket/there", STEPS, sites=["shown"])),
        ]
        for call in both if number % 2 else both[::-1]:
            call()
    ratio = statistics.median(b / a for a, b in zip(here, there, strict=True))
    megabytes = STEPS * VALUES / 2 * 4 / 1e6
    return [
        f"keeps up: {STEPS} steps, {megabytes:.0f} MB, {ROUNDS} rounds",
        f"  directory {statistics.median(here):.2f} s, store {statistics.median(there):.2f} s, ratio {ratio:.3f}",
        "",
    ]


def _is_behind(work: Path, when_behind: str) -> list[str]:
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            files = [*(work / "spool").rglob("shard*")]
            sizes = [path.stat().st_blocks * 512 for path in files if path.exists()]
            most[0] = max(most[0], sum(sizes))

    thread = threading.Thread(target=watch)
    thread.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Inputs and results of each module: ten times what the server takes.
    took = run("s3://bucket/slow", STEPS_BEHIND, sites=["*"], spool_bytes=SPOOL, when_behind=when_behind)
    done.set()
    thread.join()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = glass.Recording.open("s3://bucket/slow")
    kept = sum(entry.nbytes for entry in found.entries) / 1e6
    return [
        f"does not keep up ({SLOW_BYTES_A_SECOND >> 20} MiB/s, spool {SPOOL >> 20} MiB), {when_behind}:",
        f"  {took:.1f} s, {kept:.0f} MB of values, {len(found.left_out)} tensors without, complete: {found.complete}",
        f"  most on the disk {most[0] / 1e6:.0f} MB, most memory {after / 1e3:.0f} MB (before: {before / 1e3:.0f} MB)",
        "",
    ]


if __name__ == "__main__":
    main()
