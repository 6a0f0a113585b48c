"""The graph that vLLM compiles, node by node: names as hooks have them, and operations inside of norms."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.plugins.serving.vllm.inside import glassengine_vllm_graph as graph

aten = torch.ops.aten


@pytest.fixture
def seen() -> Iterator[dict[str, torch.Tensor]]:
    found: dict[str, torch.Tensor] = {}
    graph.watchers[:] = [found.__setitem__]
    yield found
    graph.watchers.clear()


def traced() -> torch.fx.GraphModule:
    """Return a residual norm, attention on what a projection gives, and the rotation, as vLLM's graph has them."""
    made = torch.fx.Graph()

    def call(path: str, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = made.call_function(target, args, kwargs)
        node.meta["nn_module_stack"] = {"": ("L['self']", nn.Module), path: (f"L['self'].{path}", nn.Module)}
        return node

    x, residual = made.placeholder("x"), made.placeholder("residual")
    norm, split = "layers['1'].input_layernorm", "layers.1.self_attn.qkv_proj"
    total = call(norm, aten.add.Tensor, x, residual)
    square = call(norm, aten.pow.Tensor_Scalar, total, 2)
    mean = call(norm, aten.mean.dim, square, [-1], True)
    scale = call(norm, aten.rsqrt.default, call(norm, aten.add.Tensor, mean, 1e-6))
    normed = call(norm, aten.mul.Tensor, total, scale)
    parts = call(split, aten.split.Tensor, normed, 2, -1)
    query, key = (call(split, operator.getitem, parts, place) for place in (0, 1))
    mixed = call("layers.1.self_attn.attn", attention, query=query, key=key)
    made.output((mixed, total))
    return torch.fx.GraphModule(nn.Module(), made)


def attention(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return query * key


def test_nodes_have_the_names_of_hooks_and_of_operations(seen: dict[str, torch.Tensor]) -> None:
    x, residual = torch.arange(8.0).reshape(2, 4), torch.ones(2, 4)
    graph._observed(traced(), None)(x, residual)
    norm = "model.layers.1.input_layernorm"
    assert [name for name in seen if "qkv" not in name and not name.endswith("self_attn/out.0")] == [
        f"{norm}/in.0",
        f"{norm}/out.1",
        *(f"{norm}/ops.{name}.0" for name in ("pow", "mean", "add", "rsqrt")),
        f"{norm}/out.0",
        f"{norm}/ops.mul.0",
        *(f"model.layers.1.self_attn.attn/{port}" for port in ("in.0", "in.1", "out.0")),
    ]
    assert torch.equal(seen[f"{norm}/out.1"], x + residual) and torch.equal(seen[f"{norm}/in.0"], x)
    assert torch.equal(seen[f"{norm}/ops.pow.0"], (x + residual) ** 2)
    attn = "model.layers.1.self_attn.attn"
    assert torch.equal(seen[f"{attn}/out.0"], seen[f"{attn}/in.0"] * seen[f"{attn}/in.1"])


@pytest.mark.slow
def test_a_compiled_module_is_run_node_by_node(seen: dict[str, torch.Tensor]) -> None:
    class Norm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = Norm(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.mlp(self.norm(x))  # type: ignore[no-any-return]

    model, x = Model(), torch.rand(3, 4)
    torch._dynamo.mark_dynamic(x, 0)  # as vLLM marks its tokens
    with torch.no_grad():
        made = torch.compile(model, backend=graph.functional)(x)
        assert torch.equal(made, seen["model.mlp/out.0"])
        assert torch.equal(seen["model.norm/out.0"], model.norm(x)) and "model.norm/ops.rsqrt.0" in seen
