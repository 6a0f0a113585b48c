"""Numbers near zero, where rounding is absolute: another order of sums is no mistake there, a factor is one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from glassengine.judge.cases import module_cases
from glassengine.judge.replay.replay import Replay
from glassengine.program import export_program, load_model
from glassengine.program.representation.naming import op_name
from glassengine.results import Comparison
from glassengine.testing import models
from tests.corpus import corpus
from tests.corpus.corpus import Bench
from tests.corpus.right.variations import VARIATIONS, Variation, VariedSide

SMALLEST_NORMAL = torch.finfo(torch.float16).tiny
LEGITIMATE = [one for one in VARIATIONS if one.name in ("split sums", "other formulas", "registers", "everything")]


class Vanishing(nn.Module):
    """Probabilities of a long softmax, products of them, tails of activations; and what amplifies all these again."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Linear(32, 640)
        self.back = nn.Linear(640, 32)
        self.norm = nn.LayerNorm(640)

    def forward(self, x: Tensor) -> Any:
        scores = 6 * self.keys(x)
        p, q = scores.softmax(-1), (0.7 * scores.flip(-1)).softmax(-1)
        both = p * q
        share = both / (both.sum(-1, keepdim=True) + 1e-4)
        tail = nn.functional.silu(scores - 9)
        roots = (both + 1e-6).sqrt(), (p + 1e-6).rsqrt()
        sums = (1e-3 * p).cumsum(-1), p.square().mean(-1, keepdim=True) * x
        return (
            both.float() * 3e4,
            self.back(both),
            share,
            1e-2 * tail,
            roots,
            sums,
            self.norm(both),
            (scores - 16).exp(),
        )


def bench(scale: float, dtype: torch.dtype) -> Bench:
    """Return `Vanishing`, or (for a small scale) what shrinks its input to numbers of that size."""

    class Shrunken(nn.Module):
        def forward(self, x: Tensor) -> Any:
            small = x * scale
            return small * 0.5 + small, (small * 3).abs(), small.relu() / 4

    x = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    module = models.drawn(Vanishing) if scale == 1 else Shrunken()
    model = load_model(module.to(dtype).eval())
    return Bench("near zero", model, export_program(model, inputs=[{"x": x}]), module_cases([{"x": x}])[0])


@pytest.fixture(scope="module")
def half() -> Bench:
    return bench(1, torch.float16)


class Mistaken(VariedSide):
    """A factor in the result of some ops."""

    factor = 1.0
    ops: frozenset[str] = frozenset()

    def _compute(self, node: Node, registers: dict[str, Tensor]) -> Any:
        value = super()._compute(node, registers)
        return value * self.factor if node.name in self.ops else value


def side(of: Bench, variation: Variation, kind: type[VariedSide] = VariedSide) -> VariedSide:
    nodes = {site.node: site.node for site in of.program.sites if site.kind == "op"}
    dtype = getattr(torch, of.model.dtype)
    return kind(of.program, nodes, variation, Replay(of.program, compiled=True, dtype=dtype, worth_a_bound=0.0))


def flagged(found: Comparison) -> list[tuple[str, float | None, float | None]]:
    return [
        (pair.site, pair.noise_ratio, pair.bound_ratio)
        for pair in found.pairs
        if pair.verdict in ("suspicious", "wrong")
    ]


def test_numbers_near_zero_may_be_rounded_otherwise(half: Bench) -> None:
    results = corpus.judge(half, [side(half, variation) for variation in LEGITIMATE])[1:]
    assert [flagged(found) for found in results] == [[]] * len(LEGITIMATE)
    for found in results[2:]:
        figures = [
            min(pair.noise_ratio / 2, pair.bound_ratio)
            for pair in found.pairs
            if pair.noise_ratio is not None and pair.bound_ratio is not None
        ]
        assert 0 < max(figures) < 0.8


@pytest.mark.parametrize("variation", [VARIATIONS[0], LEGITIMATE[-1]], ids=lambda one: one.name)
def test_a_factor_among_numbers_near_zero_is_named(half: Bench, variation: Variation) -> None:
    product = next(
        node for node in half.program.graph.nodes if op_name(node) == "mul" and len(node.all_input_nodes) == 2
    )
    run = side(half, variation, Mistaken)
    run.factor, run.ops = 1.3, frozenset({product.name})  # type: ignore[attr-defined]
    (found,) = corpus.judge(half, [run])[1:]
    assert found.verdict == "wrong"
    assert found.first_divergence is not None and found.first_divergence.node == product.name
    assert _most(run._values[product.name]) < SMALLEST_NORMAL


def _most(value: Tensor) -> float:
    """The size that nine of ten numbers do not exceed."""
    return float(value.float().abs().flatten().quantile(0.9))


@pytest.mark.parametrize(("scale", "dtype"), [(1e-6, torch.float16), (3e-39, torch.float32), (3e-39, torch.bfloat16)])
@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_a_tensor_of_such_numbers_alone(scale: float, dtype: torch.dtype, factor: float) -> None:
    of = bench(scale, dtype)

    class Flushing(Mistaken):
        """A processor that takes what is below the smallest normal float32 number for 0."""

        def _compute(self, node: Node, registers: dict[str, Tensor]) -> Any:
            value = super()._compute(node, registers)
            return torch.where(value.abs() < torch.finfo(dtype).tiny, 0, value) if dtype is not torch.float16 else value

    product = _last(node for node in of.program.graph.nodes if op_name(node) == "abs")
    run = side(of, LEGITIMATE[-1], Flushing)
    run.factor, run.ops = factor, frozenset({product.name})  # type: ignore[attr-defined]
    (found,) = corpus.judge(of, [run])[1:]
    # Below the smallest normal float32 number no factor can be told from what a processor may flush.
    is_mistake = factor != 1 and dtype is torch.float16
    assert bool(flagged(found)) is is_mistake
    assert (found.first_divergence is not None and found.first_divergence.node == product.name) is is_mistake


def _last(nodes: Iterable[Node]) -> Node:
    return list(nodes)[-1]
