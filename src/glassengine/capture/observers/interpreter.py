"""Run a program node by node, observing any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Node

from glassengine import spans
from glassengine.errors import UsageError
from glassengine.program.representation.naming import of_any_layout
from glassengine.program.representation.program import Program

Observer = Callable[[Node, Any], None]


class _Observing(torch.fx.Interpreter):
    def __init__(self, program: Program, observer: Observer | None) -> None:
        super().__init__(program.exported.graph_module)
        self._observer = observer
        self._sites = program.sites.by_node if spans.is_recording() else {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(of_any_layout(target), args, kwargs)

    def run_node(self, n: Node) -> Any:
        if n.name in self._sites:
            with spans.span("op", self._sites[n.name][0].name):
                value = super().run_node(n)
        else:
            value = super().run_node(n)
        if self._observer is not None and n.op == "call_function":
            self._observer(n, value)
        return value


def run_program(
    program: Program, inputs: Mapping[str, torch.Tensor], observer: Observer | None = None
) -> dict[str, torch.Tensor]:
    """Interpret one step; inputs are not changed, updated caches come back as `present_*`.

    Args:
        program: The program, with weights.
        inputs: Tensors by input name.
        observer: Called with (node, value) after each computed node; must not change the value.

    Raises:
        UsageError: An input is missing.
    """
    missing = [port.name for port in program.inputs if port.name not in inputs]
    if missing:
        raise UsageError("inputs are missing", got=", ".join(inputs), expected=", ".join(missing))
    by_node = {port.node: inputs[port.name] for port in program.inputs} | program.weights()
    placeholders = [n.name for n in program.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        results = _Observing(program, observer).run(
            *(by_node.get(name) for name in placeholders), enable_io_processing=False
        )
    by_output = {spec.arg.name: value for spec, value in zip(_specs(program), results, strict=True)}
    return {name: by_output[node] for name, node in program.output_nodes.items()}


def _specs(program: Program) -> Any:
    return program.exported.graph_signature.output_specs
