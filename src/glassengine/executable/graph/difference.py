"""What differs between two captured graphs: their inputs by name, then the first operation."""

from __future__ import annotations

import difflib
import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from glassengine.executable.graph.graph import CapturedGraph, InputSpec
from glassengine.results.compilation import Change, What

_WINDOW = 200  # operations looked ahead, to tell one that was put in or left out from one that was replaced

_NUMBERED = re.compile(r"input\d+")
_VALUE = re.compile(r"%(\d+)")
_FIELDS: tuple[What, ...] = ("dtype", "shape", "stride", "device", "requires_grad")


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


def changes(before: Outline, after: Outline) -> tuple[Change, ...]:
    """Return every difference of inputs and the first difference of operations; empty for equal graphs."""
    found = [] if before.kind == after.kind else [Change("kind", "", before.kind, after.kind)]
    found += _input_changes(before, after)
    for number, (old, new) in enumerate(zip(before.ops, after.ops, strict=False)):
        if old != new:
            found.append(_op_change(before, after, number))
            break
    return tuple(found)


def _op_change(before: Outline, after: Outline, number: int) -> Change:
    """Return the change at the first operation that differs."""
    old_ops, new_ops = ([_op(text) for text in side.ops[number : number + _WINDOW]] for side in (before, after))
    tag = difflib.SequenceMatcher(None, old_ops, new_ops, autojunk=False).get_opcodes()[0][0]
    old, new = ("" if tag == "insert" else before.ops[number]), ("" if tag == "delete" else after.ops[number])
    place = (before if tag == "delete" else after).places[number]
    what: What = "op"
    if tag == "equal":
        blank = re.compile(r"#\d+|<[^>]*>")
        what = "order" if blank.sub("_", old) == blank.sub("_", new) else "constant"
    return Change(what, f"{number} ({place})" if place else str(number), old, new)


def _input_changes(before: Outline, after: Outline) -> Iterator[Change]:
    def named(name: str, side: Outline) -> str:
        """Return the name of an input; of one that has only a number also where it is first read."""
        place = next((place for op, place in zip(side.ops, side.places, strict=True) if f"<{name}>" in op), "")
        return f"{name} ({place})" if place and _NUMBERED.fullmatch(name) else name

    # What the caller passes before what belongs to the model, which may be a lot.
    for name, new in sorted(after.inputs.items(), key=lambda item: item[1].kind in ("parameter", "buffer")):
        old = before.inputs.get(name)
        if old is None:
            yield Change("input", named(name, after), "", str(new))
            continue
        for field in _FIELDS:
            was, is_now = getattr(old, field), getattr(new, field)
            if was != is_now:
                yield Change(field, named(name, after), _spell(was), _spell(is_now))
    for name, old in before.inputs.items():
        if name not in after.inputs:
            yield Change("input", named(name, before), str(old), "")


def _spell(value: object) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, tuple) else str(value)


def _op(text: str) -> str:
    return re.split(r"[( ]", text, maxsplit=1)[0]
