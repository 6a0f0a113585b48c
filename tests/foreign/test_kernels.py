"""Kernels and formulas of other packages beside plain references: no alarm on right code."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import glassengine as glass

pytestmark = pytest.mark.slow


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reference_softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


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


def test_liger_on_the_interpreter() -> None:
    softmax = pytest.importorskip("liger_kernel.ops.softmax").LigerSoftmaxFunction
    glass.assert_matches(softmax.apply, lambda x: x.softmax(-1), (drawn(4, 50),))


def test_numba() -> None:
    numba = pytest.importorskip("numba")

    @numba.njit  # type: ignore[untyped-decorator]
    def softmax(x):  # type: ignore[no-untyped-def]
        out = np.empty_like(x)
        for i in range(x.shape[0]):
            top, total = x[i].max(), np.float32(0)
            for j in range(x.shape[1]):
                out[i, j] = np.exp(x[i, j] - top)
                total += out[i, j]
            out[i] /= total
        return out

    @numba.njit  # type: ignore[untyped-decorator]
    def doubles(x):  # type: ignore[no-untyped-def]
        x *= 2
        return x

    x = drawn(8, 45).numpy()
    glass.assert_matches(softmax, reference_softmax, (x,))
    glass.assert_matches(lambda x: softmax(x[:, ::-1])[:, ::-1], reference_softmax, (x,))
    found = glass.matches(lambda x: softmax(x) * np.float32(1.001), reference_softmax, (x,))
    assert not found.ok and found.mistakes[0].text == "multiplied by 1.001"
    assert glass.matches(doubles, lambda x: x * 2, (x,)).mistakes[0].kind == "inputs written"


def test_jax() -> None:
    jax = pytest.importorskip("jax")
    numpy = jax.numpy
    x = numpy.asarray(drawn(8, 45).numpy())
    glass.assert_matches(jax.jit(lambda x: jax.nn.softmax(x)), reference_softmax, (x,))
    glass.assert_matches(jax.nn.softmax(x), reference_softmax, (x,))
    glass.assert_matches(jax.nn.softmax, reference_softmax, (x.astype(numpy.bfloat16),))
    glass.assert_matches(jax.nn.gelu, lambda x: F.gelu(x, approximate="tanh"), (x,))
    glass.assert_matches(lambda d: {"y": jax.nn.silu(d["x"])}, lambda d: {"y": F.silu(d["x"])}, ({"x": x},))
    gradient = jax.grad(lambda x: jax.nn.logsumexp(x, axis=-1).sum())
    glass.assert_matches(gradient, reference_softmax, (x,))
    assert not glass.matches(lambda x: jax.nn.softmax(x, axis=0), reference_softmax, (x,)).ok
    # Numbers that a library has added to NumPy.
    glass.assert_matches(lambda x: np.asarray(x * 2), lambda x: x * 2, (x.astype(numpy.bfloat16),))


def test_triton_by_its_interpreter() -> None:
    triton = pytest.importorskip("triton")
    tl = pytest.importorskip("triton.language")

    @triton.jit  # type: ignore[untyped-decorator]
    def kernel(a, b, out, m, n, k, is_masked: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
        rows = tl.program_id(0) * block + tl.arange(0, block)[:, None]
        columns = tl.program_id(1) * block + tl.arange(0, block)[None, :]
        total = tl.zeros((block, block), tl.float32)
        for start in range(0, k, block):
            terms = start + tl.arange(0, block)
            is_a = (rows < m) & ((terms < k)[None, :] | (not is_masked))
            is_b = ((terms < k)[:, None] | (not is_masked)) & (columns < n)
            x = tl.load(a + rows * k + terms[None, :], mask=is_a, other=0.0).to(tl.float32)
            y = tl.load(b + terms[:, None] * n + columns, mask=is_b, other=0.0).to(tl.float32)
            total += tl.dot(x, y)
        tl.store(out + rows * n + columns, total.to(out.dtype.element_ty), mask=(rows < m) & (columns < n))

    def product(is_masked: bool) -> Callable[[Tensor, Tensor], Tensor]:
        def call(a: Tensor, b: Tensor) -> Tensor:
            a, b = a.contiguous(), b.contiguous()
            (m, k), n = a.shape, b.shape[1]
            out = a.new_empty(m, n)
            if out.numel():
                kernel[(triton.cdiv(m, 16), triton.cdiv(n, 16))](a, b, out, m, n, k, is_masked, 16)
            return out

        return call

    sizes = {"M": (17, 32), "N": (5, 16), "K": (48, 33, 50, 64)}
    for dtype in (torch.float32, torch.float16):
        glass.assert_matches(product(True), torch.matmul, (drawn(33, 50).to(dtype), drawn(50, 20).to(dtype)))
    glass.testing.assert_sweep(product(True), torch.matmul, "M K, K N", sizes=sizes, values=["zeros", "values of 100"])
    found = glass.testing.sweep(product(False), torch.matmul, "M K, K N", sizes=sizes, values=(), layouts=())
    assert not found.ok and found.when == "K % 16 != 0", found.when


def test_functions_of_xformers() -> None:
    ops = pytest.importorskip("xformers.ops")
    swiglu = pytest.importorskip("xformers.ops.swiglu_op")
    attention = pytest.importorskip("xformers.attn_bias_utils").ref_attention_bmhk
    decomposed = swiglu._SwiGLUDecomposedFunc.apply
    x, w1, w2, w3 = drawn(6, 16), drawn(24, 16, seed=1), drawn(24, 16, seed=2), drawn(16, 24, seed=3)
    b1, b2, b3 = drawn(24, seed=4), drawn(24, seed=5), drawn(16, seed=6)
    given = (x, w1, b1, w2, b2, w3, b3)
    glass.assert_matches(decomposed, swiglu._eager_functional_swiglu, given)
    glass.testing.assert_gradients_match(decomposed, swiglu._eager_functional_swiglu, given)
    q, k, v = (drawn(2, 20, 3, 8, seed=i) for i in range(3))

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return found.transpose(1, 2)

    for dtype in (torch.float32, torch.float16):
        inputs = tuple(t.to(dtype) for t in (q, k, v))
        masked = lambda q, k, v: attention(q, k, v, ops.LowerTriangularMask()).to(q.dtype)  # noqa: E731
        glass.assert_matches(masked, plain, inputs)
    assert not glass.matches(lambda q, k, v: attention(q, k, v, None), plain, (q, k, v)).ok
