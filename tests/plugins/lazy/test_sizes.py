"""Sizes that are marked as changing: one compilation for all of them, and never a value of another size's graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.errors import UsageError
from glassengine.executable.compilation import compilations
from glassengine.plugins.lazy.sizes import fitted
from glassengine.plugins.lazy.symbols import Size, SizeSample
from glassengine.testing import models


def steps(function: Callable[[Tensor], Tensor], inputs: Sequence[Tensor], *dims: int) -> int:
    """Run a function on each input, compare it with eager code bit by bit, and return how often it was compiled."""
    before = len(compilations())
    for x in inputs:
        lazy = glass.lazy.mark_dynamic(glass.lazy.tensor(x), *dims)
        result = function(lazy)
        glass.mark_step()
        assert torch.equal(result.cpu(), function(x)), tuple(x.shape)
    return len(compilations()) - before


def batches(*sizes: int, rest: tuple[int, ...] = (6, 8)) -> list[Tensor]:
    return [torch.randn(size, *rest, generator=torch.Generator().manual_seed(size)) for size in sizes]


def test_one_compilation_serves_all_sizes() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.view(x.shape[0] * 6, 8).softmax(-1).reshape(x.shape[0], 48)
        return torch.cat([y, y * 2], 0) + torch.arange(2 * len(x), device=x.device)[:, None]

    assert steps(function, batches(4, 5, 9, 4, 12), 0) == 1


def test_a_size_that_is_also_one_of_a_weight_is_told_apart() -> None:
    def function(x: Tensor) -> Tensor:
        heads = x.view(x.shape[0], 6, 4, 2).transpose(1, 2)
        return (heads @ heads.transpose(-1, -2)).sum(-1).reshape(x.shape[0], 4 * 6)

    assert steps(function, batches(4, 6, 8, 2), 0) == 1


def test_two_sizes_change() -> None:
    def function(x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        scores = (x @ x.transpose(1, 2)).masked_fill(~mask, -1e9)
        return (scores.softmax(-1) @ x).reshape(-1, 8)

    inputs = [torch.randn(*shape, 8) for shape in ((2, 5), (3, 7), (6, 4), (2, 9), (4, 4))]
    assert steps(function, inputs, 0, 1) == 1


def test_what_was_foreseen_wrongly_is_compiled_again_and_right_then() -> None:
    def function(x: Tensor) -> Tensor:
        # The 4 is no batch; with a batch of 4 nothing tells them apart.
        return (
            torch.zeros(4, device=x.device).sum() + torch.full((3 * x.shape[0] + 2,), 2.0, device=x.device) * x.mean()
        )

    assert steps(function, batches(4, 6, 10, 3, 4), 0) == 2


def test_what_follows_from_a_size_in_no_simple_way_is_compiled_for_each() -> None:
    def function(x: Tensor) -> Tensor:
        return x.new_ones(2 ** x.shape[0]) * x.mean()

    assert steps(function, batches(2, 3, 5, 6, 2, 3, 5, 6), 0) == 4


def test_code_that_depends_on_the_size_is_another_graph() -> None:
    def function(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 5 else x.sin()

    assert steps(function, batches(2, 3, 7, 9, 4), 0) == 2


def test_sizes_of_zero_and_one_are_compiled_by_themselves() -> None:
    def function(x: Tensor) -> Tensor:
        return (x + torch.ones(x.shape[0], 1, 8, device=x.device)).reshape(-1).cumsum(0)

    assert steps(function, batches(1, 4, 1, 0, 5, 9, 1, 0), 0) == 3


def test_a_number_that_follows_from_a_size_is_right() -> None:
    def function(x: Tensor) -> Tensor:
        return x.sum() / x.shape[0] + x * (1 / len(x))

    assert steps(function, batches(3, 4, 7, 11), 0) <= 3


def test_sizes_that_are_not_marked_are_compiled_for_each() -> None:
    before = len(compilations())
    for x in batches(2, 3, 4):
        assert torch.equal((glass.lazy.tensor(x) * 2).sum(0).cpu(), (x * 2).sum(0))
    assert len(compilations()) - before == 3


def test_the_mark_of_torch_holds() -> None:
    before = len(compilations())
    for x in batches(2, 3, 4):
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal((x.to(glass.lazy.device()) * 2).sum(0).cpu(), (x * 2).sum(0))
    assert len(compilations()) - before == 1


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_model_trains_on_batches_of_any_size(backend: str) -> None:
    def losses(is_lazy: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
        if is_lazy:
            glass.lazy.module(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for size in (4, 6, 10, 3, 6):
            x, y = torch.randn(size, 5, 8), torch.randint(0, 4, (size, 5))
            if is_lazy:
                x, y = (glass.lazy.mark_dynamic(glass.lazy.tensor(given), 0) for given in (x, y))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x).reshape(size * 5, 4), y.view(-1))
            loss.backward()
            optimizer.step()
            glass.mark_step()
            found.append(loss.detach())
        return [float(loss) for loss in found]

    with glass.lazy.mode(backend=backend):
        before = len(compilations())
        lazy = losses(True)
    # The first step of AdamW makes its states, and is a graph of its own.
    assert len(compilations()) - before == 2
    assert lazy == (losses(False) if backend == "eager" else pytest.approx(losses(False), rel=1e-5))


def test_a_llama_is_compiled_once_for_prompts_of_any_length() -> None:
    model = models.llama(num_hidden_layers=1).eval()
    prompts = [torch.randint(5, 60, shape) for shape in ((3, 5), (2, 9), (5, 7), (3, 12))]
    with torch.no_grad():
        wanted = [model(prompt, torch.ones_like(prompt), use_cache=False).logits for prompt in prompts]
        glass.lazy.module(model)
        before = len(compilations())
        for prompt, logits in zip(prompts, wanted, strict=True):
            ids = glass.lazy.mark_dynamic(glass.lazy.tensor(prompt))
            mask = glass.lazy.mark_dynamic(glass.lazy.tensor(torch.ones_like(prompt)))
            assert torch.equal(model(ids, mask, use_cache=False).logits.cpu(), logits)
    # transformers also reads whether anything is masked.
    assert len([found for found in compilations()[before:] if found.num_ops > 50]) == 1


def test_sizes_are_fitted_exactly() -> None:
    samples = [SizeSample((4, 3, 8), (12, 7, 2, 5)), SizeSample((6, 5, 8), (30, 11, 3, 5))]
    pattern = fitted(samples)
    assert pattern is not None and pattern.symbols == (0, 1)
    assert pattern.arguments == (
        Size(Fraction(1), (0, 1), Fraction(0)),
        Size(Fraction(2), (0,), Fraction(-1)),
        Size(Fraction(1, 2), (0,), Fraction(0)),
        Size(Fraction(0), (), Fraction(5)),
    )
    assert pattern.fits(SizeSample((8, 2, 8), (16, 15, 4, 5)))
    assert not pattern.fits(SizeSample((8, 2, 8), (16, 15, 4, 6)))
    assert not pattern.fits(SizeSample((7, 2, 8), (14, 13, 3, 5)))
    assert fitted([*samples, SizeSample((8, 2, 8), (99, 15, 4, 5))]) is None


def test_only_what_holds_data_is_marked() -> None:
    x = glass.lazy.tensor(torch.ones(2, 3))
    with pytest.raises(UsageError, match="follow from others"):
        glass.lazy.mark_dynamic(x * 2, 0)
    with pytest.raises(UsageError, match="no lazy tensor"):
        glass.lazy.mark_dynamic(torch.ones(2), 0)
    with pytest.raises(IndexError, match="dimension 2"):
        glass.lazy.mark_dynamic(x, 2)


@pytest.mark.slow
def test_what_a_compiler_assumes_of_a_size_holds_for_code_from_its_cache() -> None:
    """Inductor chooses the layout of a convolution by its sizes; its cache asks for the sizes that are inputs."""

    def gradient(x: Tensor, weight: Tensor) -> Tensor:
        given = x.detach().requires_grad_()
        nn.functional.conv1d(given.transpose(1, 2), weight, padding=1).square().sum().backward()
        assert given.grad is not None
        return given.grad

    weight = torch.randn(5, 8, 3, generator=torch.Generator().manual_seed(0))
    with glass.lazy.mode(backend="inductor"):
        for shape in ((2, 4), (3, 6), (4, 8), (5, 10), (3, 4)):
            x = torch.randn(*shape, 8)
            lazy = glass.lazy.mark_dynamic(glass.lazy.tensor(x), 0, 1)
            got = gradient(lazy, glass.lazy.tensor(weight)).cpu()
            torch.testing.assert_close(got, gradient(x, weight), rtol=1e-4, atol=1e-4)
