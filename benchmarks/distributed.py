"""A comparison of many gigabytes by one, two and four workers, from a store and from the disk; and one of many ranks.

Each comparison runs in a process of its own, which says how long it took and how much memory it, the driver, used at
most. The store is moto's server, or another one (`--serve`), in a process of its own, which takes its share of the
processors; that is beside.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import keep, surroundings
from glassengine.recording.write.writer import RecordingWriter

_TENSOR = (1024, 8192)  # 32 MiB of float32
_PER_RANK = 16
_MOTO = f"{sys.executable} -m moto.server -H 127.0.0.1 -p {{port}}"
_STARTED_S = 4.0
"""What a worker uses of the processor until it has its first chunk."""
_DRIVER = """
import json, resource, sys, time
from pathlib import Path
from glassengine.cli.documents import json_pieces
from glassengine.compare.compare import compare
if __name__ == "__main__":
    options = json.loads(sys.argv[3])
    began = time.monotonic()
    found = compare(sys.argv[1], sys.argv[2], **options)
    passed = time.monotonic() - began
    usage = resource.getrusage(resource.RUSAGE_SELF)
    with open(sys.argv[4], "w") as file:
        file.writelines(json_pieces(found.streamed()))
    status = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in status if line.endswith("kB")}
    told = {"s": passed, "cpu_s": usage.ru_utime + usage.ru_stime, "mb": sizes["VmHWM"], "anon": sizes["RssAnon"]}
    print(json.dumps(told))
"""


def main(arguments: Sequence[str] = ()) -> None:
    """Measure and keep the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks distributed", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of both sides together")
    parser.add_argument("--where", nargs="+", default=["s3", "disk"], choices=["s3", "disk"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--by", nargs="+", default=["cluster"], choices=["cluster", "jobs"])
    parser.add_argument("--kill", action="store_true", help="also kill a worker in the middle")
    parser.add_argument("--ranks", nargs="*", type=int, default=[], help="also simulate so many ranks, of 100 steps")
    parser.add_argument("--folder", type=Path, help="for the recordings; they are removed")
    parser.add_argument("--serve", default=_MOTO, help="command of an S3 server, with {port} and {folder}")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        rows = []
        if given.gigabytes:
            rows += _large(given, folder)
        rows += [_many_ranks(folder, count) for count in given.ranks]
        keep("distributed", "\n".join([surroundings(), f"load average {os.getloadavg()[0]:.1f}", "", *rows]))


def _large(given: argparse.Namespace, folder: Path) -> list[str]:
    write_pair(folder, int(given.gigabytes * 1e9))
    rows = [f"{given.gigabytes:g} GB on both sides; driver: memory at most, and seconds of the processor"]
    rows.append(f"{'':26}{'passed':>9}{'driver':>10}{'private':>10}{'driver':>10}{'server':>10}{'same':>7}")
    expected: str | None = None
    for where in given.where:
        with serving(folder, given.serve) if where == "s3" else _nothing() as (environment, server):
            sides = [f"s3://pair/{side}" if where == "s3" else str(folder / side) for side in "ab"]
            if where == "s3":
                _upload(folder, environment)
            told = [(by, count, False) for by in given.by for count in given.workers]
            if given.kill:
                told.append((given.by[0], max(given.workers[:2]), True))
            for by, count, is_killed in told:
                options = {"jobs": count, "cluster": "auto"} if by == "cluster" else {"jobs": count}
                before = cpu_s(server) if server else 0.0
                found, digest = _driven(sides, options, folder, environment, is_killed=is_killed)
                served = cpu_s(server) - before if server else 0.0
                expected = expected or digest
                label = f"{where}, {by} {count}" + (", one killed" if is_killed else "")
                rows.append(
                    f"{label:26}{found['s']:8.1f}s{found['mb']:7.0f} MB{found['anon']:7.0f} MB"
                    f"{found['cpu_s']:9.1f}s{served:9.1f}s{'yes' if digest == expected else 'NO':>7}"
                )
                print(rows[-1], flush=True)
    return rows


def _driven(
    sides: Sequence[str], options: dict[str, Any], folder: Path, environment: dict[str, str], *, is_killed: bool
) -> tuple[dict[str, float], str]:
    """Return what a driver says, and a checksum of its result without paths."""
    result = folder / "result.json"
    command = [sys.executable, "-c", _DRIVER, *sides, json.dumps(options), str(result)]
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
    over = threading.Event()
    if is_killed:
        threading.Thread(target=_kill_one, args=(process.pid, over), daemon=True).start()
    text, _ = process.communicate()
    over.set()
    if process.returncode:
        raise SystemExit(f"the driver has failed with status {process.returncode}")
    document = json.loads(result.read_text())
    for key in ("baseline", "candidate"):
        document[key] = ""
    return json.loads(text.splitlines()[-1]), hashlib.sha256(json.dumps(document).encode()).hexdigest()


def _kill_one(driver: int, over: threading.Event) -> None:
    """Kill a worker that has worked for some seconds."""
    while not over.wait(0.5):
        for child in _below(driver):
            try:
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                if (b"judge_block" in command or b"--serve" in command) and cpu_s(child) > _STARTED_S:
                    os.kill(child, signal.SIGKILL)
                    print(f"killed {child}", flush=True)
                    return
            except OSError:
                continue


def _below(process: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    found = []
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *_below(child)]
    return found


def write_pair(folder: Path, num_bytes: int) -> None:
    """Write two recordings of so many bytes together: rounding everywhere, and one tensor that is wrong.

    Each rank has half a gigabyte, as the server holds a whole object in memory while it takes it.
    """
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(_TENSOR, generator=generator)
    noise = 1 + 1e-7 * torch.randn(_TENSOR, generator=generator)
    count = max(2, num_bytes // 2 // base.nbytes)
    for side in "ab":
        for rank in range(-(-count // _PER_RANK)):
            with RecordingWriter(folder / side / f"rank{rank}", metadata={}) as writer:
                for number in range(rank * _PER_RANK, min(count, (rank + 1) * _PER_RANK)):
                    x = base.roll(number, 0) * (1 + number / 1000)
                    if side == "b":
                        x *= noise
                        if number == count - 2:
                            x[17, 4] += 3.0
                    writer.write(f"layers.{number % _PER_RANK}", 0, x, rank=rank)
                writer.commit(0)


@contextmanager
def serving(folder: Path, how: str = _MOTO) -> Iterator[tuple[dict[str, str], int]]:
    """Serve S3 in a process of its own; yield the environment of its clients, and the process."""
    port = 5991
    (folder / "store").mkdir()
    command = shlex.split(how.format(port=port, folder=folder / "store"))
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(folder)}
    )
    try:
        yield (
            {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_ACCESS_KEY_ID": os.environ.get("AWS_ACCESS_KEY_ID", "key"),
                "AWS_SECRET_ACCESS_KEY": os.environ.get("AWS_SECRET_ACCESS_KEY", "secret"),
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
            },
            process.pid,
        )
    finally:
        process.kill()
        process.wait()


@contextmanager
def _nothing() -> Iterator[tuple[dict[str, str], int]]:
    yield {}, 0


def _upload(folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    import s3fs

    for attempt in range(60):
        try:
            store = s3fs.S3FileSystem()
            store.mkdir("pair")
            break
        except Exception:
            if attempt == 59:
                raise
            time.sleep(1)
    for side in "ab":
        for path in sorted((folder / side).rglob("*")):
            if path.is_file():
                store.put_file(str(path), f"pair/{path.relative_to(folder)}", chunksize=1 << 30)


def cpu_s(pid: int) -> float:
    """Return the seconds of the processor that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _many_ranks(folder: Path, ranks: int, steps: int = 100, tensors: int = 4) -> str:
    """Return what a comparison of two runs of so many ranks takes; each tensor has eight floats."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(8, generator=generator) for _ in range(tensors)]
    for side, factor in (("x", 1.0), ("y", 1 + 1e-7)):
        for rank in range(ranks):
            with RecordingWriter(folder / f"{side}{ranks}" / f"rank{rank}", metadata={}) as writer:
                for step in range(steps):
                    for number, value in enumerate(values):
                        writer.write(f"layers.{number}", step, value * (1 + rank + step / 100) * factor, rank=rank)
                    writer.commit(step)
    sides = [str(folder / f"{side}{ranks}") for side in "xy"]
    found, _ = _driven(sides, {"jobs": 2}, folder, {}, is_killed=False)
    pairs = ranks * steps * tensors
    each = found["cpu_s"] / pairs * 1e6
    return (
        f"{ranks} ranks x {steps} steps x {tensors} tensors of 32 bytes: {pairs:,} pairs, passed {found['s']:.1f} s,"
        f" driver {found['cpu_s']:.1f} s of the processor ({each:.0f} us a pair), {found['mb']:.0f} MB at most"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
