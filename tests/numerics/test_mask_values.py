"""What a value that hides is, and how two recordings that hide by other values are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from glassengine.blocks.arrays import values_of
from glassengine.compare import compare
from glassengine.numerics.drift import DriftSums
from glassengine.numerics.limits import without_hidden as without_hidden_of
from glassengine.numerics.mask_values import HIDDEN, sentinel
from tests.compare.test_compare import record

HALF, SINGLE = (torch.finfo(dtype).min for dtype in (torch.float16, torch.float32))


def without_hidden(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor] | None:
    found = without_hidden_of(values_of(x), values_of(y))
    return None if found is None else [torch.from_numpy(side.array) for side in found]


def test_f44_the_least_number_of_each_dtype_hides() -> None:
    x = torch.tensor([1.0, HALF, HALF + 32, -20000.0]).half()
    y = torch.tensor([1.0, SINGLE, SINGLE, -20000.0])
    found = without_hidden(x, y)
    assert found is not None
    assert [side.tolist() for side in found] == [[1.0, 0.0, 0.0, -20000.0]] * 2
    assert without_hidden(x, torch.tensor([1.0, 2.0, 3.0, SINGLE])) is None, "another place is hidden"
    assert without_hidden(x.long(), y) is None
    assert sentinel(torch.float16, torch.float32) < 65504 and sentinel(torch.int64) == float("inf")


def test_f44_a_mask_holds_any_number_that_hides() -> None:
    x, y = torch.tensor([[0.0, -1e4], [0.0, 0.0]]), torch.tensor([[0.0, float("-inf")], [0.0, 0.0]])
    found = without_hidden(x, y)
    assert found is not None and torch.equal(*found)
    assert without_hidden(x - 1, y) is None, "scores with a mask in them, of which nobody knows where it is"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_written_to_hide_is_no_number_and_activations_are(dtype: torch.dtype) -> None:
    limit = sentinel(dtype)
    for hides in (torch.finfo(dtype).min, -1e30, float("-inf")):
        assert float(torch.tensor(hides, dtype=torch.float64).to(dtype).abs()) >= limit
    assert limit > 5e4, "float16 holds activations of half of its largest number"
    assert torch.tensor(-1e4).to(dtype) <= HIDDEN


def test_a_mistake_in_large_activations_of_float16_is_drift() -> None:
    """They were taken for a mask from a quarter of the largest number on."""
    whole = torch.full((4, 8), 2e4).half()
    sums = DriftSums()
    sums.add(whole, whole * 1.5)
    assert sums.noise > 0.2 * sums.signal > 0


@pytest.mark.parametrize(("at", "ok"), [(1, True), (2, False)])
def test_f44_recordings_that_hide_by_other_numbers(at: int, ok: bool, tmp_path: Path) -> None:
    x = torch.zeros(2, 4)
    x[:, 1] = -1e9
    scores = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    ours = record(tmp_path / "ours", {(0, "mask"): x, (0, "scores"): scores.masked_fill(x < 0, SINGLE)})
    y = torch.zeros(2, 4)
    y[:, at] = SINGLE
    theirs = record(tmp_path / "theirs", {(0, "mask"): y, (0, "scores"): scores.masked_fill(y < 0, float("-inf"))})
    assert compare(ours, theirs).ok is ok


def test_padding_of_recordings_is_counted(tmp_path: Path) -> None:
    tensors = {
        (0, ".:in.input_ids"): torch.tensor([[0, 5, 6], [7, 8, 9]]),
        (0, ".:in.attention_mask"): torch.tensor([[0, 1, 1], [1, 1, 1]]),
        (0, "states"): torch.randn(2, 3, 4),
    }
    found = compare(record(tmp_path / "x", tensors), record(tmp_path / "y", tensors))
    (padding,) = found.exemptions
    assert (padding.reason, padding.largest_site, found.num_elements) == ("padding", "states", 36)
    assert padding.num_elements >= 4
