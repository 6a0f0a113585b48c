"""Logits compared as distributions, against torch.nn.functional and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import kl_div

from glassengine.numerics import logits
from glassengine.numerics.logits import compare_logits


@pytest.fixture(params=[40, 1 << 16], ids=["a row at a time", "all at once"], autouse=True)
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "BLOCK_ELEMENTS", request.param)


def sample(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_of_it_is_what_torch_computes(dtype: torch.dtype) -> None:
    b, c = sample(14, 37), (sample(14, 37) + sample(14, 37, seed=1) / 3).to(dtype)
    log_p, log_q = b.double().log_softmax(-1), c.double().log_softmax(-1)
    kl = kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    agreement = float((b.argmax(-1) == c.argmax(-1)).double().mean())
    assert compare_logits(b, c) == (pytest.approx(float(kl.mean()), rel=1e-12), pytest.approx(agreement))


def test_equal_logits_agree_and_an_offset_changes_nothing() -> None:
    b = sample(3, 50)
    for c in (b, b.double() + 100.0):
        assert compare_logits(b, c) == (pytest.approx(0, abs=1e-15), 1.0)


def test_one_planted_token() -> None:
    b = torch.zeros(5, 10)
    b[:, 3] = 4
    c = b.clone()
    c[2, 3], c[2, 7] = 0, 4
    found = compare_logits(b, c)
    assert found is not None and found[0] > 0.5 and found[1] == 0.8


def test_masked_tokens_and_rows_without_a_distribution() -> None:
    b, c = torch.tensor([[0.0, -math.inf], [0.0, 0.0], [math.nan, 0.0], [0.0, 0.0]]), torch.zeros(4, 2)
    c[3] = -math.inf
    assert compare_logits(b, c) == (pytest.approx(math.log(2) / 2), 1.0)
    # The other way round the candidate gives probability 0 to what the baseline expects.
    assert compare_logits(c, b) == (math.inf, 1.0)
    assert compare_logits(b[2:3], c[2:3]) is None
    assert compare_logits(b[:0], c[:0]) is None
