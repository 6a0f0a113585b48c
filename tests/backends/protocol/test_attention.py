"""Attention as back-ends compile it: equal values, and a copy of keys and values only where it is needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention

from glassengine import environment
from glassengine.backends.inductor.backend import InductorBackend
from glassengine.backends.protocol.attention import MARK, with_grouped_queries, with_plain_attention
from glassengine.judge.flat_graphs import with_values
from glassengine.program.export.export import export_causal_lm, export_module
from glassengine.program.representation.program import Program

BACKEND = InductorBackend()

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def exported(config: transformers.PretrainedConfig) -> Program:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    return export_causal_lm(model)


def inputs(program: Program, *, batch: int, sequence: int, start: int, length: int, pad: int) -> dict[str, Tensor]:
    """Return a step whose first row has `pad` tokens of padding, on caches with something in them."""
    torch.manual_seed(1)
    sizes = {"batch": batch, "sequence": sequence, "cache": length}
    found: dict[str, Tensor] = {}
    for port in program.inputs:
        shape = [size if isinstance(size, int) else sizes[size] for size in port.shape]
        found[port.name] = torch.randn(shape) if port.dtype == "float32" else torch.randint(64, shape)
    mask = torch.zeros(batch, length, dtype=torch.long)
    mask[:, : start + sequence] = 1
    mask[0, :pad] = 0
    where = torch.arange(start, start + sequence)
    position = (where[None] - torch.tensor([pad] + [0] * (batch - 1))[:, None]).clamp(min=0)
    return found | {"attention_mask": mask, "cache_position": where, "position_ids": position}


def run(program: Program, exported: Any, given: dict[str, Tensor]) -> list[Tensor]:
    arguments = [given[port.name].clone() for port in program.inputs]
    args, kwargs = torch.utils._pytree.tree_unflatten(arguments, exported.call_spec.in_spec)
    with torch.no_grad():
        results = exported.module(check_guards=False)(*args, **kwargs)
    return [*torch.utils._pytree.tree_leaves(results), *arguments]


FAMILIES = {
    "shared by 2": transformers.LlamaConfig(**LLAMA, num_attention_heads=4, num_key_value_heads=2),
    "shared by all": transformers.LlamaConfig(**LLAMA, num_attention_heads=4, num_key_value_heads=1),
    "qwen3": transformers.Qwen3Config(**LLAMA, num_attention_heads=6, num_key_value_heads=2, head_dim=8),
    "sliding": transformers.Gemma3TextConfig(
        **LLAMA | {"num_hidden_layers": 2}, num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=4
    ),
}


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("shared by all", "qwen3") else name for name in FAMILIES],
)
def test_values_names_and_results_stay(family: str) -> None:
    program = exported(FAMILIES[family])
    before = [node.name for node in program.graph.nodes]
    grouped = with_grouped_queries(program.exported)
    assert [node.name for node in program.graph.nodes] == before
    assert [node.name for node in grouped.graph.nodes if MARK not in node.name] == before
    found = grouped.graph.find_nodes(op="call_function", target=ATTENTION)
    config = FAMILIES[family]
    assert len(found) == config.num_hidden_layers
    assert all(node.args[1].meta["val"].shape[1] == config.num_key_value_heads for node in found)
    # One mask for all layers that have the same one.
    masks = {node.args[3] for node in found}
    assert len(masks) == len({node.args[3] for node in program.graph.find_nodes(op="call_function", target=ATTENTION)})
    for step in (
        {"batch": 2, "sequence": 5, "start": 0, "length": 12, "pad": 2},
        {"batch": 3, "sequence": 1, "start": 7, "length": 12, "pad": 3},
        {"batch": 1, "sequence": 3, "start": 4, "length": 9, "pad": 0},
    ):
        given = inputs(program, **step)
        for left, right in zip(run(program, program.exported, given), run(program, grouped, given), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


class Attention(torch.nn.Module):
    def __init__(self, compute: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return self.compute(q, k, v, mask)


def each(x: Tensor, times: int = 3) -> Tensor:
    return x[:, :, None].expand(-1, -1, times, -1, -1).reshape(2, 2 * times, -1, 8)


def in_turns(x: Tensor) -> Tensor:
    return x[:, None].expand(-1, 3, -1, -1, -1).reshape(2, 3 * x.shape[1], -1, 8)


KINDS: dict[str, tuple[bool, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]]] = {
    "as heads share": (True, lambda q, k, v, m: attention(q, each(k), each(v), m)),
    "no mask": (True, lambda q, k, v, m: attention(q, each(k), each(v), scale=0.3)),
    "bool": (True, lambda q, k, v, m: attention(q, each(k), each(v), m > -1)),
    "two dimensions": (True, lambda q, k, v, m: attention(q, each(k), each(v), m[0, 0])),
    "one row": (True, lambda q, k, v, m: attention(q, each(k), each(v), m[:, :, :1])),
    "in turns": (False, lambda q, k, v, m: attention(q, in_turns(k), in_turns(v), m)),
    "keys in turns": (False, lambda q, k, v, m: attention(q, in_turns(k), each(v), m)),
    "not all keys": (True, lambda q, k, v, m: attention(q, each(k[:, :, 1:]), each(v[:, :, 1:]), m[..., 1:])),
    "one of the keys": (True, lambda q, k, v, m: attention(q, each(k[:, :1].expand(-1, 2, -1, -1)), each(v), m)),
    "all of one": (False, lambda q, k, v, m: attention(q, in_turns(k[:, :1]).repeat(1, 2, 1, 1), each(v), m)),
    "rows first": (True, lambda q, k, v, m: attention(q.transpose(1, 2).clone().transpose(1, 2), each(k), each(v), m)),
    "a mask for each head": (False, lambda q, k, v, m: attention(q, each(k), each(v), m * q[:, :, :, :1])),
    "causal": (False, lambda q, k, v, m: attention(q, each(k), each(v), is_causal=True)),
    "not shared": (False, lambda q, k, v, m: attention(q, q * 2, q + 1, m @ m.mT)),
    "shared by too many": (False, lambda q, k, v, m: attention(q.repeat(1, 3, 1, 1), each(k, 9), each(v, 9), m)),
    "keys changed": (False, lambda q, k, v, m: attention(q, each(k) * 2, each(v), m)),
}


def given(rows: int, length: int) -> dict[str, Tensor]:
    shapes = {"q": (2, 6, rows, 8), "k": (2, 2, length, 8), "v": (2, 2, length, 8), "mask": (2, 1, rows, length)}
    torch.manual_seed(rows)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_queries_are_used_where_results_are_equal(kind: str) -> None:
    is_shared, compute = KINDS[kind]
    program = export_module(Attention(compute).eval(), [given(4, 7), given(5, 9)])
    grouped = with_grouped_queries(program.exported)
    assert (grouped is not program.exported) == is_shared
    for rows, length in ((4, 7), (1, 6), (6, 6)):
        x = given(rows, length)
        left, right = (run(program, item, x) for item in (program.exported, grouped))
        torch.testing.assert_close(left, right)


@pytest.mark.skipif(environment.cxx_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("of", ["attention alone", "qwen3"])
def test_an_engine_computes_and_lists_it(of: str, tmp_path: Path) -> None:
    if of == "qwen3":
        program = exported(FAMILIES["qwen3"])
        steps = [
            inputs(program, batch=2, sequence=5, start=0, length=12, pad=2),
            inputs(program, batch=1, sequence=1, start=7, length=16, pad=3),
        ]
    else:
        program = export_module(Attention(KINDS["as heads share"][1]).eval(), [given(4, 7), given(5, 9)])
        steps = [given(4, 7), given(1, 6)]
    backend = InductorBackend()
    backend.build(program, tmp_path)
    run_engine = backend.load(tmp_path, None)
    for step in steps:
        expected = run(program, program.exported, step)
        results = run_engine({name: tensor.clone() for name, tensor in step.items()})
        torch.testing.assert_close(next(iter(results.values())), expected[0], rtol=1e-4, atol=1e-5)
    told = {node for layer in backend.network(program, tmp_path).layers for node in layer.nodes}
    assert "scaled_dot_product_attention" in told
    assert "_unsafe_view" not in told, "keys and values are not repeated"


class BoolMask(torch.nn.Module):
    """Attention whose heads share keys and values, with a mask of bools."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        each = [side[:, :, None].expand(-1, -1, 2, -1, -1).reshape(1, 4, 3, 8) for side in (key, value)]
        return attention(query, *each, attn_mask=mask)


def test_a_mask_of_bools_in_a_graph_of_a_snapshot() -> None:
    torch.manual_seed(0)
    given = {
        "query": torch.randn(1, 4, 1, 8),
        "key": torch.randn(1, 2, 3, 8),
        "value": torch.randn(1, 2, 3, 8),
        "mask": torch.tensor([True, True, False]).reshape(1, 1, 1, 3),
    }
    program = export_module(BoolMask(), given)
    right = run(program, program.exported, given)
    with_values(program.exported.graph_module, [given[port.name] for port in program.inputs])
    grouped = with_grouped_queries(program.exported)
    assert grouped is not program.exported
    torch.testing.assert_close(run(program, grouped, given), right)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            transformers.LlamaConfig(**LLAMA, num_attention_heads=4, num_key_value_heads=4), id="of each head"
        ),
        *(pytest.param(FAMILIES[name], id=name) for name in ("shared by 2", "sliding")),
    ],
)
def test_attention_as_products_has_the_same_values(config: Any) -> None:
    program = exported(config)
    plain = with_plain_attention(with_grouped_queries(program.exported))
    assert not plain.graph.find_nodes(op="call_function", target=ATTENTION)
    own = [node.name for node in plain.graph.nodes if MARK not in node.name]
    assert own == [node.name for node in program.graph.nodes]
    given = inputs(program, batch=2, sequence=3, start=4, length=8, pad=2)
    for found, wanted in zip(run(program, plain, given), run(program, program.exported, given), strict=True):
        torch.testing.assert_close(found, wanted)
