"""Reports the cause of every compilation, in one line and as data.

A front end says on which occasion it compiles and what it knows of the cause. The cause is set beside the difference
from the nearest earlier graph, the most similar one among those of the same model or function: inputs by name, then the
first operation.

The lines go to the logger "glassengine.compilations", at level INFO: on stderr with `GLASS_EXPLAIN=1` or `--metrics`.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import linecache
import logging
import re
import sys
import sysconfig
import threading
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glassengine import environment
from glassengine.executable.counters import registry
from glassengine.executable.graph import CapturedGraph, InputSpec
from glassengine.results.backends import Cause, Compilation, KeyChange, What

logger = logging.getLogger("glassengine.compilations")

KEPT = 16
"""Graphs of one model, function or operation whose outlines are kept to compare later ones with."""

_NUM_FRAMES = 3
_SKIPPED = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    "<frozen",
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts")),
)

_lock = threading.Lock()
_compilations: list[Compilation] = []
_earlier: defaultdict[str, deque[_Earlier]] = defaultdict(lambda: deque(maxlen=KEPT))
_first_with: dict[str, str] = {}
"""Hash of a graph -> the first executable made of it."""
FIRST = Cause("first call", "it is called for the first time")
_WINDOW = 200  # operations looked ahead, to tell one that was put in or left out from one that was replaced
_NUMBERED = re.compile(r"input\d+")
_VALUE = re.compile(r"%(\d+)")
_FIELDS: tuple[What, ...] = ("dtype", "shape", "stride", "device", "requires_grad")


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


def compilations() -> tuple[Compilation, ...]:
    """Return every compilation of this process in order, with its cause."""
    with _lock:
        return tuple(_compilations)


def note_compilation(
    name: str, graph: CapturedGraph | None, occasion: Occasion, elapsed_ns: int, *, from_cache: bool = False
) -> None:
    """Take down a compilation, count it and say why it was made."""
    frames = tuple(itertools.islice(_user_frames(), _NUM_FRAMES))
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
        _show_lines()
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
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if file.startswith(_SKIPPED):
            continue
        code = linecache.getline(file, line).strip()
        yield f"{file}:{line} in {frame.f_code.co_name}" + (f": {code}" if code else "")


def _show_lines() -> None:
    if not logger.isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())


@dataclass(frozen=True)
class Outline:
    """What is kept of a graph to find differences from later ones: no nodes and no tensors.

    Attributes:
        kind: Of the graph.
        inputs: Its inputs by name.
        ops: A text for each operation, and at last for what is returned; inputs by name, other values by number.
        places: Where each of them comes from.
    """

    kind: str
    inputs: dict[str, InputSpec]
    ops: tuple[str, ...]
    places: tuple[str, ...]

    @staticmethod
    def of(graph: CapturedGraph) -> Outline:
        """Return the outline of a graph."""
        names: dict[str, str] = {}
        for index, spec in enumerate(graph.inputs):
            names[str(index)] = f"<{spec.name}>"
        ops: list[str] = []
        places: list[str] = []
        for index, (line, node) in enumerate(zip(graph.lines, graph.nodes, strict=True)):
            if node.op == "placeholder":
                continue
            names[str(index)] = f"#{len(ops)}"
            text = line.partition(" = ")[2]
            ops.append(_VALUE.sub(lambda found: names.get(found[1], found[0]), text))
            places.append(graph.describe(node))
        return Outline(graph.kind, {spec.name: spec for spec in graph.inputs}, tuple(ops), tuple(places))

    @functools.cached_property
    def _content(self) -> Counter[str]:
        parts = [f"{name} {spec} {spec.requires_grad}" for name, spec in self.inputs.items()]
        return Counter([*parts, *self.ops])

    def likeness(self, other: Outline) -> float:
        """Return the equal share of both, 0 to 1, in any order."""
        common = sum((self._content & other._content).values())
        return 2 * common / ((self._content.total() + other._content.total()) or 1)


def changes(before: Outline, after: Outline) -> tuple[KeyChange, ...]:
    """Return every difference of inputs and the first difference of operations; empty for equal graphs."""
    found = [] if before.kind == after.kind else [KeyChange("kind", "", before.kind, after.kind)]
    found += _input_changes(before, after)
    for number, (old, new) in enumerate(zip(before.ops, after.ops, strict=False)):
        if old != new:
            found.append(_op_change(before, after, number))
            break
    return tuple(found)


def _op_change(before: Outline, after: Outline, number: int) -> KeyChange:
    """Return the change at the first operation that differs."""
    windows = (side.ops[number : number + _WINDOW] for side in (before, after))
    old_ops, new_ops = ([re.split(r"[( ]", text, maxsplit=1)[0] for text in window] for window in windows)
    tag = difflib.SequenceMatcher(None, old_ops, new_ops, autojunk=False).get_opcodes()[0][0]
    old, new = ("" if tag == "insert" else before.ops[number]), ("" if tag == "delete" else after.ops[number])
    place = (before if tag == "delete" else after).places[number]
    what: What = "op"
    if tag == "equal":
        blank = re.compile(r"#\d+|<[^>]*>")
        what = "order" if blank.sub("_", old) == blank.sub("_", new) else "constant"
    return KeyChange(what, f"{number} ({place})" if place else str(number), old, new)


def _input_changes(before: Outline, after: Outline) -> Iterator[KeyChange]:
    def named(name: str, side: Outline) -> str:
        """Return the name of an input; of one that has only a number also where it is first read."""
        place = next((place for op, place in zip(side.ops, side.places, strict=True) if f"<{name}>" in op), "")
        return f"{name} ({place})" if place and _NUMBERED.fullmatch(name) else name

    # What the caller passes before what belongs to the model, which may be a lot.
    for name, new in sorted(after.inputs.items(), key=lambda item: item[1].kind in ("parameter", "buffer")):
        old = before.inputs.get(name)
        if old is None:
            yield KeyChange("input", named(name, after), "", str(new))
            continue
        for field in _FIELDS:
            was, is_now = getattr(old, field), getattr(new, field)
            if was != is_now:
                yield KeyChange(field, named(name, after), _spell(was), _spell(is_now))
    for name, old in before.inputs.items():
        if name not in after.inputs:
            yield KeyChange("input", named(name, before), str(old), "")


def _spell(value: object) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, tuple) else str(value)
