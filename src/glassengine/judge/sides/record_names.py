"""What the names of a record mean to the baseline: inputs, results, tensors of its program, or nothing.

Dumps of other programs call an input by its name and a result by its key or its place. What is called nothing that the
baseline knows is a result of another name only where no other tensor of the record has the shape of that result.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from glassengine.errors import nearest
from glassengine.program.representation.program import Program
from glassengine.recording.layout.layout import Entry
from glassengine.sites import RETURNED

_PORT = r"(?:\.?:)?(?:{})[\s._:/\[\]'\"]*(.*?)['\"\]]*"
_KINDS = "inputs?|in|args?", f"outputs?|out|results?|{RETURNED.rstrip('/')}"
_INPUT, _RESULT = (re.compile(_PORT.format(kind)) for kind in _KINDS)

BESIDE_TOKENS = ("input_ids", "attention_mask", "position_ids", "cache_position", "positions")
"""Inputs of language models, which no one has to compare."""


AMBIGUOUS = "ambiguous"


class NamedResult(NamedTuple):
    """What a record calls a result, and how that was found: "name", "shape" or `AMBIGUOUS`."""

    name: str
    method: str


def named_inputs_of(names: Collection[str], inputs: Sequence[str]) -> dict[str, str]:
    """Return input -> what a record calls it: by name, or by its place ("input_0", "in[0]")."""
    return dict(_ports(names, inputs, _INPUT))


def named_results_of(program: Program, results: Sequence[str], entries: Sequence[Entry]) -> dict[str, NamedResult]:
    """Return result -> what a record calls it, where that is no tensor inside of the program.

    Args:
        program: The baseline's.
        results: Names of its results.
        entries: Of the record.
    """
    shapes = {entry.site: tuple(entry.shape) for entry in reversed(entries)}
    made = {program.output_nodes[result] for result in results}
    # "." of a recording may be what another model returns, around or inside of the baseline.
    own = [n for n in shapes if not n.startswith(".") or ((s := program.sites.get(n)) is not None and s.node in made)]
    ports = dict(_ports(own, results, _RESULT))
    taken = {*known_inputs(program, shapes).values(), *ports.values()}
    found: dict[str, NamedResult] = {}
    for result, name in ports.items():
        site = program.sites.get(name)
        # A module may have the name of a result: which of the two is meant, nothing says beside other tensors.
        is_clear = site is None or site.node == program.output_nodes[result] or taken.issuperset(shapes)
        found[result] = NamedResult(name, "name" if is_clear else AMBIGUOUS)
    known = {site.name for site in program.sites} | {site.node for site in program.sites}
    free = {name: shape for name, shape in shapes.items() if name not in taken}
    for result in results:
        node = program.output_nodes[result]
        if result in found or any(site.name in shapes for site in program.sites.by_node.get(node, ())):
            continue
        wanted = tuple(getattr(program.node(node).meta.get("val"), "shape", ()))
        alike = [name for name, shape in free.items() if wanted and _fits(shape, wanted)]
        if len(alike) == 1 and alike[0] not in known:
            found[result] = NamedResult(alike[0], "shape")
    return found


def known_inputs(program: Program, names: Collection[str]) -> dict[str, str]:
    """Return input of a program, or of any language model -> what a record calls it."""
    ports = [port.name for port in program.inputs if port.name not in program.caches]
    return {name: name for name in BESIDE_TOKENS if name in names} | named_inputs_of(names, ports)


def meaningless(names: Collection[str], known: Collection[str], program: Program) -> dict[str, str]:
    """Return the names of a record that mean nothing -> why they are not judged, with the nearest that would."""
    free = [site.name for site in program.sites if site.kind != "op" and ":in" not in site.name]
    free = [name for name in free if name not in known] or [site.name for site in program.sites]
    found = {}
    for name in names:
        if name not in known:
            close = nearest(name, free, limit=1)
            found[name] = f"{name} names nothing in the baseline{f' (nearest: {close[0]})' if close else ''}"
    return found


def _ports(names: Collection[str], ports: Sequence[str], spelled: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield port -> the name that means it: that of a recording, its own, or with what it is, or its place."""
    rests = {name: found[1] for name in names if (found := spelled.fullmatch(name))}
    if spelled is _RESULT:
        rests |= {name: "" for name in (".", "") if name in names}  # what a module itself returns
    for place, port in enumerate(ports):
        wanted = {port, str(place)} | ({""} if len(ports) == 1 else set())
        known = [name for name, rest in rests.items() if rest in wanted or name == port]
        known += [port] if port in names else []
        if known:
            yield (
                port,
                min(known, key=lambda name: (not name.startswith(RETURNED), not name.startswith("."), name != port)),
            )


def _fits(shape: tuple[int, ...], wanted: Sequence[object]) -> bool:
    """Whether a tensor may be one of the sizes of a program; those that are dynamic may be any."""
    alike = (not isinstance(size, int) or size == own for own, size in zip(shape, wanted, strict=False))
    return len(shape) == len(wanted) and all(alike)
