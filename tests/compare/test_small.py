"""Tensors below the absolute part of a tolerance, and values of a coarser dtype than that of their file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.compare.compare import compare
from glassengine.results import Comparison


def _compared(tmp_path: Path, left: dict[str, object], right: dict[str, object], **options: Any) -> Comparison:
    torch.save(left, tmp_path / "a.pt")
    torch.save(right, tmp_path / "b.pt")
    return compare(tmp_path / "a.pt", tmp_path / "b.pt", **options)


@pytest.mark.parametrize("size", [1e-7, 1e-20, 1e-3])
@pytest.mark.parametrize("kind", ["zeros", "three times", "negative", "other", "1 % more"])
def test_f54_small_tensors_are_not_acquitted_as_a_whole(tmp_path: Path, size: float, kind: str) -> None:
    x = torch.randn(40, 7, generator=torch.Generator().manual_seed(0)) * size
    wrong = {"zeros": x * 0, "three times": x * 3, "negative": -x, "other": x.flip(0), "1 % more": x * 1.01}
    result = _compared(tmp_path, {"layer.grad": x}, {"layer.grad": wrong[kind]})
    assert not result.ok and result.pairs[0].verdict in ("suspicious", "wrong")
    # Rounding of it is rounding, at any size.
    noise = 1 + 1e-6 * torch.randn(40, 7, generator=torch.Generator().manual_seed(1))
    assert _compared(tmp_path, {"layer.grad": x}, {"layer.grad": x * noise}).pairs[0].verdict == "rounding"


def test_f54_what_is_rounding_alone_beside_larger_tensors_is_no_alarm(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x, y = (torch.randn(64, generator=generator) * size for size in (1e-2, 1e-10, 1e-10))
    result = _compared(tmp_path, {"k.weight": weight, "k.bias": x}, {"k.weight": weight, "k.bias": y})
    assert result.ok and {pair.verdict for pair in result.pairs} == {"identical", "suspicious"}
    # Beside nothing of its module it is not known, and that is said.
    result = _compared(tmp_path, {"w": weight, "bias": x}, {"w": weight, "bias": y})
    assert result.too_little and "below the absolute tolerance" in str(result.not_ok_because)
    # Small elements beside large ones, and denormal numbers beside zeros.
    both = torch.cat([weight, x]), torch.cat([weight, y])
    assert _compared(tmp_path, {"w": both[0]}, {"w": both[1]}).pairs[0].verdict == "rounding"
    assert _compared(tmp_path, {"w": x * 0}, {"w": torch.full((64,), 1e-40)}).pairs[0].verdict == "rounding"


def test_f54_numbers_beside_tensors_are_compared(tmp_path: Path) -> None:
    x = torch.ones(3)
    left = {"x": x, "loss": 1.0, "step": 7, "done": True}
    assert _compared(tmp_path, left, dict(left)).counts["compared"] == 4
    for name, value in (("loss", 1.5), ("step", 8), ("done", False)):
        assert not _compared(tmp_path, left, {**left, name: value}).ok
    as_items = {"loss": torch.tensor(0.1).item()}
    assert _compared(tmp_path, as_items, {"loss": 0.1}).ok, "a number of float32 is judged as one"


def test_f62_values_of_a_coarse_dtype_in_a_file_of_float32(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator) for _ in range(2))
    for dtype in (torch.bfloat16, torch.float16):
        x = (a.to(dtype) @ b.to(dtype)).float()
        y = (a[:, :32].to(dtype) @ b[:32].to(dtype) + a[:, 32:].to(dtype) @ b[32:].to(dtype)).float()
        result = _compared(tmp_path, {"logits": x, "p": x.log_softmax(-1)}, {"logits": y, "p": y.log_softmax(-1)})
        assert result.ok and {pair.verdict for pair in result.pairs} == {"suspicious"}
        assert not _compared(tmp_path, {"logits": x}, {"logits": x * 1.01}).ok
        assert not _compared(tmp_path, {"logits": x}, {"logits": y.roll(1, 0)}).ok
    # Of what was computed from such alone nothing shows it: the flag is named.
    result = _compared(tmp_path, {"p": x.log_softmax(-1)}, {"p": y.log_softmax(-1)})
    assert not result.ok and "--rtol 1.6e-2" in str(result.pairs[0].reason)
    # Ones and halves are numbers of any dtype.
    mask = (a > 0).float()
    assert _compared(tmp_path, {"m": mask}, {"m": mask * 1.01}).pairs[0].verdict == "wrong"


def test_nothing_finite_is_said(tmp_path: Path) -> None:
    nan = torch.full((4, 4), float("nan"))
    result = _compared(tmp_path, {"x": nan}, {"x": nan})
    assert result.pairs[0].verdict == "identical" and "no value is finite" in str(result.pairs[0].reason)
    assert _compared(tmp_path, {"x": torch.ones(4)}, {"x": torch.ones(4)}).pairs[0].reason is None
