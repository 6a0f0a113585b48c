"""Executables of plain functions, captured without torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch.fx.experimental.proxy_tensor import make_fx

from glassengine.executable.graph import CapturedGraph, input_spec, mutated_placeholders
from glassengine.executable.run.executable import Executable

MakeExecutable = Callable[..., Executable]


@pytest.fixture
def make_executable() -> MakeExecutable:
    """Return what makes an executable of a function of tensors that returns a tuple; it runs the captured graph.

    The keywords give the inputs by name, as examples; `kinds` what they are, if not "input"; `function` what runs in
    place of the graph, taking a list.
    """

    def make(
        traced: Callable[..., tuple[Any, ...]],
        kinds: Mapping[str, Any] | None = None,
        function: Callable[[list[Any]], Any] | None = None,
        kind: Any = "inference",
        **examples: Any,
    ) -> Executable:
        module = make_fx(traced, tracing_mode="fake", _allow_non_fake_inputs=True)(*examples.values())
        written = {node.name for node in mutated_placeholders(module.graph)}
        placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
        specs = tuple(
            input_spec(value, name, (kinds or {}).get(name, "input"), is_mutated=node.name in written)
            for (name, value), node in zip(examples.items(), placeholders, strict=True)
        )
        results = module.graph.output_node().args[0]
        graph = CapturedGraph(module, specs, tuple(f"output[{index}]" for index in range(len(results))), kind)
        run = function or (lambda arguments: module(*arguments))
        return Executable("tiny/main", run, tuple(examples), graph.output_names, graph)

    return make
