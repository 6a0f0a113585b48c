"""A recording of a serving engine, made before or elsewhere, as a candidate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from glassengine.errors import UsageError
from glassengine.plugins.serving.alignment import require_layout
from glassengine.plugins.serving.request_rows import described
from glassengine.recording.read.source import TensorSource
from glassengine.serving.protocol import (
    EngineSetting,
    Served,
    ServedWeight,
    ServingRun,
    is_kind,
    open_served,
)


@dataclass
class RecordedEngine:
    """A recording of a serving engine, made before or elsewhere, as the engine itself.

    Args:
        source: Of one prompt.
        weights_of: The engine that made it, where its file is here.
    """

    source: TensorSource
    weights_of: Served | None = None

    @property
    def kind(self) -> str:
        """Layout of its tensors."""
        return str(self.source.metadata.get("layout") or "recording")

    @property
    def spec(self) -> str:
        """The recording."""
        return str(self.source.path)

    choices: Sequence[str] = ()

    def weights(self, module: nn.Module, config: Any) -> Mapping[str, ServedWeight]:
        """Return the weights of the file, where it is here."""
        return self.weights_of.weights(module, config) if self.weights_of is not None else {}

    def extra_weights(self) -> Sequence[str]:
        """Return the tensors of the file that stand for no parameter."""
        return self.weights_of.extra_weights() if self.weights_of is not None else ()

    def settings(self, config: Any) -> Sequence[EngineSetting]:
        """Return the settings of the file, where it is here."""
        return self.weights_of.settings(config) if self.weights_of is not None else ()

    def record(self, run: ServingRun, path: Path) -> None:
        """Do nothing: there is a recording."""


def recorded_engine(source: TensorSource, layout: str | None = None) -> RecordedEngine:
    """Return a recording as an engine, with its weights where the file that it names is still here.

    Args:
        source: The recording.
        layout: Of its names, where it does not say it, or says another.

    Raises:
        UnknownNameError: There is no such layout.
        UsageError: It is of a server, and does not say which rows are of which request.
    """
    if layout is not None:
        require_layout(layout)
    source = described(source, layout)
    made_by = source.metadata.get("target")
    try:
        served = open_served(made_by) if isinstance(made_by, str) and is_kind(made_by) else None
    except UsageError:
        served = None
    return RecordedEngine(source, served)
