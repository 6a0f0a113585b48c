import gguf
import numpy as np
import pytest
import torch

from glassengine.errors import UsageError
from glassengine.numerics.weight_error import judge_weight
from glassengine.plugins.serving.ggml.types import BY_NAME, READ_AS, TYPES, dequantized, q4_k, step_of


def test_blocks_are_those_of_gguf() -> None:
    for number, kind in TYPES.items():
        own = gguf.GGMLQuantizationType(number)
        assert (own.name, *gguf.GGML_QUANT_SIZES[own]) == (kind.name, kind.block, kind.block_bytes)
    assert READ_AS.keys() <= BY_NAME.keys()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_quantized_weight_is_within_its_steps(name: str) -> None:
    kind, x = BY_NAME[name], torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    data = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType(kind.number))
    found = dequantized(data.reshape(-1), (16, 64), kind)
    error = judge_weight(x, found, step_of(found, kind))
    assert not error.mistakes and 0.2 < error.rms_steps < 0.4


@pytest.mark.parametrize(("name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_floats_are_what_they_are(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5).to(dtype)
    assert torch.equal(dequantized(x.view(torch.uint8).numpy().reshape(-1), (3, 5), BY_NAME[name]), x.float())


def test_a_type_that_nobody_dequantizes_is_named() -> None:
    # Every type of the table that gguf has no code for.
    with pytest.raises(UsageError, match="does not dequantize"):
        dequantized(np.zeros(40, np.uint8), (32,), type(BY_NAME["Q8_0"])(9, "Q8_1", 32, 40))


@pytest.mark.parametrize("scale", [1.0, 1e-4, 0.0])
def test_numbers_of_q4_k_are_within_half_a_step(scale: float) -> None:
    random = np.random.default_rng(0)
    values = (random.standard_normal((3, 512)) * scale).astype(np.float32)
    values[0, :32] = np.abs(values[0, :32]) + 3 * scale  # a part without a minimum
    back = gguf.quants.dequantize(q4_k(values), gguf.GGMLQuantizationType.Q4_K)
    parts, found = values.reshape(-1, 32), back.reshape(-1, 32)
    steps = (parts.max(-1) - np.minimum(parts.min(-1), 0)) / 15
    rms = np.sqrt(np.square(found - parts).mean(-1))
    assert (rms <= 0.5 * steps + 1e-7).all()
    assert q4_k(values).shape == (3, 288) and q4_k(values).dtype == np.uint8
