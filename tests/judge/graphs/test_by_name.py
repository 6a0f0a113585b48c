"""Which ops of two programs stand in the same place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from glassengine.judge.graphs.by_name import difference, pair_sites
from glassengine.program import Program, export_program, load_model
from glassengine.program.onnx.operators.function import OnnxFunction


class Sums(nn.Module):
    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.compute(a, b)


def exported(compute: Callable[[Tensor, Tensor], Tensor]) -> Program:
    inputs = {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}
    return export_program(load_model(Sums(compute)), inputs=[inputs])


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        pytest.param(
            lambda a, b: (a + b) + b,
            lambda a, b: (a - b) + b,
            {"add.0": "sub.0", "add.1": "add.0"},
            id="the first of two like ops became another one",
        ),
        pytest.param(
            lambda a, b: ((a + b) + b).tanh(),
            lambda a, b: (a.tanh() + b) + b,
            {"add.0": "add.0", "tanh.0": "add.1"},
            id="another order is no replacement, but for the results",
        ),
    ],
)
def test_an_op_that_was_replaced_shifts_no_name(
    ours: Callable[[Tensor, Tensor], Tensor], theirs: Callable[[Tensor, Tensor], Tensor], expected: dict[str, str]
) -> None:
    pairs, _, _ = pair_sites(exported(ours), exported(theirs))
    found = {pair.baseline.name.partition("/")[2]: pair.candidate.name.partition("/")[2] for pair in pairs}
    assert {name: found.get(name) for name in expected} == expected


def test_arguments_of_a_function_of_ours_are_told_by_name() -> None:
    """The ops of an ONNX file have no schema."""

    def normalized(x: Tensor, eps: float) -> Tensor:
        return x / (x.square().mean() + eps).sqrt()

    graph, target = torch.fx.Graph(), OnnxFunction(normalized, "rms_norm")
    x = graph.placeholder("x")
    ours, theirs = (graph.call_function(target, (x, eps)) for eps in (1e-5, 1e-2))
    assert difference(ours, theirs) == "eps: 1e-05 here, 0.01 in the candidate"
