"""Lists everything that compiled code depends on, part by part, and explains a miss by the parts that differ."""

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

SCHEMA_VERSION = 2  # of the parts, and of the entries that keep them
_READABLE = 300  # characters of a graph that are kept as they are
_LONG = 60  # characters of a value above which only the words that differ are shown


def key_parts(graph: CapturedGraph, compiler: Parts) -> Parts:
    """Return everything that the compiled code of `graph` depends on.

    Operations and inputs are parts of their own: most misses are another input. `compiler` has those of the back-
    end.
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
    """Return short texts as they are, as for a single operation, and a hash of longer ones."""
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
class KeyDifference:
    """One value that differs: `stored` in the nearest entry, `wanted` now; "" where it is absent."""

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


def differences(stored: Parts, wanted: Parts) -> list[KeyDifference]:
    """Return every value that differs between two sets of parts, in the order of `wanted`."""
    found = []
    for part in dict.fromkeys([*wanted, *stored]):
        before, now = stored.get(part, {}), wanted.get(part, {})
        found += [
            KeyDifference(part, name, before.get(name, ""), now.get(name, ""))
            for name in dict.fromkeys([*now, *before])
            if before.get(name) != now.get(name)
        ]
    return found


def explain_miss(wanted: Parts, stored: Iterable[tuple[str, Parts]]) -> str:
    """Return why no entry has the key of `wanted`: the difference to the nearest entry.

    `stored` are (name, parts) of every entry.
    """
    candidates = [(differences(parts, wanted), name) for name, parts in stored]
    if not candidates:
        return "nothing is stored yet"
    found, name = min(candidates, key=lambda one: (_has_other_calls(one[0]), len(one[0])))
    if not _has_other_calls(found):
        return f"{_listed(found)} (nearest: {name})"
    rest = [difference for difference in found if difference.part not in ("graph", "inputs")]
    also = f"; compiled otherwise, too: {_listed(rest)}" if rest else ""
    return f"no entry has these operations{also}"


def _has_other_calls(found: Iterable[KeyDifference]) -> bool:
    return any(difference.name == "calls" for difference in found)


def _listed(found: Iterable[KeyDifference], limit: int = 4) -> str:
    texts = [str(difference) for difference in found]
    more = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return "; ".join(texts[:limit]) + more
