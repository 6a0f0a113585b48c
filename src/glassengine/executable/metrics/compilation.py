"""Why was it compiled? One line for every compilation, and the same as data.

A front end says on which occasion it compiles and what it knows of the cause. The cause is set beside the difference
from the nearest earlier graph, the most similar one among those of the same model or function.

The lines go to the logger "glassengine.compilations", at level INFO: on stderr with `GLASS_EXPLAIN=1` or `--metrics`.
"""

from __future__ import annotations

import linecache
import logging
import sys
import sysconfig
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glassengine import environment
from glassengine.executable.graph.difference import Outline, changes
from glassengine.executable.graph.graph import CapturedGraph
from glassengine.executable.metrics.metrics import registry
from glassengine.results.compilation import Cause, Compilation

logger = logging.getLogger("glassengine.compilations")

KEPT = 16
"""Graphs of one model, function or operation whose outlines are kept to compare later ones with."""

_NUM_FRAMES = 3
_SKIPPED = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[2]),
    "<frozen",
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts")),
)


@dataclass(frozen=True)
class Occasion:
    """What a front end knows when it compiles a graph.

    Attributes:
        causes: (number of an earlier compilation, why its code did not fit), latest first; the number is "" where the
            cause refers to none.
        compile_id: Number of this compilation for its front end, for causes to refer to.
    """

    causes: tuple[tuple[str, Cause], ...]
    compile_id: str = ""


@dataclass(frozen=True)
class _Earlier:
    name: str
    compile_id: str
    outline: Outline


_lock = threading.Lock()
_compilations: list[Compilation] = []
_earlier: defaultdict[str, deque[_Earlier]] = defaultdict(lambda: deque(maxlen=KEPT))
_first_with: dict[str, str] = {}
"""Hash of a graph -> the first executable made of it."""

FIRST = Cause("first call", "it is called for the first time")


def compilations() -> tuple[Compilation, ...]:
    """Return every compilation of this process in order, with its cause."""
    with _lock:
        return tuple(_compilations)


def note_compilation(
    name: str, graph: CapturedGraph | None, occasion: Occasion, elapsed_ns: int, *, from_cache: bool = False
) -> None:
    """Take down a compilation, count it and say why it was made."""
    frames = tuple(_user_frames())
    with _lock:
        about: dict[str, Any] = {}
        nearest = None
        if graph is not None:
            outline = Outline.of(graph)
            nearest = _nearest(name, outline, occasion)
            about = {
                "kind": graph.kind,
                "graph_hash": graph.hash,
                "nearest": nearest.name if nearest is not None else _first_with.get(graph.hash, ""),
                "changes": changes(nearest.outline, outline) if nearest is not None else (),
                "num_ops": graph.num_ops,
                "num_inputs": len(graph.inputs),
                "num_outputs": len(graph.output_names),
            }
            _earlier[_family(name)].append(_Earlier(name, occasion.compile_id, outline))
            _first_with.setdefault(graph.hash, name)
        cause = _cause(occasion, nearest)
        noted = Compilation(len(_compilations), name, cause, frames, elapsed_ns * 1e-9, from_cache, **about)
        _compilations.append(noted)
    if not from_cache:
        registry.sample("CompileTime", elapsed_ns, "ns")
        registry.count("UncachedCompile")
    if graph is not None:
        registry.sample("TensorsGraphSize", graph.num_ops, "count")
    if environment.explain():
        _be_heard()
    logger.info("%s", noted)


def _family(name: str) -> str:
    """Return the model, function or operation that an executable belongs to."""
    return name.partition("/")[0]


def _nearest(name: str, outline: Outline, occasion: Occasion) -> _Earlier | None:
    """Return the most similar earlier graph of the same family, the latest of several; None where there is none.

    Where causes say which earlier compilations did not fit, it is one of those. A backward graph is compared with
    backward graphs only.
    """
    is_backward = outline.kind == "backward"
    entries = [entry for entry in _earlier[_family(name)] if (entry.outline.kind == "backward") == is_backward]
    latest = {entry.compile_id: entry for entry in entries}  # numbers restart when the front end is reset
    referred = [latest[number] for number, _ in occasion.causes if number and number in latest]
    return max(referred or reversed(entries), key=lambda entry: entry.outline.likeness(outline), default=None)


def _cause(occasion: Occasion, nearest: _Earlier | None) -> Cause:
    """Return why the nearest graph's code did not fit; else the first cause there is."""
    for compile_id, cause in occasion.causes:
        if nearest is not None and compile_id and compile_id == nearest.compile_id:
            return cause
    return occasion.causes[0][1] if occasion.causes else FIRST


def _user_frames() -> Iterator[str]:
    """Yield the innermost frames outside of torch, this package and other installed packages."""
    frame = sys._getframe()
    found = 0
    while frame.f_back is not None and found < _NUM_FRAMES:
        frame = frame.f_back
        file = frame.f_code.co_filename
        if file.startswith(_SKIPPED):
            continue
        found += 1
        code = linecache.getline(file, frame.f_lineno).strip()
        yield f"{file}:{frame.f_lineno} in {frame.f_code.co_name}" + (f": {code}" if code else "")


def _be_heard() -> None:
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
