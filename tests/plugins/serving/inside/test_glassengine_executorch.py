"""Names of an exported graph's nodes, and the values that belong to them, without ExecuTorch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.plugins.serving.executorch import INSIDE
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


class Cached(nn.Module):
    """A product whose results are kept at their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, 12, 4))
        self.keys: torch.Tensor

    def forward(self, input_ids: torch.Tensor, cache_position: torch.Tensor) -> torch.Tensor:
        made = input_ids.float()[:, None, :, None].expand(1, 2, -1, 4)
        self.keys.index_copy_(2, cache_position, made)
        return self.keys.sum((1, 2))


def edge_of(exported: Any) -> Any:
    return exported.run_decompositions({})


@pytest.mark.parametrize(("tokens", "is_any"), [(1, False), (5, False), (5, True)])
def test_a_cache_is_fed_as_the_program_takes_it(tokens: int, is_any: bool) -> None:
    dim = torch.export.Dim("tokens", min=1, max=11)
    shapes = {"input_ids": {1: dim}, "cache_position": {0: dim}} if is_any else None
    given = (torch.ones((1, tokens), dtype=torch.int64), torch.arange(tokens))
    exported = torch.export.export(Cached(), given, dynamic_shapes=shapes, strict=True)
    takes = ours().Inputs(exported, edge_of(exported))
    prompt = list(range(3, 17))
    assert takes.most == 12 and takes.steps == (tokens == 1 or is_any)
    assert takes.first(prompt) == prompt[: 11 if is_any else tokens]
    ids, where = takes.arguments([7, 8], 3)
    assert ids.tolist() == [[7, 8]] and where.tolist() == [3, 4]


def test_a_program_that_takes_something_else_is_refused() -> None:
    exported = torch.export.export(Model(), (torch.ones(2, 4),), strict=True)
    with pytest.raises(SystemExit, match=r"Refused: .*token ids"):
        ours().Inputs(exported, edge_of(exported))


def test_a_quantized_program_is_refused() -> None:
    exported = torch.export.export(Model(), (torch.ones(2, 4),), strict=True)
    ours().require_floats(exported)
    rounded = SimpleNamespace(
        graph=SimpleNamespace(nodes=[SimpleNamespace(op="call_function", target="torchao.dequantize_affine.default")])
    )
    with pytest.raises(SystemExit, match="quantized"):
        ours().require_floats(rounded)


def test_a_strict_export_writes_slices_of_layers_into_paths() -> None:
    assert ours()._path("model.model.layers.slice(None, 2, None).1.mlp") == "model.layers.1.mlp"
    assert ours()._path("model.transformer.h.0.attn") == "transformer.h.0.attn"
    assert ours()._path("model.lm_head") == "lm_head"


def test_inputs_and_bias_of_addmm_are_told_apart() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addmm(self.bias, x * 2, self.weight)

    graph = torch.export.export(Adds(), (torch.ones(2, 4),), strict=True).graph
    names, inputs = ours().sites_of(graph)
    assert [names[name] for name in inputs] == ["./mul.0"]
