"""Q4_K as it is written here, and as gguf reads it."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from glassengine.plugins.serving.ggml.quantize import q4_k


@pytest.mark.parametrize("scale", [1.0, 1e-4, 0.0])
def test_numbers_are_within_half_a_step(scale: float) -> None:
    random = np.random.default_rng(0)
    values = (random.standard_normal((3, 512)) * scale).astype(np.float32)
    values[0, :32] = np.abs(values[0, :32]) + 3 * scale  # a part without a minimum
    back = gguf.quants.dequantize(q4_k(values), gguf.GGMLQuantizationType.Q4_K)
    parts, found = values.reshape(-1, 32), back.reshape(-1, 32)
    steps = (parts.max(-1) - np.minimum(parts.min(-1), 0)) / 15
    rms = np.sqrt(np.square(found - parts).mean(-1))
    assert (rms <= 0.5 * steps + 1e-7).all()
    assert q4_k(values).shape == (3, 288) and q4_k(values).dtype == np.uint8
