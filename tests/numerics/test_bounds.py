"""Rounding bounds: real kernels stay below, small mistakes do not, for every class of op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from glassengine.numerics.bounds import has_bound, rounding_bound
from glassengine.numerics.float64 import Operation, Roundoff
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.ops.row import Rounding
from glassengine.ops.traits import TABLE, named

aten = torch.ops.aten


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def positive(*shape: int) -> Tensor:
    return drawn(*shape).abs() + 0.1


X, Y = drawn(3, 17, 64), drawn(3, 17, 64, seed=1)
HEADS = [drawn(2, 4, 9, 16, seed=seed) for seed in (2, 3, 4)]
IMAGE, FILTER = drawn(2, 3, 12, 12), drawn(5, 3, 3, 3, seed=1)
CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "add": (aten.add.Tensor, (X, Y)),
    "sub": (aten.sub.Tensor, (X, X * (1 - 1e-3))),
    "mul": (aten.mul.Tensor, (X, Y)),
    "div": (aten.div.Tensor, (X, positive(3, 17, 64))),
    "rsqrt": (aten.rsqrt.default, (positive(3, 17),)),
    "pow": (aten.pow.Tensor_Scalar, (X, 2)),
    "silu": (aten.silu.default, (X * 4,)),
    "gelu": (aten.gelu.default, (X * 3,)),
    "tanh": (aten.tanh.default, (X,)),
    "exp": (aten.exp.default, (X * 3,)),
    "log": (aten.log.default, (positive(99),)),
    "cos": (aten.cos.default, (X * 30,)),
    "sin": (aten.sin.default, (X * 30,)),
    "softplus": (aten.softplus.default, (X * 5,)),
    "mean": (aten.mean.dim, (X, [-1])),
    "sum": (aten.sum.dim_IntList, (X, [-1])),
    "cumsum": (aten.cumsum.default, (X, -1)),
    "linear": (aten.linear.default, (X, drawn(33, 64), drawn(33, seed=5))),
    "matmul": (aten.matmul.default, (X, drawn(64, 20))),
    "bmm": (aten.bmm.default, (X, Y.mT)),
    "addmm": (aten.addmm.default, (drawn(20), X[0], drawn(64, 20))),
    "conv1d": (aten.conv1d.default, (drawn(2, 4, 40), drawn(6, 4, 5), drawn(6, seed=1))),
    "conv2d": (aten.conv2d.default, (IMAGE, FILTER, drawn(5), [2, 2], [1, 1])),
    "max_pool2d": (aten.max_pool2d.default, (IMAGE, [3, 3], [2, 2])),
    "adaptive_avg_pool2d": (aten.adaptive_avg_pool2d.default, (IMAGE, [1, 1])),
    "softmax": (aten.softmax.int, (X * 5, -1)),
    "log_softmax": (aten.log_softmax.int, (X * 5, -1)),
    "layer_norm": (aten.layer_norm.default, (X + 3, [64], drawn(64), drawn(64, seed=1))),
    "rms_norm": (aten.rms_norm.default, (X, [64], drawn(64), 1e-6)),
    "group_norm": (aten.group_norm.default, (drawn(2, 8, 5, 5), 4, drawn(8), drawn(8, seed=1))),
    "_native_batch_norm_legit_no_training": (
        lambda *args: aten._native_batch_norm_legit_no_training.default(*args)[0],
        (drawn(2, 8, 5, 5), drawn(8), drawn(8, seed=1), drawn(8, seed=2), positive(8), 0.1, 1e-5),
    ),
    "var": (aten.var.correction, (X, [-1])),
    "linalg_vector_norm": (aten.linalg_vector_norm.default, (X, 2, [-1])),
    "prod": (aten.prod.dim_int, (positive(5, 9), -1)),
    "scaled_dot_product_attention": (aten.scaled_dot_product_attention.default, tuple(HEADS)),
    "index": (lambda x: aten.index.Tensor(x, [torch.tensor([2, 0])]), (X,)),
    "topk": (lambda x, k: aten.topk.default(x, k)[0], (X, 4)),
    "ceil": (aten.ceil.default, (X * 9,)),
    "prelu": (aten.prelu.default, (drawn(2, 8, 5, 6), drawn(8))),
    "_weight_norm": (aten._weight_norm.default, (drawn(6, 4, 5), positive(6, 1, 1), 0)),
    "to": (aten.alias.default, (X,)),
}


WRITTEN_OUT: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "celu": (aten.celu.default, lambda x: torch.where(x > 0, x, x.exp() - 1)),
    "elu": (aten.elu.default, lambda x: torch.where(x > 0, x, x.exp() - 1)),
    "selu": (
        aten.selu.default,
        lambda x: 1.0507009873554805 * torch.where(x > 0, x, 1.6732632423543772 * (x.exp() - 1)),
    ),
    "expm1": (aten.expm1.default, lambda x: x.exp() - 1),
    "log1p": (lambda x: aten.log1p.default(x.abs()), lambda x: (1 + x.abs()).log()),
    "log_sigmoid": (aten.log_sigmoid.default, lambda x: x.sigmoid().log()),
    "softplus": (aten.softplus.default, lambda x: (1 + x.exp()).log()),
    "erfc": (aten.erfc.default, lambda x: 1 - x.erf()),
}
"""As ONNX, which has none of these, or its runtimes have them: right to an absolute error."""


def bounded(name: str, dtype: torch.dtype, u_in: float = 0.0) -> tuple[Tensor, Tensor, Tensor, Callable[..., Any]]:
    """Float64 result, result of the real kernel, bound; of arguments that `dtype` can hold."""
    call, args = CASES[name]
    own = pytree.tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, args)
    exact_args = pytree.tree_map(lambda v: v.double() if isinstance(v, Tensor) else v, own)
    exact = call(*exact_args)
    bound = rounding_bound(Operation(name, call, exact_args, {}, exact), Roundoff(unit_roundoff(dtype), u_in))
    assert bound is not None and bound.shape == exact.shape
    return exact, call(*own).double(), bound, call


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_stay_below_the_bound_and_mistakes_do_not(name: str, dtype: torch.dtype) -> None:
    exact, real, bound, _ = bounded(name, dtype)
    error = (real - exact).abs()
    assert bool((error <= bound).all()), float((error / bound).max())
    mistake = exact.abs() * (2e-4 if dtype is torch.float32 else 0.1)
    assert bool((mistake > bound).any()), float((mistake / bound).max())


FUSED = [n for n in CASES if named(n).rounding in (Rounding.POINTWISE, Rounding.SUMS)]
FUSED += ["softmax", "layer_norm", "rms_norm"]


@pytest.mark.parametrize("name", FUSED)
def test_registers_of_a_fused_kernel_are_within_the_bound_of_what_was_dumped(name: str) -> None:
    call, args = CASES[name]
    u = unit_roundoff(torch.bfloat16)
    dumped = pytree.tree_map(
        lambda v: v.bfloat16().double() if isinstance(v, Tensor) and v.is_floating_point() else v, args
    )
    used = call(*pytree.tree_map(lambda v: v.double() if isinstance(v, Tensor) else v, args)).bfloat16().double()
    exact = call(*dumped)
    operation = Operation(name, call, dumped, {}, exact)
    wide, narrow = rounding_bound(operation, Roundoff(u, u)), rounding_bound(operation, Roundoff(u))
    assert wide is not None and narrow is not None
    # The bound is of first order.
    assert bool(((used - exact).abs() <= 1.05 * wide).all())
    assert bool((wide >= narrow).all()) and bool((wide > narrow).any())


def test_a_wrong_epsilon_is_beyond_the_bound_of_a_norm() -> None:
    exact, _, bound, call = bounded("layer_norm", torch.float32)
    small = [(X * 1e-2).double(), [64], drawn(64).double(), drawn(64, seed=1).double()]
    exact = call(*small)
    bound = rounding_bound(
        Operation("layer_norm", call, tuple(small), {}, exact), Roundoff(unit_roundoff(torch.float32))
    )
    assert bound is not None
    wrong = call(*small, 2e-5)
    assert bool(((wrong - exact).abs() > bound).any())


def test_a_product_of_whole_numbers_has_the_rounding_of_its_result_alone() -> None:
    call, args = aten.mul.Tensor, (torch.arange(8), -0.307)
    exact = torch.arange(8).double() * -0.307
    bound = rounding_bound(Operation("mul", call, args, {}, exact), Roundoff(unit_roundoff(torch.float32)))
    assert bound is not None
    assert bool(((call(*args).double() - exact).abs() <= bound).all())
    assert bool(((exact * (1 + 1e-5) - exact).abs() > bound)[1:].all())


def test_a_weight_in_a_coarser_dtype_widens_the_bound() -> None:
    call, args = CASES["linear"]
    exact_args = tuple(a.double() for a in args)
    exact = call(*exact_args)
    coarse = call(exact_args[0], args[1].bfloat16().double(), args[2].bfloat16().double())
    u, u_w = unit_roundoff(torch.float32), unit_roundoff(torch.bfloat16)
    operation = Operation("linear", call, exact_args, {}, exact)
    narrow, wide = rounding_bound(operation, Roundoff(u)), rounding_bound(operation, Roundoff(u, 0.0, u_w))
    assert narrow is not None and wide is not None
    assert bool(((coarse - exact).abs() > narrow).any())
    assert bool(((coarse - exact).abs() <= wide).all())


def test_masked_rows_and_huge_scores_do_not_widen_the_bound_of_attention() -> None:
    q, k, v = (tensor.double() for tensor in HEADS)
    call = aten.scaled_dot_product_attention.default
    mask = torch.zeros(9, 9, dtype=torch.float64)
    mask[:, 5:] = torch.finfo(torch.float32).min
    exact = call(q, k, v, mask)
    bound = rounding_bound(
        Operation("scaled_dot_product_attention", call, (q, k, v, mask), {}, exact), Roundoff(2.0**-24)
    )
    assert bound is not None and float((bound / exact.abs().mean()).max()) < 1e-4


def test_a_step_may_fall_on_the_other_side_only_where_a_register_does() -> None:
    """2.999 stored in bfloat16 is 3: a fused kernel that used 3.004 has the ceiling 4."""
    stored = torch.tensor([3.0, 3.25], dtype=torch.float64)
    operation = Operation("ceil", aten.ceil.default, (stored,), {}, stored.ceil())
    bound = rounding_bound(operation, Roundoff(2.0**-8, 2.0**-8))
    assert bound is not None and bound[0] > 1 and bound[1] < 0.1
    exactly = rounding_bound(operation, Roundoff(2.0**-8))
    assert exactly is not None and bool((exactly < 0.1).all())


@pytest.mark.parametrize("offset", [0.0, 20.0])
def test_a_variance_from_the_mean_of_squares_is_within_the_bound_of_a_norm(offset: float) -> None:
    """Some kernels take mean(x^2) - mean^2 in float32; far from zero that costs digits."""
    x = X + offset
    w, b = drawn(64), drawn(64, seed=1)
    mean = x.mean(-1, keepdim=True)
    kernel = (x - mean) / (x.square().mean(-1, keepdim=True) - mean.square() + 1e-5).sqrt() * w + b
    args = (x.double(), [64], w.double(), b.double())
    exact = aten.layer_norm.default(*args)
    operation = Operation("layer_norm", aten.layer_norm.default, args, {}, exact)
    bound = rounding_bound(operation, Roundoff(2.0**-24))
    assert bound is not None and bool(((kernel.double() - exact).abs() <= bound).all())


def test_a_slightly_wrong_epsilon_is_beyond_the_bound_of_a_norm_in_float32() -> None:
    args = (0.3 * X.double(), [64], drawn(64).double(), drawn(64, seed=1).double())
    exact = aten.layer_norm.default(*args)
    operation = Operation("layer_norm", aten.layer_norm.default, args, {}, exact)
    bound = rounding_bound(operation, Roundoff(2.0**-24, 2.0**-24))
    assert bound is not None and bool(((aten.layer_norm.default(*args, 1.5e-5) - exact).abs() > bound).any())


def patches(image: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
    """A convolution of patches as a product of unfolded patches, and the bias added to what was rounded."""
    columns = torch.nn.functional.unfold(image, 3, stride=3).mT @ kernel.flatten(1).T + bias
    return columns.mT.unflatten(-1, (4, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["linear", "conv2d", "addmm", "baddbmm", "addcmul", "lerp"])
def test_what_is_added_may_be_added_to_a_rounded_result(name: str, dtype: torch.dtype) -> None:
    """Where it takes most of the product away again, that costs digits."""
    x, w, bias = drawn(6, 40).to(dtype), drawn(9, 40, seed=1).to(dtype), (-30 + drawn(9, seed=2)).to(dtype)
    image, kernel = drawn(2, 3, 12, 12).to(dtype) + 1, drawn(5, 3, 3, 3).to(dtype).abs()
    shift, third = -kernel.sum((1, 2, 3)), torch.tensor(1 / 3).to(dtype)
    call, args, written_out = {
        "linear": (aten.linear.default, (x + 1, w, bias), (x + 1) @ w.T + bias),
        "conv2d": (aten.conv2d.default, (image, kernel, shift, [3, 3]), patches(image, kernel, shift)),
        "addmm": (aten.addmm.default, (bias, x + 1, w.T), bias + (x + 1) @ w.T),
        "baddbmm": (aten.baddbmm.default, (bias[None, None], x[None], w.T[None]), bias + x[None] @ w.T[None]),
        "addcmul": (aten.addcmul.default, (-x * x, x, x), -x * x + x * x),
        "lerp": (aten.lerp.Tensor, (x, -2 * x, third), x + third * (-2 * x - x)),
    }[name]
    exact_args = pytree.tree_map(lambda v: v.double() if isinstance(v, Tensor) else v, args)
    exact = call(*exact_args)
    bound = rounding_bound(Operation(name, call, exact_args, {}, exact), Roundoff(unit_roundoff(dtype)))
    assert bound is not None and bool(((written_out.double() - exact).abs() <= bound).all())


def test_an_unknown_op_has_no_bound() -> None:
    assert not has_bound("fft_fft") and not any(
        has_bound(name) for name, row in TABLE.items() if row.rounding is Rounding.UNBOUNDED
    )
    exact = X.double()
    assert rounding_bound(Operation("fft_fft", torch.neg, (exact,), {}, exact), Roundoff(2.0**-24)) is None


@pytest.mark.parametrize("scale", [1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize("name", CASES)
def test_near_zero_registers_differ_by_more_than_a_share_of_what_was_dumped(name: str, scale: float) -> None:
    """Below 6e-5 float16 rounds to multiples of 6e-8."""
    call, args = CASES[name]
    used = pytree.tree_map(lambda v: scale * v.double() if is_float(v) else v, args)
    dumped = pytree.tree_map(lambda v: v.half().double() if is_float(v) else v, used)
    exact, result = call(*dumped), call(*used).half().double()
    u, tiny = unit_roundoff(torch.float16), smallest_precise(torch.float16)
    bound = rounding_bound(Operation(name, call, dumped, {}, exact), Roundoff(u, u, 0.0, tiny, tiny_in=tiny))
    assert bound is not None
    counted = (result - exact).isfinite()
    assert bool(((result - exact).abs() <= bound)[counted].all())


def test_a_factor_on_numbers_of_one_millionth_is_beyond_the_bound_in_float16() -> None:
    x, y = (1e-6 + 1e-6 * value.double().sigmoid() for value in (X, Y))
    u, tiny = unit_roundoff(torch.float16), smallest_precise(torch.float16)
    for name, call, args in (
        ("add", aten.add.Tensor, (x, y)),
        ("mul", aten.mul.Tensor, (x, 1 + Y.double().sigmoid())),
        ("mean", aten.mean.dim, (x, [-1])),
    ):
        exact = call(*args)
        bound = rounding_bound(Operation(name, call, args, {}, exact), Roundoff(u, u, 0.0, tiny, tiny_in=tiny))
        assert bound is not None and bool((0.3 * exact > bound).all())


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_what_is_written_out_has_an_absolute_error(name: str) -> None:
    call, written_out = WRITTEN_OUT[name]
    x = drawn(40, 64) * torch.logspace(-6, 0.7, 40)[:, None]
    exact = call(x.double())
    bound = rounding_bound(Operation(name, call, (x.double(),), {}, exact), Roundoff(unit_roundoff(torch.float32), 0.0))
    assert bound is not None
    error = (written_out(x).double() - exact).abs()
    assert bool((error <= bound).all()), float((error / bound).max())
    assert bool((exact.abs() * 1e-4 > bound).any())
