"""The order of inputs and outputs of a built executable, written beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glassengine.backends.protocol.devices import device_of
from glassengine.program.representation.outputs import result_names
from glassengine.program.representation.program import Program
from glassengine.reading.documents import damaged, read_document

_FILE = "io.json"
_MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class IOOrder:
    """Names in the order in which the executable takes and returns them; `caches` maps `past_*` to `present_*`.

    `device` is what it was built for; `one_token` are the sizes that inputs have in a step of one token, where an
    executable of its own computes it: input -> dimension -> size.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    caches: dict[str, str]
    device: str = "cpu"
    one_token: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


def write_io(program: Program, directory: Path, *, one_token: Mapping[str, Mapping[int, int]] | None = None) -> IOOrder:
    """Write and return the order for `program` in the form that the executable has (mutated or functional)."""
    inputs = tuple(port.name for port in program.inputs)
    order = IOOrder(inputs, tuple(result_names(program)), dict(program.caches), device_of(program), one_token or {})
    (directory / _FILE).write_text(json.dumps(vars(order)))
    return order


def read_io(directory: Path) -> IOOrder:
    """Inverse of `write_io`.

    Raises:
        CorruptError: The file is missing or damaged.
    """
    order = read_document(directory / _FILE, IOOrder, most=_MAX_BYTES, inside=directory, what=_FILE)
    unknown = [name for name in (*order.caches, *order.one_token) if name not in order.inputs]
    if unknown:
        raise damaged(_FILE, directory / _FILE, f"{unknown[0]!r} is not an input")
    return order
