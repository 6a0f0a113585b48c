"""Names of an exported graph's nodes, and the values that belong to them, without ExecuTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from glassengine.serving.executorch.candidate import INSIDE
from tests.modules import module_at


def ours() -> Any:
    return module_at(INSIDE / "glassengine_executorch.py")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.q_proj(x * 2) * 3 + (x * 2).view(-1, 4)
        return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.ModuleList([Layer()])})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model["layers"][0](x)
        return found


def test_values_are_named_as_the_exported_graph_is() -> None:
    graph = torch.export.export(Model(), (torch.ones(2, 4),), strict=False).graph
    names, inputs = ours().sites_of(graph)
    at = "model.layers.0"
    assert list(names.values()) == [f"{at}/mul.0", f"{at}.q_proj/linear.0", f"{at}/mul.1", f"{at}/mul.2", f"{at}/add.0"]
    (read,) = [name for name, modules in inputs.items() if modules == [f"{at}.q_proj/in.0"]]
    assert names[read] == f"{at}/mul.0"
    # Three operations were made of the product; the last one's value is its own. A delegate's are of nobody.
    product = next(name for name, site in names.items() if site.endswith("linear.0"))
    last = next(name for name, site in names.items() if site.endswith("add.0"))

    def event(handles: Any, value: float) -> Any:
        return SimpleNamespace(debug_data=[torch.full((2, 4), value)], debug_handles=handles)

    def edge(origin: str, handle: int) -> Any:
        return SimpleNamespace(meta={"debug_handle": handle, "from_node": [SimpleNamespace(name=origin)]})

    record = SimpleNamespace(
        exported_program=SimpleNamespace(graph=graph),
        edge_dialect_program=SimpleNamespace(graph=SimpleNamespace(nodes=[edge(product, 1), edge(last, 3)])),
    )
    blocks = [SimpleNamespace(events=[event(1, 5.0), event(1, 6.0), event(3, 7.0), event((1, 3), 9.0)])]
    found = ours().values_of(blocks, record)
    assert {name: float(value[0, 0]) for name, value in found.items()} == {f"{at}.q_proj/linear.0": 6, f"{at}/add.0": 7}
