"""Back-end "eager": the program itself, interpreted node by node. No compiler, everything observable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glassengine.backends.protocol.backend import (
    Availability,
    Capabilities,
    GraphFunction,
    Network,
    Run,
    Weights,
    program_network,
    taking_list,
)
from glassengine.capture.observers import run_program
from glassengine.program.representation.program import Program
from glassengine.program.representation.stored import load_program, save_program


class EagerBackend:
    """Interprets the stored program."""

    name = "eager"
    takes_onnx = True
    capabilities = Capabilities(
        dtypes=("float32", "bfloat16", "float16", "float64"),
        kv="functional",
        portable=True,
        wide_operands="none",
        native_code=False,
        collectives=True,
    )

    def available(self) -> Availability:
        """Available wherever torch is."""
        return Availability(True)

    def keeps_weights(self, program: Program) -> bool:
        """The engine keeps them, once."""
        return False

    def build(self, program: Program, directory: Path) -> None:
        """Store the program with its outputs."""
        save_program(program, directory)

    def load(self, directory: Path, weights: Weights | None) -> Run:
        """Return a function that interprets the program."""
        assert weights is not None
        program = load_program(directory, weights)

        def run(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return run_program(program, inputs)

        return run

    def compile_graph(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> GraphFunction:
        """Return the graph's own Python code."""
        return taking_list(module)

    def options(self, program: Program) -> dict[str, Any]:
        """Return nothing: there is nothing to choose."""
        return {}

    def network(self, program: Program, directory: Path) -> Network:
        """Return the graph: each node is a layer."""
        return program_network(program, "Interpreted as it is: each layer is a node of the graph.")
