"""The quick pass over a step: what it proves is what `compare` says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glassengine.compare.compare import compare
from glassengine.diagnose.paired_steps import LiveStep, quick_verdict

METADATA = {"class": "a.B", "dtype": "float32"}


def _step(tensor: Tensor) -> LiveStep:
    return LiveStep("side", dict(METADATA), 0, {"a": tensor, "b": torch.arange(3)})


CHANGES = {
    "relative": lambda x, size: x * (1 + size * torch.randn_like(x)),
    "scaled": lambda x, size: x * (1 + size),
    "absolute": lambda x, size: x + size * torch.randn_like(x),
    "one element": lambda x, size: x + torch.nn.functional.one_hot(torch.tensor(5), x.numel()).view(x.shape) * size,
    "not a number": lambda x, size: torch.where(x > 2, torch.nan, x),
    "infinite": lambda x, size: torch.where(x > 2, torch.inf, x) * (1 + size),
    "zero": lambda x, size: torch.where(x.abs() < size, 0.0, x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"rtol": 1e-4}, {"atol": 1e-3, "rtol": 0.0}])
def test_what_the_quick_pass_proves_is_what_compare_says(dtype: torch.dtype, options: dict[str, float]) -> None:
    torch.manual_seed(0)
    num_proven = 0
    for scale in (1e-30, 1e-7, 1e-3, 1.0, 1e4):
        x = (torch.randn(24, 16, dtype=torch.float64) * scale).to(dtype)
        for change in CHANGES.values():
            for size in (1e-9, 1e-7, 1e-6, 3e-6, 1e-5, 1e-4, 1e-3, 1.5e-2, 3e-2):
                left, right = _step(x), _step(change(x.double(), size).to(dtype))
                known = quick_verdict(left, right, options)
                if known is not None:
                    found = compare(left, right, **options)
                    assert found.ok
                    assert found.verdict in ("identical", known)
                    num_proven += 1
    assert num_proven > 60


def test_rounding_of_a_model_takes_no_comparison() -> None:
    x = torch.randn(64, 64)
    assert quick_verdict(_step(x), _step(x.clone()), {}) == "identical"
    assert quick_verdict(_step(x), _step(x * (1 + 2e-7)), {}) == "rounding"
    assert quick_verdict(_step(x), _step(x * 1.001), {}) is None
    assert quick_verdict(_step(x), _step(x.double()), {}) is None
    assert quick_verdict(_step(x), _step(x[:32]), {}) is None
