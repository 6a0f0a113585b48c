"""The interface of a serving engine as a candidate, and the list of engines: `--candidate gguf:FILE`.

A candidate is named by its kind and where it is. Built-in kinds are a table here, of the plugin `serving`. Other
packages register theirs by an entry point of the group `glassengine.serving`: a function from what follows the colon,
and `ServingOptions`, to a `Served`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from glassengine.errors import UsageError
from glassengine.extensions import SERVING, plugin, registered, remedy
from glassengine.program.onnx.file import is_onnx, read_onnx
from glassengine.program.onnx.session import SessionSettings
from glassengine.recording.source import TensorSource
from glassengine.results import Kind


@dataclass(frozen=True)
class ServingOptions:
    """How an engine is run.

    Attributes:
        library: Shared library of the engine; None for the one that is installed.
        threads: Of the engine.
        python: Interpreter that the engine is installed for; None for this one.
        dtype: In which it computes, for engines that take one; "auto" for the finest.
        session: How ONNX Runtime runs a file.
    """

    library: str | Path | None = None
    threads: int = 1
    python: str | Path | None = None
    dtype: str = "auto"
    session: SessionSettings = field(default_factory=SessionSettings)


@dataclass(frozen=True)
class ServingRun:
    """One run of an engine.

    Attributes:
        prompt: Token ids.
        steps: Decode steps after the prefill.
        following: Tokens of these steps; None for those that the engine picks.
        as_deployed: As it runs by default, rather than as exactly as it can.
        numbers: Of the checkpoint, as `alignment.numbers_of`, where there is one: sizes that a file may leave open.
    """

    prompt: Sequence[int]
    steps: int
    following: Sequence[int] | None = None
    as_deployed: bool = False
    numbers: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class ServedWeight:
    """A parameter as the engine has it, by the name and in the layout of the checkpoint.

    Attributes:
        stored: Names of the tensors that it is made of, as the engine calls them.
        value: In float32; None where the engine has no such tensor.
        step: Of each element, where it is quantized.
        types: How it is stored, in the engine's words.
        reason: Why there is no value.
        tied: Whether it is read from another parameter's tensor.
        room: How far a value may be off by the rounding of what was added to it and taken away.
    """

    stored: tuple[str, ...]
    value: Tensor | None
    step: Tensor | None = None
    types: tuple[str, ...] = ()
    reason: str | None = None
    tied: bool = False
    room: float = 0.0


@dataclass(frozen=True)
class EngineSetting:
    """A number that the engine computes with, and the checkpoint's.

    Attributes:
        name: As the engine calls it.
        found: The engine's.
        expected: The checkpoint's.
        kind: Kind of the hint that a difference is.
    """

    name: str
    found: float
    expected: float
    kind: Kind

    @property
    def differs(self) -> bool:
        """Whether they are not the same, up to float32."""
        return abs(self.found - self.expected) > 1e-6 * max(abs(self.found), abs(self.expected))


class Served(Protocol):
    """An engine with a model, as a candidate."""

    kind: str
    spec: str
    choices: Sequence[str]
    """What it does otherwise as deployed, in words."""

    def weights(self, module: nn.Module, config: Any) -> Mapping[str, ServedWeight]:
        """Return what it has for each parameter of `module`, without running anything; empty where it cannot say."""

    def extra_weights(self) -> Sequence[str]:
        """Return its tensors that stand for no parameter of the module asked last."""

    def settings(self, config: Any) -> Sequence[EngineSetting]:
        """Return the numbers that it computes with, as far as the checkpoint has them too."""

    def record(self, run: ServingRun, path: Path) -> None:
        """Run, and write a recording: its own names, with the metadata that `alignment.aligned` reads."""


@runtime_checkable
class ServedOnce(Served, Protocol):
    """An engine that computes in one way only."""

    runs_once: bool


@runtime_checkable
class ServedInDtype(Served, Protocol):
    """An engine that takes the dtype in which it computes from `ServingOptions.dtype`."""

    dtype: str


@runtime_checkable
class ServedInSession(Served, Protocol):
    """An engine that runs an ONNX file in a session of `ServingOptions.session`."""

    session: SessionSettings


@runtime_checkable
class ServedTogether(Served, Protocol):
    """An engine that runs several prompts at once."""

    def record_together(
        self, runs: Sequence[ServingRun], folder: Path, ways: Sequence[str]
    ) -> Mapping[str, TensorSource]:
        """Run all prompts each way, "alone" or "together"; return what was recorded, forward by forward."""


_BUILT_IN = {
    "gguf": ("serving.ggml.candidate", "open_gguf"),
    "genai": ("serving.onnx.candidate", "open_genai"),
    "executorch": ("serving.executorch", "open_executorch"),
    "openvino": ("serving.openvino", "open_openvino"),
    "vllm": ("serving.vllm.candidate", "open_vllm"),
}
"""Kind -> module of the plugin, and the function in it that opens such an engine."""
_OF_OPENVINO = "openvino_model.xml"
_NAMED = re.compile(r"([a-z][a-z0-9_-]*):(.+)", re.DOTALL)


def kinds() -> tuple[str, ...]:
    """Return the kinds of candidates, built-in ones first."""
    return tuple(dict.fromkeys([*_BUILT_IN, *registered(SERVING)]))


def is_served(candidate: object) -> bool:
    """Whether a text names a kind of engine and a place."""
    found = _NAMED.fullmatch(candidate) if isinstance(candidate, str) else None
    return found is not None and found[1] in kinds()


def served_as(candidate: object) -> object:
    """Return kind and place of a candidate that is recognized by what it is.

    An ONNX file that decodes with a cache, the folder of it, or what OpenVINO's converter writes.
    """
    if not isinstance(candidate, (str, Path)):
        return candidate
    if Path(candidate).suffix == ".xml" or (Path(candidate) / _OF_OPENVINO).is_file():
        return f"openvino:{candidate}"
    is_folder = (Path(candidate) / "genai_config.json").is_file()
    if not is_folder and not is_onnx(candidate):
        return candidate
    return f"genai:{candidate}" if is_folder or is_decoder(candidate) else candidate


def is_decoder(place: str | Path) -> bool:
    """Whether an ONNX file takes and returns a cache; its weights are not read."""
    try:
        graph = read_onnx(place, with_data=False).model.graph
    except Exception:  # what is wrong with the file is said by who opens it
        return False
    results = {value.name for value in graph.output}
    inputs = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    return any(result in results for name in inputs for result in results_of_cache(name))


def results_of_cache(name: str) -> list[str]:
    """Return what the result may be called that is an input of a decoder in its next step; none for other inputs."""
    if not name.startswith("past"):
        return []
    return [name.replace(past, now, 1) for past, now in (("past_key_values", "present"), ("past", "present"))]


def open_served(candidate: object, options: ServingOptions = ServingOptions()) -> Served | None:
    """Return the candidate that `gguf:FILE` names; None where the text names no kind.

    Raises:
        UsageError: It cannot be opened, or what opens it cannot be imported.
    """
    found = _NAMED.fullmatch(candidate) if isinstance(candidate, str) else None
    if found is None or found[1] not in kinds():
        return None
    kind, place = found.groups()
    try:
        if kind in _BUILT_IN:
            module, name = _BUILT_IN[kind]
            opens = getattr(plugin(module), name)
        else:
            opens = registered(SERVING)[kind].load()
    except ImportError as error:
        hint = f"pip install 'glassengine[{kind}]'" if kind in _BUILT_IN else remedy(registered(SERVING)[kind])
        raise UsageError(f"candidates of the kind {kind!r} cannot be opened", got=str(error), hint=hint) from error
    served: Served = opens(place, options)
    return served
