"""Where the value of a node comes from that no executable has to return: weights, inputs, caches, other outputs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class From(Enum):
    """What a value is derived from; the value says it in a manifest and to people."""

    WEIGHTS = "depends on weights alone"
    CACHE = "the cache {} after the step"
    INPUT = "the input {}"
    OUTPUT = "the output {}"
    VIEW = "a view of {}"


@dataclass(frozen=True)
class Derived:
    """Where a value is taken from on reading, and what that is called."""

    source: From
    name: str = ""

    def __str__(self) -> str:
        return self.source.value.format(self.name)


def comes_from_weights(text: str | None) -> bool:
    """Whether what a manifest says of an output is that it depends on weights alone."""
    return text == str(Derived(From.WEIGHTS))
