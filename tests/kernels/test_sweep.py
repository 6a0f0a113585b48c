"""`glass.testing.sweep`: sizes, values and layouts that show mistakes, and what the failures share."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import glassengine as glass
from glassengine.errors import UsageError
from glassengine.results.kernels import Sweep
from tests.kernels.corpus import right, wrong


def softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def kind(found: Sweep) -> str:
    return found.mistakes[0].kind


def test_right_kernels_are_right_everywhere() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    found = glass.testing.assert_sweep(right.wide(right.exp2_softmax), softmax, "B S", dtypes=dtypes)
    assert found.num_cases > 100 and all("S = 0" in case for case in found.skipped)

    def norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), w, b)

    sizes = {"S": (1, 24, 33, 100)}
    assert glass.testing.sweep(right.wide(right.two_pass_norm), norm, "B S, S, S", sizes=sizes, dtypes=dtypes).ok
    assert glass.testing.sweep(right.flash, right.attention, "B H S 16, B H S 16, B H S 16", layouts=["contiguous"]).ok


def test_a_tail_is_described_by_its_sizes() -> None:
    found = glass.testing.sweep(wrong.block_softmax, softmax, "B S", values=["ordinary"], layouts=["contiguous"])
    assert not found.ok and found.when == "S % 32 != 0" and kind(found) == "tail"
    assert found.smallest is not None and found.smallest.shapes == ((3, 1),)


def test_overflow_needs_large_values() -> None:
    found = glass.testing.sweep(lambda x: x.exp() / x.exp().sum(-1, keepdim=True), softmax, "B S")
    assert not found.ok and kind(found) == "overflow" and found.when is not None and "values of 100" in found.when


def test_reads_beyond_the_inputs_and_strides_are_named() -> None:
    def beyond(x: Tensor) -> Tensor:
        last = x.storage_offset() + x.numel()
        has_more = x.untyped_storage().nbytes() > last * x.element_size()
        return x * 2 + (x.as_strided((1,), (1,), last) * 0 if has_more else 0)

    found = glass.testing.sweep(beyond, lambda x: x * 2, "B S", values=["ordinary"], sizes={"S": (8, 9)})
    assert not found.ok and kind(found) == "out of bounds"

    def packed(x: Tensor) -> Tensor:
        strides = torch.empty(x.shape).stride()
        return torch.as_strided(x, x.shape, strides, x.storage_offset()) * 2

    found = glass.testing.sweep(packed, lambda x: x * 2, "B S", values=["ordinary"], sizes={"S": (8, 9)})
    assert not found.ok and kind(found) == "layout"


def test_repeats_and_rows_alone() -> None:
    calls: list[int] = []

    def drifts(x: Tensor) -> Tensor:
        calls.append(0)
        return (x * 3 + len(calls) * 2.0**-23 * x).sum(-1)

    def of_batch(x: Tensor) -> Tensor:
        return x.sum(-1) * (1.0 if len(x) > 1 else 1 + 2.0**-23)

    def total(x: Tensor) -> Tensor:
        return x.sum(-1)

    plain = {"values": ["ordinary"], "layouts": ["contiguous"], "sizes": {"S": (100,)}}
    assert glass.testing.sweep(of_batch, total, "B S", **plain).ok  # type: ignore[arg-type]
    assert not glass.testing.sweep(of_batch, total, "B S", batch_invariant=True, **plain).ok  # type: ignore[arg-type]
    assert not glass.testing.sweep(drifts, lambda x: (x * 3).sum(-1), "B S", repeats=True, **plain).ok  # type: ignore[arg-type]


def test_what_raises_and_what_is_unknown() -> None:
    def picky(x: Tensor) -> Tensor:
        if x.shape[-1] % 16:
            raise ValueError("not a multiple of 16")
        return x * 2

    found = glass.testing.sweep(picky, lambda x: x * 2, "B S", values=["ordinary"], layouts=["contiguous"])
    assert found.when == "S % 16 != 0" and "raises" in {mistake.kind for mistake in found.mistakes}
    with pytest.raises(AssertionError, match="not a multiple of 16"):
        glass.testing.assert_sweep(picky, lambda x: x * 2, "B S", values=["ordinary"], layouts=["contiguous"])
    with pytest.raises(UsageError, match="unknown name"):
        glass.testing.sweep(picky, picky, "B S", values=["odd"])
    with pytest.raises(UsageError, match="no size"):
        glass.testing.sweep(picky, picky, "B *")
    with pytest.raises(UsageError, match="none of the inputs"):
        glass.testing.sweep(picky, lambda x: x.missing, "B S")


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(inputs=glass.testing.kernel_inputs("B S", dtypes=(torch.float32, torch.bfloat16)))
def test_a_strategy_draws_inputs(inputs: list[Tensor]) -> None:
    glass.assert_matches(right.wide(right.exp2_softmax), softmax, inputs)
