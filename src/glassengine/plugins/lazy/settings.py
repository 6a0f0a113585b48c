"""Settings of compiling and running graphs, and the graphs that ran."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch._ops import OpOverload

from glassengine import environment
from glassengine.backends.protocol.backend import CompilingGraphs
from glassengine.backends.registry import choose_graph_backend
from glassengine.executable.run.executable import Executable
from glassengine.plugins.lazy.symbols import Pattern, SizeSample


@dataclass(frozen=True)
class Reason:
    """Why a graph runs.

    Attributes:
        kind: "step" at its end, "read" of a tensor, "fallback" for an operation that is not recorded, "debug" where
            each runs by itself.
        text: What asked for it.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class LazyExecutable:
    """One executable of a graph.

    Attributes:
        executable: Takes the leaves, and the numbers that are inputs.
        hoisted: Which numbers these are.
        constants: All others, by number, as bytes: 0.0 and -0.0 differ.
        sizes: What it was compiled for, of a graph with sizes that are marked as changing; None of any other.
    """

    executable: Executable
    hoisted: tuple[int, ...]
    constants: tuple[tuple[int, bytes], ...]
    sizes: Pattern | None = None

    def fits(self, numbers: Sequence[float], sample: SizeSample | None) -> bool:
        """Return whether its constants are those among `numbers`, and its sizes those of a recording."""
        if any(bytes_of(numbers[index]) != value for index, value in self.constants):
            return False
        return sample is None or self.sizes is None or self.sizes.fits(sample)


@dataclass
class LazyGraph:
    """What is known of one graph.

    Attributes:
        variants: Its executables.
        samples: The sizes that it was compiled for, where some are marked as changing.
    """

    variants: list[LazyExecutable] = field(default_factory=list)
    samples: list[SizeSample] = field(default_factory=list)


@dataclass
class LazySettings:
    """How graphs are compiled and run.

    Attributes:
        backend: Compiles them.
        each_op: Whether each operation runs by itself as soon as it is called.
        graphs: (Back-end, key of what is pending) -> what is known of it.
        constant: Back-end -> operation -> whether its numbers are constants there, once a graph did not compile.
        unread: In what no value may be read; "" where reading is allowed.
    """

    backend: CompilingGraphs | None = None
    each_op: bool = field(default_factory=environment.eager_debug)
    graphs: dict[tuple[str, tuple[Any, ...]], LazyGraph] = field(default_factory=dict)
    constant: dict[str, dict[OpOverload, bool]] = field(default_factory=dict)
    unread: str = ""

    def compiler(self) -> CompilingGraphs:
        """Return the back-end, the default one unless another is set."""
        if self.backend is None:
            self.backend = choose_graph_backend(None)
        return self.backend


settings = LazySettings()


@contextlib.contextmanager
def forbid_reading(name: str) -> Iterator[None]:
    """Raise an error where a pending value is needed while the block runs, which would cut its graph in two.

    Args:
        name: Of the block, for the error.
    """
    before, settings.unread = settings.unread, name
    try:
        yield
    finally:
        settings.unread = before


def num_compiled() -> int:
    """Return how many graphs have been compiled so far."""
    return sum(len(graph.variants) for graph in settings.graphs.values())


def bytes_of(number: float) -> bytes:
    """Return a number as bytes, in which 0.0 and -0.0 differ."""
    return struct.pack("d", number) if type(number) is float else repr(number).encode()
