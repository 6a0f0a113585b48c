"""Masks that hide with other numbers are no mistake, in a port and in an engine of it; one that hides less is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check
from glassengine.diagnose.hidden_slots import hides_by_numbers, with_largest
from glassengine.engine.build import build_program
from glassengine.program import export_program, load_inputs, load_model

LARGEST = torch.finfo(torch.float32).min


class Attention(nn.Module):
    """Scores with a mask that is made of the numbers of tokens, its own way."""

    def __init__(self, hidden: float, *, seen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.out = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(9, 5)
        self.hidden, self.seen = hidden, seen

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        place = torch.arange(9)
        later = place[None, :] > place[:, None] + self.seen
        mask = torch.zeros(9, 9).masked_fill(later, self.hidden) + (1 - real)[:, None, :] * max(self.hidden, LARGEST)
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return self.out(torch.softmax(scores + mask, -1))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("inputs") / "inputs.pt"
    real = torch.ones(2, 9)
    real[1, 5:] = 0
    torch.save({"x": torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1)), "real": real}, path)
    return str(path)


@pytest.mark.parametrize("hidden", [-1e4, -1e9, float("-inf"), LARGEST])
def test_any_number_that_hides_is_as_good(hidden: float, inputs: str) -> None:
    result = check(Attention(LARGEST).eval(), candidate=Attention(hidden).eval(), inputs=inputs)
    assert result.ok and result.verdict in ("identical", "rounding"), result.not_ok_because


def test_so_it_is_in_an_engine(inputs: str, tmp_path: Path) -> None:
    port = load_model(Attention(-1e9).eval())
    build_program(export_program(port, inputs=load_inputs(inputs)), tmp_path / "engine", backend="eager")
    result = check(Attention(LARGEST).eval(), candidate=tmp_path / "engine", inputs=inputs)
    assert result.ok and result.verdict in ("identical", "rounding"), result.not_ok_because


def test_a_mask_that_hides_less_is_named(inputs: str) -> None:
    result = check(Attention(LARGEST).eval(), candidate=Attention(-1e9, seen=1).eval(), inputs=inputs)
    assert not result.ok and result.first_divergence is not None
    assert result.first_divergence.site in ("./masked_fill.0", "./add.0", "./add.1")


def test_a_number_that_hides_nothing_is_wrong(inputs: str) -> None:
    result = check(Attention(LARGEST).eval(), candidate=Attention(-1.0).eval(), inputs=inputs)
    assert not result.ok


def test_two_sides_that_write_one_number_are_compared_by_it(inputs: str) -> None:
    program = export_program(load_model(Attention(-1e9).eval()), inputs=load_inputs(inputs))
    assert hides_by_numbers(program.graph)
    result = check(Attention(-1e9).eval(), candidate=Attention(-1e9).eval(), inputs=inputs)
    assert result.verdict == "identical"


def test_activations_are_left_alone(inputs: str) -> None:
    program = export_program(load_model(Attention(LARGEST).eval()), inputs=load_inputs(inputs))
    assert not hides_by_numbers(program.graph)
    values = {node.name: torch.tensor([[-2e4, 3.0]]) for node in program.graph.nodes}
    found = with_largest(program.graph, values)
    assert all(found[name] is value for name, value in values.items())
