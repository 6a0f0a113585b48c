"""Surroundings of a measurement and where its text is kept."""

from __future__ import annotations

from pathlib import Path

import torch

from glassengine import environment

RESULTS = Path(__file__).parent / "results"
THREADS = 2


def surroundings() -> str:
    """Return one paragraph: processor, versions, threads."""
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions().items() if version)
    threads = torch.get_num_threads()
    return f"{environment.cpu_name()}, {environment.num_cpus()} CPUs seen, {threads} threads used\n{versions}"


def keep(name: str, text: str, *, on_top: bool = False) -> None:
    """Print `text` and write it to results/<name>.txt: in place of what was there, or on top of it."""
    print(text)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.txt"
    before = f"\n\n{path.read_text()}" if on_top and path.is_file() else ""
    path.write_text(f"{text}\n{before}")


def bandwidth(num_bytes: int = 256 << 20, repeats: int = 7) -> float:
    """Return bytes per second of reading one large tensor once, best of `repeats`, with the threads of torch."""
    import time

    data = torch.ones(num_bytes // 4)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.nbytes / min(times)
