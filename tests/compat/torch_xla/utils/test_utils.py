"""`xu`: data for examples that need none of their own."""

from __future__ import annotations

from glassengine.compat.torch_xla.utils.utils import SampleGenerator


def test_a_batch_comes_again_and_again() -> None:
    generator = SampleGenerator(data="batch", sample_count=3)
    assert len(generator) == 3 and next(generator) == "batch"
    assert list(generator) == list(generator) == ["batch"] * 3
