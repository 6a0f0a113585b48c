"""Untouched models on their default engines, in two dtypes: no false alarm. The bundled one with twenty prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from glassengine.diagnose import check
from glassengine.results import Comparison
from glassengine.testing import models
from glassengine.testing.checkpoints import VOCAB_SIZE, save_checkpoint

PROMPTS = """The value of an expression is
If no exception is raised,
A class definition defines
The "try" statement specifies exception handlers
When a function is called
In the following example
Assignment statements are used to
The "import" statement
A list display is
For example, the expression
Names refer to objects.
Python 3
Note that
The operator
x
Changed in version 3.5:
If the object is mutable, then its
A generator expression yields a new generator object. It consists of
Raise an exception
See also: The standard type hierarchy
"""


def agrees(result: Comparison, number: int) -> None:
    """Assert that so many prompts and a padded batch agree, by a floor and by bounds that say something."""
    assert result.ok, result.not_ok_because
    assert result.verdict == "rounding" and not result.origins
    assert len({pair.case for pair in result.pairs}) == number + 1
    assert result.coverage == 1.0
    by_floor = [pair.noise_ratio or 0.0 for pair in result.pairs if pair.judged_by == "noise floor"]
    assert 0.1 < max(by_floor) < 4.0, "neither a vacuous floor nor a suspicious tensor"
    # Of an op alone, the bound is asked for where the floor is exceeded.
    replayed = [pair for pair in result.pairs if pair.judged_by == "reverse replay"]
    assert len(replayed) > len(by_floor)
    assert max((pair.noise_ratio or 0.0) for pair in replayed) > 0.5
    assert all(
        (pair.noise_ratio or 0.0) <= 2.0 or (pair.bound_ratio is not None and pair.bound_ratio < 0.8)
        for pair in replayed
    )


def prompts_of(number: int, directory: Path) -> str:
    path = directory / "prompts.txt"
    path.write_text("".join(PROMPTS.splitlines(keepends=True)[:number]))
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "number"), [("bfloat16", 2), ("float32", 20), ("bfloat16", 20)])
def test_prompts_agree(dtype: str, number: int, root: Path, tmp_path: Path) -> None:
    inputs = prompts_of(number, tmp_path)
    agrees(check(root / "examples" / "tiny-llama", backend="inductor", dtype=dtype, inputs=inputs), number)


@pytest.mark.slow
def test_prompts_of_a_tiny_model_agree_in_half_precision(tmp_path: Path) -> None:
    """The same with random weights and one layer, which takes a fifth of the time."""
    model = save_checkpoint(models.llama(vocab_size=VOCAB_SIZE, num_hidden_layers=1), tmp_path / "tiny")
    agrees(check(model, backend="inductor", dtype="bfloat16", inputs=prompts_of(2, tmp_path), steps=1), 2)


class Block(nn.Module):
    """A norm and two products, of which the second is added: x [B, 6, 16] -> [B, 6, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


@pytest.mark.slow
def test_a_block_agrees_in_half_precision(tmp_path: Path) -> None:
    """The quick relative: a norm and products, on the engine with every output and on the other."""
    torch.manual_seed(0)
    save_file({"x": torch.randn(2, 6, 16).bfloat16()}, tmp_path / "inputs.safetensors")
    result = check(Block(), backend="inductor", dtype="bfloat16", inputs=str(tmp_path / "inputs.safetensors"))
    assert result.ok and result.verdict == "rounding" and result.coverage == 1.0 and not result.origins
    assert {pair.judged_by for pair in result.pairs} >= {"noise floor", "reverse replay"}
