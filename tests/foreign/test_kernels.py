"""Kernels and formulas of other packages beside plain references: no alarm on right code."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import glassengine as glass

pytestmark = pytest.mark.slow


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def naive(name: str) -> Any:
    """Return plain formulas of flash-linear-attention, without its package, which needs a GPU."""
    found = importlib.util.find_spec("fla")
    if found is None or not found.submodule_search_locations:
        pytest.skip("fla-core is not installed")
    path = f"{next(iter(found.submodule_search_locations))}/ops/{name}/naive.py"
    spec = importlib.util.spec_from_file_location(f"naive_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first(function: Callable[..., Any], **options: Any) -> Callable[..., Tensor]:
    """Return a function that gives the first result."""

    def call(*args: Tensor) -> Tensor:
        found = function(*args, **options)
        result: Tensor = found[0] if isinstance(found, tuple) else found
        return result

    return call


def recurrent_inputs() -> tuple[Tensor, ...]:
    q, k, v = (drawn(2, 64, 2, 16, seed=i) for i in range(3))
    gate, beta = F.logsigmoid(drawn(2, 64, 2, seed=3)), drawn(2, 64, 2, seed=4).sigmoid()
    return q, F.normalize(k, dim=-1), v, gate, beta


def test_chunked_recurrences_of_fla() -> None:
    q, k, v, gate, beta = recurrent_inputs()
    simple = naive("simple_gla")
    one, other = first(simple.naive_chunk_simple_gla, chunk_size=16), first(simple.naive_recurrent_simple_gla)
    glass.assert_matches(one, other, (q, k, v, gate))
    delta = naive("gated_delta_rule")
    recurrent = first(delta.naive_recurrent_gated_delta_rule)
    chunked = first(delta.naive_chunk_gated_delta_rule, chunk_size=16)
    glass.assert_matches(chunked, lambda q, k, v, g, b: recurrent(q, k, v, b, g), (q, k, v, gate, beta))


def test_a_real_difference_of_fla() -> None:
    """In 0.6.0 the recurrent form decays its state before it reads p, its chunked form and its kernel after."""
    comba = naive("comba")
    q, k, v, gate, beta = recurrent_inputs()
    p = F.normalize(drawn(2, 64, 2, 16, seed=5), dim=-1)
    recurrent, chunked = first(comba.naive_recurrent_comba), first(comba.naive_chunk_comba, chunk_size=16)
    assert not glass.matches(chunked, lambda q, k, v, p, g, b: recurrent(q, k, v, p, b, g), (q, k, v, p, gate, beta)).ok

    def reads_first(q: Tensor, k: Tensor, v: Tensor, p: Tensor, g: Tensor, b: Tensor) -> Tensor:
        state, found = q.new_zeros(2, 2, 16, 16), []
        for i in range(q.shape[1]):
            read = v[:, i] - (state * p[:, i, :, :, None]).sum(-2)
            state = state * g[:, i].exp()[..., None, None] + k[:, i, :, :, None] * (read * b[:, i, :, None])[:, :, None]
            found.append((q[:, i, :, :, None] * 0.25 * state).sum(-2))
        return torch.stack(found, 1)

    glass.assert_matches(chunked, reads_first, (q, k, v, p, gate, beta))


def test_entmax_and_kornia() -> None:
    entmax = pytest.importorskip("entmax")
    x = drawn(6, 20)
    glass.assert_matches(lambda x: entmax.sparsemax(x, -1), lambda x: entmax.sparsemax_bisect(x, -1, 100), (x,))
    kornia = pytest.importorskip("kornia")
    image = drawn(2, 3, 9, 9).sigmoid()
    blur = kornia.filters.gaussian_blur2d
    glass.assert_matches(
        lambda x: blur(x, (3, 5), (1.0, 1.5), separable=True),
        lambda x: blur(x, (3, 5), (1.0, 1.5), separable=False),
        (image,),
    )


def test_liger_on_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    softmax = pytest.importorskip("liger_kernel.ops.softmax").LigerSoftmaxFunction
    glass.assert_matches(softmax.apply, lambda x: x.softmax(-1), (drawn(4, 50),))
