"""Which elements of a tensor count, where a row is padded."""

from __future__ import annotations

import pytest
import torch

from glassengine.judge.cases import Case, StepInputs
from glassengine.judge.exclusions.padding import valid_mask
from glassengine.numerics.mask_values import is_mask
from glassengine.sites import Site


@pytest.fixture
def inputs() -> StepInputs:
    """Two rows of three tokens, the first padded by one on the left, and a cache of four slots."""
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    return StepInputs.first(Case("", 2, input_ids=torch.ones(2, 3, dtype=torch.long), attention_mask=mask))


def scores(dtype: torch.dtype) -> Site:
    shape = ("batch", 1, "sequence", "cache")
    axes = {"batch": 0, "sequence": 2, "cache": 3}
    name = str(dtype).removeprefix("torch.")
    return Site("a.0", "op", "a", "a", dtype=name, shape=shape, axes=axes, source=None, fingerprint="")


def test_scores_of_padding_do_not_count(inputs: StepInputs) -> None:
    found = valid_mask(scores(torch.float32), torch.zeros(2, 1, 3, 4), inputs)
    assert found is not None and found.shape == (2, 1, 3, 4)
    assert found[0, 0].tolist() == [[False] * 4, *[[False, True, True, False]] * 2]


def test_a_mask_counts_where_it_hides_padding(inputs: StepInputs) -> None:
    found = valid_mask(scores(torch.bool), torch.zeros(2, 1, 3, 4, dtype=torch.bool), inputs)
    assert found is not None
    assert found.expand(2, 1, 3, 4)[0, 0].tolist() == [[False] * 4, *[[True] * 4] * 2]


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min, -1e9, -1e4])
def test_so_does_a_mask_that_is_added(inputs: StepInputs, hidden: float) -> None:
    """A port that forgets the padding has zeros there."""
    mask = torch.zeros(2, 1, 3, 4)
    mask[0, 0, :, 0] = hidden
    found = valid_mask(scores(torch.float32), mask, inputs)
    assert found is not None
    assert found.expand(2, 1, 3, 4)[0, 0].tolist() == [[False] * 4, *[[True] * 4] * 2]


def test_masked_scores_are_no_mask() -> None:
    masked = torch.tensor([[0.5, -1e9], [0.0, -1e9]])
    assert not is_mask(masked) and not is_mask(torch.zeros(2, 2)) and not is_mask(torch.full((2, 2), -0.5))
    assert is_mask(masked.clamp(max=0)) and is_mask(torch.tensor([[0.0, -1e4]], dtype=torch.bfloat16))
