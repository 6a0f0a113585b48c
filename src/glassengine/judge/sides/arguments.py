"""Which argument of a forward each input of a step becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from glassengine.program.user_code.written_modules import forward_parameters

Step = Mapping[str, Any]

CACHE = "use_cache"
"""What tells a model of transformers to return a cache or none."""


@dataclass(frozen=True)
class Arguments:
    """Which argument of a forward each input of a step becomes.

    Attributes:
        names: Input -> argument.
        fixed: Arguments with a value of their own.
        own: Arguments that are made for this forward alone, as inputs of each step.
    """

    names: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()

    def of(self, step: Step) -> dict[str, Any]:
        """Return the keyword arguments for a step."""
        return {**{theirs: step[ours] for ours, theirs in self.names.items() if ours in step}, **self.fixed}

    @property
    def is_plain(self) -> bool:
        """Whether every argument has the name of its input."""
        return all(ours == theirs for ours, theirs in self.names.items())

    def ours(self, port: str) -> str:
        """Return what the steps call an input of the candidate's program: "x" of "idx", "pair[0]" of "both[0]"."""
        for ours, theirs in self.names.items():
            if is_of(port, theirs):
                return ours + port[len(theirs) :]
        return port


def without_cache(module: nn.Module, step: Step) -> dict[str, Any]:
    """Return a step in which a model of transformers returns no cache: one forward is judged."""
    return {CACHE: False, **step} if CACHE in forward_parameters(module) else dict(step)


def is_of(port: str, name: str) -> bool:
    """Whether a tensor is an argument, or a part of it: "both[0]" of "both"."""
    return port == name or port.startswith((f"{name}[", f"{name}."))
