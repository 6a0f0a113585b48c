"""A watch keeps memory that it gives back, and the process has it no more when the watch has ended."""

from __future__ import annotations

import math
import platform
import resource

import pytest
import torch
from torch import Tensor

from glassengine.capture.recent_steps import Column, DeviceNorms, StepBuffer, StepItem, retain_freed_memory
from glassengine.recording.layout.tensors import copied_norm, norm_of


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_memory_is_kept_and_given_back() -> None:
    end = retain_freed_memory(1 << 30)

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        several = [torch.ones(1 << 20) for _ in range(16)]
        del several
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    first = faults()
    assert min(faults() for _ in range(3)) <= first // 2 + 100
    end()
    assert faults() > 100, "what was free is with the system again"


def test_a_watch_without_memory_keeps_none() -> None:
    assert retain_freed_memory(0)() is None


def item_of(tensor: Tensor) -> StepItem:
    column = Column("a", 0, None, {}, copies=False)
    return StepItem(column, tensor.dtype, tensor.shape, tensor.detach(), tensor._version)


def test_norms_in_bulk_are_those_of_each() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(3, 5, generator=generator).to(dtype) for dtype in (torch.float32, torch.bfloat16) * 3]
    tensors += [torch.empty(0), torch.full((4,), 1e30), torch.zeros(3), torch.randn(4, 4, generator=generator).t()]
    bad = torch.tensor([1.0, math.nan, math.inf, 2.0])
    changed = torch.ones(4)
    norms = DeviceNorms()
    items = [item_of(tensor) for tensor in (*tensors, bad, changed)]
    for item, tensor in zip(items, (*tensors, bad, changed), strict=True):
        norms.add(item, tensor)
    number = norms.add_number(torch.tensor(math.nan))
    changed.add_(1)
    assert norms.end()
    norms.finish()
    for item, tensor in zip(items, tensors, strict=False):
        assert item.norm == pytest.approx(float(tensor.double().norm()), rel=1e-6) and item.num_nonfinite == 0
    assert items[-2].norm == pytest.approx(math.sqrt(5)) and items[-2].num_nonfinite == 2
    assert math.isnan(items[-1].norm), "written to before it was measured"
    assert math.isnan(number.norm)


def test_a_copy_and_its_norm_in_one_way() -> None:
    source = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(source)
    assert copied_norm(target, source) == norm_of(source)[0] and torch.equal(target, source)
    assert copied_norm(torch.empty(3), torch.tensor([1.0, math.nan, 2.0])) is None
    assert copied_norm(torch.empty(4, 3), torch.randn(3, 4).t()) is None


def test_a_small_view_does_not_hold_what_is_large() -> None:
    ring = StepBuffer(1 << 20, 2)
    data = torch.randn(1 << 20)
    item, _ = ring.take(0, Column("a", 0, None, {}, copies=False), data[:10], data.data_ptr())
    assert item.tensor is None and item.copy is not None and item.nbytes == 40
    data.zero_()
    values = item.values()
    assert values is not None and values.abs().sum() > 0
