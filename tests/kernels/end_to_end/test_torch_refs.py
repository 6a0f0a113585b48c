"""Torch's references and decompositions beside its kernels: right code that others wrote, in three dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._refs as refs
import torch._refs.nn.functional as nn_refs
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table

import glassengine as glass
from tests.kernels.corpus.right import DTYPES, drawn

Pair = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]


def pairs() -> dict[str, Pair]:
    """Return name -> (other code, torch's kernel, arguments)."""
    x, y = drawn(12, 40), drawn(12, 40, seed=1)
    positive, small = x.abs() + 0.1, x.tanh() * 0.8
    two = (positive, y.abs() + 0.3)
    found: dict[str, Pair] = {}
    for where, text, arguments in (
        (
            refs,
            "abs asinh atan ceil cos cosh exp exp2 expm1 floor frac neg round sigmoid sign sin sinh square tan",
            (x,),
        ),
        (refs, "erf erfc tanh trunc", (x,)),
        (refs, "log log10 log2 log1p rsqrt sqrt lgamma digamma reciprocal", (positive,)),
        (refs, "acos asin atanh erfinv", (small,)),
        (refs, "softmax log_softmax logsumexp cumsum cumprod sum mean prod amax amin var std", (x, -1)),
        (refs, "add sub mul true_divide pow atan2 maximum minimum fmod remainder hypot copysign logaddexp", two),
        (nn_refs, "celu elu gelu hardshrink hardtanh leaky_relu mish relu relu6 selu softplus softshrink glu", (x,)),
        (nn_refs, "tanhshrink", (x,)),
        (nn_refs, "huber_loss l1_loss mse_loss smooth_l1_loss pairwise_distance", (x, y)),
    ):
        for name in text.split():
            kernel = getattr(torch if where is refs else F, name)
            found[f"{where.__name__} {name}"] = (getattr(where, name), kernel, arguments)
    group = (drawn(3, 8, 20), 4, drawn(8), drawn(8, seed=1))
    found["nn group_norm"] = (nn_refs.group_norm, F.group_norm, group)
    found["nn layer_norm"] = (nn_refs.layer_norm, F.layer_norm, (x, (40,), drawn(40), drawn(40, seed=1)))
    image = drawn(1, 2, 6, 6)
    for op, arguments in {
        "silu.default": (x,),
        "hardswish.default": (x,),
        "_softmax.default": (x, -1, False),
        "addmm.default": (drawn(12, 8), x, drawn(40, 8)),
        "addcmul.default": (x, y, positive),
        "lerp.Scalar": (x, y, 0.3),
        "baddbmm.default": (drawn(2, 3, 4), drawn(2, 3, 5), drawn(2, 5, 4)),
        "binary_cross_entropy_with_logits.default": (x, y.sigmoid()),
        "native_batch_norm.default": (
            *(drawn(3, 8, 20), drawn(8), drawn(8), drawn(8), positive[0, :8]),
            True,
            0.1,
            1e-5,
        ),
        "grid_sampler_2d.default": (image, drawn(1, 5, 5, 2).tanh(), 0, 0, False),
        "upsample_bilinear2d.vec": (image, [12, 12], False, None),
        "upsample_bicubic2d.vec": (image, [12, 12], False, None),
        "im2col.default": (image, [3, 3], [1, 1], [1, 1], [1, 1]),
        "linalg_vector_norm.default": (x,),
    }.items():
        packet, overload = op.split(".")
        kernel = getattr(getattr(torch.ops.aten, packet), overload)
        if kernel in decomposition_table:
            found[f"decomposed {packet}"] = (decomposition_table[kernel], kernel, arguments)
    return found


def alarms(some: list[tuple[str, Pair]], dtypes: tuple[torch.dtype, ...]) -> list[str]:
    """Return where right code is refused."""
    found = []
    for name, (other, kernel, given) in some:
        for dtype in dtypes:
            given = tuple(t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in given)
            try:
                kernel(*given)
            except (RuntimeError, NotImplementedError):
                continue  # not in this dtype
            if not glass.matches(other, kernel, given, check_dtype=False).ok:
                found.append(f"{name} in {dtype}")
    return found


def test_some_of_torch_raises_no_alarm() -> None:
    assert alarms([*pairs().items()][::7], DTYPES) == []


@pytest.mark.slow
def test_all_of_torch_raises_no_alarm() -> None:
    assert len(pairs()) > 80
    assert alarms([*pairs().items()], DTYPES) == []
