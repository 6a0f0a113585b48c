"""Base of the back-ends that run the program as an ONNX graph."""

from __future__ import annotations

import importlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from glassengine.backends.onnx.export import MODEL_FILE, export_onnx, refuse_bfloat16
from glassengine.backends.onnx.network import list_network
from glassengine.backends.protocol.backend import Availability, Capabilities, Network, Run, Weights
from glassengine.backends.protocol.io import write_io
from glassengine.errors import BackendError, GlassError
from glassengine.extensions import require_package
from glassengine.program.representation.outputs import functional_form
from glassengine.program.representation.program import OnnxGraph, Program
from glassengine.reading.documents import read_document

_CONVERTER = ("onnx", "onnxscript")
_COMPLEX_FILE = "complex.json"
_MAX_NAMES_BYTES = 16 << 20

_OWN_PLACE = re.compile(r"(Exception from|Check '.*' failed at) \S+:\d+:?$")
_MOST_TEXT = 400


class OnnxBackend(ABC):
    """Converts to ONNX; running needs only the package of the runtime.

    Attributes:
        name: Of the back-end.
        title: What its makers call the runtime.
        package: Python package of the runtime, which is imported when an executable is loaded.
        install: Command that installs all it needs.
        capabilities: What it can do; where bfloat16 is none of the dtypes, programs that compute in it are refused.
    """

    name: str
    title: str
    package: str
    install: str
    capabilities: Capabilities
    takes_onnx = True

    def available(self) -> Availability:
        """Needs the packages of the extra that `install` names."""
        for package in (*_CONVERTER, self.package):
            try:
                importlib.import_module(package)
            except ImportError as error:
                return Availability(False, f"{package} cannot be imported: {error}", self.install)
        return Availability(True)

    def keeps_weights(self, program: Program) -> bool:
        """The weights are in the data file beside the graph."""
        return True

    def build(self, program: Program, directory: Path) -> None:
        """Convert into `model.onnx`, its data file and `io.json`.

        Raises:
            BackendError: The runtime has no kernels for the program's dtype, or ONNX cannot express it.
        """
        if "bfloat16" not in self.capabilities.dtypes:
            refuse_bfloat16(program, self.capabilities)
        export_onnx(program, directory)
        write_io(functional_form(program), directory)
        _write_complex(program, directory)
        if program.onnx is not None:
            self._require_taken(program.onnx, directory)

    def load(self, directory: Path, weights: Weights | None) -> Run:
        """Load what `build` wrote, to run with as many threads as torch uses now.

        Raises:
            BackendError: The runtime is not installed.
        """
        return _with_complex(self._open(self._runtime(), directory), directory)

    def network(self, program: Program, directory: Path) -> Network:
        """Return the ONNX graph; its layers are called like the nodes whose values they yield."""
        network = list_network(directory / MODEL_FILE, program, self.title)
        return replace(network, optimized=self._optimized(directory, program, network))

    def _require_taken(self, source: OnnxGraph, directory: Path) -> None:
        """Refuse an ONNX graph that the runtime does not take, before an engine is made of it."""
        try:
            self._open(self._runtime(), directory)
        except GlassError:
            raise
        except Exception as error:
            raise BackendError(
                f"{self.title} does not take {source.file.path.name}",
                got=f"{type(error).__name__}: {_reason(error)}",
                expected="a valid graph of operators that it knows",
                hint="onnx.checker.check_model says more; or another back-end with --backend",
            ) from error

    def _runtime(self) -> Any:
        """Return the module `package`.

        Raises:
            BackendError: It is not installed.
        """
        return require_package(self.package, f"back-end {self.name!r} cannot be used here", self.install, BackendError)

    @abstractmethod
    def options(self, program: Program) -> dict[str, Any]:
        """Return how the program is converted and run, as JSON values."""

    @abstractmethod
    def _open(self, runtime: Any, directory: Path) -> Run:
        """Return what runs `directory`."""

    @abstractmethod
    def _optimized(self, directory: Path, program: Program, network: Network) -> Network | None:
        """Return the layers that the runtime makes of `network`; None where it does not tell."""


def _reason(error: Exception) -> str:
    """Return what a runtime says, on one line; the places in its own source code, with which it begins, left out."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not _OWN_PLACE.match(line)] or lines or [""]
    text = " ".join(said)
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."


def _write_complex(program: Program, directory: Path) -> None:
    """Write the names of complex results: ONNX has none, and gives real and imaginary parts in a last dimension."""
    values = {name: program.node(node).meta["val"] for name, node in program.output_nodes.items()}
    names = [name for name, value in values.items() if isinstance(value, torch.Tensor) and value.is_complex()]
    if names and program.onnx is None:
        (directory / _COMPLEX_FILE).write_text(json.dumps(names), encoding="utf-8")


def _with_complex(run: Run, directory: Path) -> Run:
    path = directory / _COMPLEX_FILE
    if not os.path.lexists(path):
        return run
    names = frozenset(read_document(path, list[str], most=_MAX_NAMES_BYTES, inside=directory, what=_COMPLEX_FILE))

    def run_with_complex(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        results = run(inputs)
        return {name: torch.view_as_complex(value) if name in names else value for name, value in results.items()}

    return run_with_complex
