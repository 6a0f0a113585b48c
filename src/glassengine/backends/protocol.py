"""What a back-end is: availability, capabilities, build, load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from glassengine.program.program import Program

Run = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Capabilities:
    """What a back-end can do.

    Attributes:
        dtypes: Floating dtypes of models it can build, torch names.
        kv: "mutated" when it writes the cache inputs in place, "functional" when it returns `present_*` outputs.
        portable: Whether the built files run on another CPU.
        wide_operands: Whether products of half-precision models may read float32 registers where the output of the op
            before them is rounded.
    """

    dtypes: tuple[str, ...]
    kv: str
    portable: bool
    wide_operands: bool = False


@dataclass(frozen=True)
class Availability:
    """Whether a back-end can be used here; `reason` and `install` are empty when it can."""

    available: bool
    reason: str = ""
    install: str = ""


class Backend(Protocol):
    """A back-end. Third parties register a class under the entry-point group `glassengine.backends`."""

    name: str
    capabilities: Capabilities

    def available(self) -> Availability:
        """Say whether this back-end can build and run on this machine."""

    def keeps_weights(self, program: Program) -> bool:
        """Whether the built files hold the weights; if not, `load` is given them."""

    def build(self, program: Program, directory: Path) -> None:
        """Compile `program`, its outputs included and caches as input mutations, into the empty `directory`."""

    def load(self, directory: Path, weights: Weights | None) -> Run:
        """Load `directory`. The result maps inputs by name to outputs by name.

        Args:
            directory: What `build` wrote.
            weights: Qualified name -> tensor where `keeps_weights` is false; must stay alive as long as the result.
        """
