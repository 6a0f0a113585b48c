"""What compiled code depends on, part by part, so that a key can be explained as well as compared.

A key alone answers "the same or not"; users ask why it is not the same. So the parts are stored beside what they lead
to, and the answer is the difference to the stored entry that is nearest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from glassengine import environment
from glassengine.executable.graph.graph import CapturedGraph

Parts = Mapping[str, Mapping[str, str]]
"""Part ("inputs", "versions", ...) -> name within it -> value, all as text."""

SCHEMA_VERSION = 1  # of the parts, and of the entries that keep them
_READABLE = 300  # characters of a graph that are kept as they are
_LONG = 60  # characters of a value above which only the words that differ are shown


def key_parts(graph: CapturedGraph, compiler: Parts) -> Parts:
    """Return everything that the compiled code of `graph` depends on.

    Args:
        graph: What is compiled. Its operations and inputs are parts of their own: most misses are another input.
        compiler: What the back-end adds: its name, options and settings.
    """
    operations = [line.partition(" = ")[2] for line in graph.lines if " = input " not in line]
    return {
        "graph": {
            "calls": _short(line.partition("(")[0] for line in operations),
            "arguments": _short(line[len(line.partition("(")[0]) :] for line in operations),
        },
        "inputs": {str(index): str(spec).removesuffix(" requires_grad") for index, spec in enumerate(graph.inputs)},
        **compiler,
        **surroundings(),
        "settings": {
            "threads": str(torch.get_num_threads()),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        },
    }


def _short(texts: Iterable[str]) -> str:
    """Return what is read where it is short, as for a single operation, and a hash of it otherwise."""
    text = " ".join(texts)
    return text if len(text) <= _READABLE else hashlib.sha256(text.encode()).hexdigest()[:32]


def surroundings() -> Parts:
    """Return the parts that are the same for every graph of every process on this machine: versions, devices."""
    versions = environment.versions()
    return {
        # Another build of the same version of torch has another label or commit.
        "versions": {
            "cache": str(SCHEMA_VERSION),
            "torch": f"{torch.__version__} {torch.version.git_version or ''}".strip(),
            "glassengine": str(versions["glassengine"]),
            "python": str(versions["python"]),
        },
        "processor": {
            "capability": torch.backends.cpu.get_cpu_capability(),
            "flags": " ".join(sorted(environment.cpu_flags())),
        },
        "accelerator": {
            "name": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
            "cuda": torch.version.cuda or "",
        },
    }


def digest(parts: Parts) -> str:
    """Return the key of `parts`: 40 hexadecimal digits."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:40]


@dataclass(frozen=True)
class Difference:
    """One value that differs: `stored` in the nearest entry, `wanted` now; "" where there is none."""

    part: str
    name: str
    stored: str
    wanted: str

    def __str__(self) -> str:
        stored, wanted = self.stored or "none", self.wanted or "none"
        if max(len(stored), len(wanted)) > _LONG:
            before, now = self.stored.split(), self.wanted.split()
            words = [f"-{word}" for word in before if word not in now] + [
                f"+{word}" for word in now if word not in before
            ]
            return f"{self.part}.{self.name}: {' '.join(words)}"
        return f"{self.part}.{self.name}: {stored} -> {wanted}"


def differences(stored: Parts, wanted: Parts) -> list[Difference]:
    """Return every value that differs between two sets of parts, in the order of `wanted`."""
    found = []
    for part in dict.fromkeys([*wanted, *stored]):
        before, now = stored.get(part, {}), wanted.get(part, {})
        found += [
            Difference(part, name, before.get(name, ""), now.get(name, ""))
            for name in dict.fromkeys([*now, *before])
            if before.get(name) != now.get(name)
        ]
    return found


@dataclass(frozen=True)
class Miss:
    """Why nothing stored fits.

    Attributes:
        nearest: Name and key of the stored entry that differs least; "" where nothing is stored.
        differences: To it. Where the calls of the graph are among them, no entry has these operations.
    """

    nearest: str
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        if not self.nearest:
            return "nothing is stored yet"
        if any(difference.name == "calls" for difference in self.differences):
            rest = [difference for difference in self.differences if difference.part not in ("graph", "inputs")]
            also = f"; compiled otherwise, too: {_listed(rest)}" if rest else ""
            return f"no entry has these operations{also}"
        return f"{_listed(self.differences)} (nearest: {self.nearest})"


def explain_miss(wanted: Parts, stored: Iterable[tuple[str, Parts]]) -> Miss:
    """Return why no entry has the key of `wanted`.

    Args:
        wanted: What was looked for.
        stored: (name, parts) of every entry.
    """
    best: tuple[tuple[bool, int], str, list[Difference]] | None = None
    for name, parts in stored:
        found = differences(parts, wanted)
        rank = (any(difference.name == "calls" for difference in found), len(found))
        if best is None or rank < best[0]:
            best = (rank, name, found)
    return Miss("", ()) if best is None else Miss(best[1], tuple(best[2]))


def _listed(found: Iterable[Difference], limit: int = 4) -> str:
    texts = [str(difference) for difference in found]
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return "; ".join(texts[:limit]) + more
