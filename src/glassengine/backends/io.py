"""The order of inputs and outputs of a built executable, written beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from glassengine.backends.devices import device_of
from glassengine.errors import CorruptError
from glassengine.program.outputs import result_names
from glassengine.program.program import Program

_FILE = "io.json"


@dataclass(frozen=True)
class IOOrder:
    """Names in the order in which the executable takes and returns them; `caches` maps `past_*` to `present_*`.

    `device` is what it was built for.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    caches: dict[str, str]
    device: str = "cpu"


def write_io(program: Program, directory: Path) -> IOOrder:
    """Write and return the order for `program` in the form that the executable has (mutated or functional)."""
    inputs = tuple(port.name for port in program.inputs)
    order = IOOrder(inputs, tuple(result_names(program)), dict(program.caches), device_of(program))
    (directory / _FILE).write_text(json.dumps(vars(order)))
    return order


def read_io(directory: Path) -> IOOrder:
    """Inverse of `write_io`.

    Raises:
        CorruptError: The file is missing or damaged.
    """
    try:
        data = json.loads((directory / _FILE).read_text())
        return IOOrder(
            tuple(data["inputs"]), tuple(data["outputs"]), dict(data["caches"]), str(data.get("device", "cpu"))
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{_FILE} cannot be read", got=f"{type(error).__name__}: {error}") from error
