"""Samples of what rounding makes of a product: of the right size everywhere, and carried in from disturbed factors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from glassengine.numerics.float64 import U_ACCUMULATE
from glassengine.numerics.noise import ExactProduct, rounds, uniform

aten = torch.ops.aten
U = 2.0**-24


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator(), dtype=torch.float64)


def node_of(target: Any) -> Node:
    return Graph().call_function(target, ())


def cases() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any], int]]:
    """Target, arguments, keyword arguments, and which argument moves."""
    x, w, b = normal(24, 96), normal(40, 96) * 0.1, normal(40)
    return {
        "linear": (aten.linear.default, (x, w, b), {}, 0),
        "addmm": (aten.addmm.default, (b, x, w.mT), {"alpha": 2.0}, 1),
        "mm, weight first": (aten.mm.default, (w, x.mT), {}, 1),
        "bmm": (aten.bmm.default, (x[None], w.mT[None]), {}, 0),
        "einsum": (aten.einsum.default, ("ij,kj->ik", [x, w]), {}, 1),
        "convolution": (aten.conv1d.default, (normal(2, 8, 20), normal(5, 8, 3), normal(5), [1], [1]), {}, 0),
    }


@pytest.mark.parametrize("name", list(cases()))
def test_a_disturbed_factor_moves_the_result_as_it_does_in_float64(name: str) -> None:
    target, args, kwargs, which = cases()[name]
    moved = list(args)
    if name == "einsum":
        moved[1] = [args[1][0] * (1 + 1e-5 * normal(24, 96)), args[1][1]]
    else:
        moved[which] = args[which] * (1 + 1e-5 * normal(*args[which].shape))
    exact = target(*args, **kwargs)
    product = ExactProduct(node_of(target), exact, args, kwargs)
    found = product.sums(tuple(moved), kwargs, U, generator())
    assert found is not None and found.dtype is torch.float32
    wanted = target(*moved, **kwargs) - exact
    # What is left is the rounding of sums, which was added: far smaller here than the disturbance.
    assert float((found - wanted).square().mean().sqrt()) < 0.2 * float(wanted.square().mean().sqrt())


@pytest.mark.parametrize("name", list(cases()))
def test_sums_are_rounded_by_the_probabilistic_bound(name: str) -> None:
    target, args, kwargs, _ = cases()[name]
    exact = target(*args, **kwargs)
    product = ExactProduct(node_of(target), exact, args, kwargs)
    draw = generator()
    samples = [product.sums(args, kwargs, U, draw) for _ in range(60)]
    measured = torch.stack([s for s in samples if s is not None]).double().square().mean(0).sqrt()
    bare = [arg * 0 if name == "addmm" and not i else arg for i, arg in enumerate(args)]
    if name in ("linear", "convolution"):
        bare[2] = None
    squared = [[leaf.square() for leaf in arg] if name == "einsum" and i else arg for i, arg in enumerate(bare)]
    squared = [arg.square() if isinstance(arg, Tensor) else arg for arg in squared]
    alpha = kwargs.get("alpha", 1.0)
    spread = target(*squared).abs().sqrt() * alpha
    terms = {"convolution": 24, "einsum": 24 * 96}.get(name, 96)
    half = math.sqrt(terms / 2) * U_ACCUMULATE
    expected = spread * math.sqrt(half * (half + 2 * math.sqrt(2 / math.pi) * U) / 3)
    assert float((measured / expected).min()) > 0.7 and float((measured / expected).max()) < 1.4
    assert float((measured / expected).mean()) == pytest.approx(1, abs=0.03)


def test_a_row_with_one_huge_element_never_draws_next_to_nothing() -> None:
    x, w = normal(16, 64) * 1e-3, normal(32, 64)
    x[:, 5] = 1e3
    product = ExactProduct(node_of(aten.linear.default), x @ w.mT, (x, w), {})
    draw = generator()
    for _ in range(20):
        found = product.sums((x, w), {}, U, draw)
        assert found is not None
        share = found.double().abs() / (x[:, 5:6] * w[:, 5]).abs()
        assert float(share.max() / share.min()) < 1.5


def test_it_declines_what_is_not_linear_in_one_factor() -> None:
    x, w, b = normal(4, 8), normal(6, 8), normal(6)
    product = ExactProduct(node_of(aten.linear.default), x @ w.mT + b, (x, w, b), {})
    draw = generator()
    assert product.sums((x * 2, w * 2, b), {}, U, draw) is None, "two factors"
    assert product.sums((x, w, b * 2), {}, U, draw) is None, "what is added"
    assert product.sums((x * math.inf, w, b), {}, U, draw) is None, "no finite difference"
    assert product.sums((x * 2, w, b), {}, U, draw) is not None


def test_an_infinite_element_leaves_the_noise_of_the_others() -> None:
    x, w = normal(4, 8), normal(6, 8)
    x[0, 0] = math.inf
    found = ExactProduct(node_of(aten.linear.default), x @ w.mT, (x, w), {}).sums((x, w), {}, U, generator())
    assert found is not None and bool(found.isfinite().all()) and bool((found[1:] != 0).all())


def test_tiny_factors_are_not_lost_in_float32() -> None:
    x, w = normal(4, 8) * 1e-18, normal(6, 8) * 1e-18
    found = ExactProduct(node_of(aten.linear.default), x @ w.mT, (x, w), {}).sums((x, w), {}, U, generator())
    assert found is not None and bool((found != 0).any())


def test_uniform_noise_has_the_mean_and_the_spread_of_uniform_noise() -> None:
    found = uniform((3, 70_001), generator())
    assert found.shape == (3, 70_001) and found.dtype is torch.float32
    assert float(found.abs().max()) < 1 and abs(float(found.mean())) < 5e-3
    assert float(found.square().mean()) == pytest.approx(1 / 3, rel=1e-2)
    assert float((found[0] * found[1]).mean()) == pytest.approx(0, abs=5e-3)
    assert torch.equal(found, uniform((3, 70_001), generator())), "the same from the same seed"
    assert uniform((), generator()).shape == () and uniform((0, 4), generator()).shape == (0, 4)


@pytest.mark.parametrize("target", [aten.floor.default, aten.round.default, aten.sign.default])
def test_whole_numbers_are_not_rounded(target: Any) -> None:
    assert not rounds(node_of(target))
    assert rounds(node_of(aten.exp.default))
