"""A watch keeps memory that it gives back, and the process has it no more when the watch has ended."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from glassengine.capture.watch.memory import keep_freed


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc")
def test_memory_is_kept_and_given_back() -> None:
    end = keep_freed(1 << 30)

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
    assert keep_freed(0)() is None
