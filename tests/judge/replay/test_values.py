"""Values as a candidate's kernel reads them."""

from __future__ import annotations

import torch
from torch import nn

from glassengine.judge.replay.values import Values
from glassengine.numerics.activations import READERS
from glassengine.numerics.float64 import FLOAT32_SUMS
from glassengine.program.export.export import export_module
from glassengine.testing import models


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x)
        return found


def test_only_what_is_near_a_tie_gives_room() -> None:
    model = models.drawn(Product)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    x[0, 0], x[0, 1], x[1, 40] = 127.0, 2.5, -300.0
    x[1, 41] = 300.0 / 127 * 0.5
    program = export_module(model, {"x": x})
    node = next(node for node in program.graph.nodes if "linear" in str(node.target))
    values = Values(
        program,
        compiled=True,
        dtype=None,
        wide_operands="thin products",
        accumulation=FLOAT32_SUMS,
        operands={node.name: READERS["Q8_0"]},
    )
    values.take({"x": x}, {})
    args, _ = values.arguments(node)
    read, room = values.as_read(node, args)
    assert room is not None and room[1].shape[-1] < 8, "most inputs are far from a tie"
    whole = READERS["Q8_0"](x).slack.double() @ model.layer.weight.double().abs().T  # type: ignore[union-attr, operator]
    assert whole[:2].amax(-1).gt(0).all()
    torch.testing.assert_close(torch.nn.functional.linear(*room), whole)
    assert torch.equal(read[0], READERS["Q8_0"](x).values)
