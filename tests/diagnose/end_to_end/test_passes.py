"""Passes that fuse ops are judged where their regions end, and a wrong fusion is named."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from glassengine.diagnose import check
from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.levels import add_passes, start
from glassengine.judge.cases import read_inputs
from glassengine.judge.verdict.run import run_cases
from glassengine.program import load_model

PASSES = """
import torch

aten = torch.ops.aten


def named(node, text):
    return isinstance(node, torch.fx.Node) and node.op == "placeholder" and text in node.name


def fold_gain(graph_module, power=lambda number: 1):
    '''linear(gain * x, weight) -> linear(x, weight * gain).'''
    graph, number = graph_module.graph, 0
    for product in list(graph.nodes):
        if product.target is not aten.mul.Tensor or not any(named(a, "norm") for a in product.args):
            continue
        if not all(user.target is aten.linear.default for user in product.users):
            continue
        gain, x = sorted(product.args, key=lambda a: not named(a, "norm"))
        for linear in list(product.users):
            with graph.inserting_before(linear):
                weight = linear.args[1]
                for _ in range(power(number)):
                    weight = graph.call_function(aten.mul.Tensor, (weight, gain))
                new = graph.call_function(aten.linear.default, (x, weight))
            linear.replace_all_uses_with(new)
            graph.erase_node(linear)
            number += 1
        graph.erase_node(product)


def fold_gain_twice(graph_module):
    fold_gain(graph_module, power=lambda number: 2 if number == 1 else 1)


def fuse_products(graph_module, order=(0, 1, 2)):
    '''One product for query, key and value.'''
    graph = graph_module.graph
    for x in list(graph.nodes):
        linears = [u for u in x.users if u.target is aten.linear.default and "self_attn" in u.args[1].name]
        if len(linears) != 3:
            continue
        ends = [0]
        for linear in linears:
            ends.append(ends[-1] + linear.meta["val"].shape[-1])
        with graph.inserting_before(linears[0]):
            weight = graph.call_function(aten.cat.default, ([linear.args[1] for linear in linears], 0))
            product = graph.call_function(aten.linear.default, (x, weight))
            parts = [graph.call_function(aten.slice.Tensor, (product, 2, ends[i], ends[i + 1])) for i in order]
        for linear, part in zip(linears, parts):
            linear.replace_all_uses_with(part)
            graph.erase_node(linear)


def fuse_products_swapped(graph_module):
    fuse_products(graph_module, order=(0, 2, 1))


def divide_by_root(graph_module, factor=None):
    '''x * rsqrt(y) -> x / sqrt(y).'''
    graph = graph_module.graph
    for power in list(graph.nodes):
        if power.target is not aten.rsqrt.default:
            continue
        (product,) = power.users
        (x,) = (a for a in product.args if a is not power)
        with graph.inserting_before(product):
            root = graph.call_function(aten.sqrt.default, (power.args[0],))
            if factor is not None:
                root, factor = graph.call_function(aten.mul.Tensor, (root, factor)), None
            new = graph.call_function(aten.div.Tensor, (x, root))
        product.replace_all_uses_with(new)
        graph.erase_node(product)
        graph.erase_node(power)


def divide_by_too_much(graph_module):
    divide_by_root(graph_module, factor=1.01)


def fuse_everything(graph_module):
    divide_by_root(graph_module)
    fuse_products(graph_module)
    fold_gain(graph_module)
"""


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("passes") / "passes.py"
    path.write_text(PASSES)
    return path


def judged(model: nn.Module, inputs: str, name: str) -> Climb:
    """Return what was found by the interpreted levels alone: no engine is built."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        climb = start(load_model(model), read_inputs(inputs), 0, stack, print)
        add_passes(climb, [name], print)
        run_cases(climb.program, climb.cases, climb.model, climb.scores, coarsest=None, on_step=lambda *_: None)
    return climb


def test_fusions_are_no_mistakes(llama: nn.Module, passes: Path, token_ids: str) -> None:
    climb = judged(llama, token_ids, f"{passes}:fuse_everything")
    pairs = climb.scores[1].pairs
    assert {pair.verdict for pair in pairs} <= {"identical", "rounding"}
    # The gain's own product is gone: it is judged where what it flows into is on both sides again.
    assert not any("input_layernorm/mul.1" in pair.site for pair in pairs)
    ends = {pair.site for pair in pairs if pair.judged_by == "segment" or pair.site.endswith("_proj/linear.0")}
    assert {f"model.layers.{i}.self_attn.{name}_proj/linear.0" for i in (0, 1) for name in "qkv"} <= ends
    assert not [item for item in climb.skipped if item.side == "baseline"]


@pytest.mark.parametrize(
    ("name", "site"),
    [
        ("fold_gain_twice", "model.layers.0.self_attn.k_proj/linear.0"),
        pytest.param("fuse_products_swapped", "model.layers.0.self_attn/", marks=pytest.mark.slow),
        pytest.param("divide_by_too_much", "model.layers.0.input_layernorm/mul.0", marks=pytest.mark.slow),
    ],
)
def test_a_wrong_fusion_is_named(llama: nn.Module, passes: Path, token_ids: str, name: str, site: str) -> None:
    climb = judged(llama, token_ids, f"{passes}:{name}")
    (score,) = climb.scores[1:]
    first = next(iter(score.divergences.values()))
    assert first.verdict == "wrong" and first.site.startswith(site)
    assert not climb.scores[0].divergences


@pytest.mark.slow
def test_an_engine_of_fused_ops(llama: nn.Module, passes: Path, token_ids: str) -> None:
    """What the engine was built from has regions, too: its ops are judged, and none is taken for another."""
    result = check(llama, backend="eager", passes=[f"{passes}:fold_gain"], inputs=token_ids, steps=0)
    assert result.ok and not result.origins and result.coverage > 0.95
    engine = [pair for pair in result.pairs if pair.level == "engine"]
    ends = [pair for pair in engine if pair.site == "model.layers.0.mlp.up_proj/linear.0"]
    assert ends and {pair.method for pair in ends} == {"name"}
