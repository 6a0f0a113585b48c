"""Logits compared as distributions, against torch.nn.functional and by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from glassengine.numerics import logits
from glassengine.numerics.logits import compare_logits


@pytest.fixture(params=[40, 1 << 16], ids=["a row at a time", "all at once"], autouse=True)
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits, "BLOCK_ELEMENTS", request.param)


def sample(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_all_of_it_is_what_torch_computes(dtype: torch.dtype) -> None:
    b, c = sample(2, 7, 37), (sample(2, 7, 37) + sample(2, 7, 37, seed=1) / 3).to(dtype)
    targets = torch.randint(0, 37, (2, 7))
    targets[0, :3] = logits.IGNORED
    got = compare_logits(b, c, k=4, targets=targets)
    log_p, log_q = b.double().log_softmax(-1), c.double().log_softmax(-1)
    kl = kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    assert got.mean_kl == pytest.approx(float(kl.mean()), rel=1e-12)
    assert got.max_kl == pytest.approx(float(kl.max()), rel=1e-12)
    assert got.worst_row == (int(kl.argmax()) // 7, int(kl.argmax()) % 7)
    assert got.top1_agreement == pytest.approx(float((b.argmax(-1) == c.argmax(-1)).double().mean()))
    shared = (b.topk(4).indices.unsqueeze(-1) == c.topk(4).indices.unsqueeze(-2)).any(-1)
    assert dtype == torch.bfloat16 or got.topk_agreement == pytest.approx(float(shared.double().mean()))
    for side, found in ((b, got.baseline_perplexity), (c, got.candidate_perplexity)):
        nll = cross_entropy(side.double().reshape(-1, 37), targets.reshape(-1), ignore_index=logits.IGNORED)
        assert found == pytest.approx(math.exp(float(nll)), rel=1e-12)
    assert got.perplexity_diff == got.candidate_perplexity - got.baseline_perplexity
    assert (got.num_rows, got.num_targets, got.vocab_size, got.num_undefined) == (14, 11, 37, 0)
    assert json.dumps(got.to_dict())


def test_equal_logits_agree_and_an_offset_changes_nothing() -> None:
    b = sample(3, 50)
    for c in (b, b.double() + 100.0):
        got = compare_logits(b, c)
        assert (got.top1_agreement, got.topk_agreement) == (1.0, 1.0)
        assert got.max_kl == pytest.approx(0, abs=1e-15)
    assert got.baseline_perplexity is got.perplexity_diff is None


def test_one_planted_token() -> None:
    b = torch.zeros(5, 10)
    b[:, 3] = 4
    c = b.clone()
    c[2, 3], c[2, 7] = 0, 4
    got = compare_logits(b, c, k=1)
    assert (got.top1_agreement, got.worst_row) == (0.8, (2,))
    assert got.max_kl == pytest.approx(5 * got.mean_kl)


def test_masked_tokens_and_rows_without_a_distribution() -> None:
    b, c = torch.tensor([[0.0, -math.inf], [0.0, 0.0], [math.nan, 0.0], [0.0, 0.0]]).repeat(1, 1), torch.zeros(4, 2)
    c[3] = -math.inf
    got = compare_logits(b, c, k=1, targets=torch.tensor([0, 1, 0, 0]))
    assert (got.num_rows, got.num_undefined, got.num_targets) == (4, 2, 2)
    assert got.mean_kl == pytest.approx(math.log(2) / 2)
    assert got.candidate_perplexity == pytest.approx(2.0)
    # The other way round the candidate gives probability 0 to what the baseline expects.
    away = compare_logits(c, b, k=1, targets=torch.tensor([1, 1, 0, 0]))
    assert (away.max_kl, away.worst_row, away.candidate_perplexity) == (math.inf, (0,), math.inf)
    assert away.to_dict()["max_kl"] == "inf"
    nothing = compare_logits(b[2:3], c[2:3], targets=torch.tensor([0]))
    assert (nothing.mean_kl, nothing.top1_agreement, nothing.worst_row, nothing.perplexity_diff) == (None,) * 4


def test_one_row_integers_bools_strides_and_nothing() -> None:
    one = compare_logits(torch.tensor([3, 1, 2]), torch.tensor([True, False, True]), k=9)
    assert (one.num_rows, one.k, one.worst_row, one.topk_agreement) == (1, 3, (), 1.0)
    b, c = sample(4, 6, 31), sample(4, 6, 31, seed=1)
    strided = compare_logits(b.mT.contiguous().mT, c.transpose(0, 1).contiguous().transpose(0, 1))
    plain = compare_logits(b, c)
    assert strided.mean_kl == pytest.approx(plain.mean_kl, rel=1e-12)
    assert strided.worst_row == plain.worst_row
    for shape in ((0, 5), (2, 0, 5), (0, 2, 5)):
        empty = compare_logits(torch.empty(shape), torch.empty(shape), targets=torch.empty(shape[:-1]))
        assert (empty.num_rows, empty.mean_kl, empty.perplexity_diff) == (0, None, None)


@pytest.mark.parametrize(
    ("message", "shapes", "options"),
    [
        ("shapes differ", ((2, 3), (2, 4)), {}),
        ("no logits", ((), ()), {}),
        ("no logits", ((2, 0), (2, 0)), {}),
        ("targets have shape", ((2, 3), (2, 3)), {"targets": torch.zeros(3)}),
        ("outside of the vocabulary of 3", ((2, 3), (2, 3)), {"targets": torch.tensor([0, 3])}),
        ("k must be", ((2, 3), (2, 3)), {"k": 0}),
    ],
)
def test_invalid_logits_are_refused(
    message: str, shapes: tuple[tuple[int, ...], ...], options: dict[str, object]
) -> None:
    with pytest.raises(ValueError, match=message):
        compare_logits(*(torch.zeros(shape) for shape in shapes), **options)
