"""Ops that are called with arguments of others: none may write where it should not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from glassengine.numerics.float64 import target_of
from glassengine.program.export.export import export_module


def test_a_weight_norm_along_another_axis_is_refused() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 5, 7)).eval()
    program = export_module(layer, {"input": torch.randn(1, 3, 9)})
    norm = target_of(next(node for node in program.graph.nodes if "_weight_norm" in node.name))
    v, g = torch.randn(5, 3, 7), torch.randn(5, 1, 1)
    torch.testing.assert_close(norm(v, g, 0), v * g / v.flatten(1).norm(dim=1)[:, None, None])
    for dim, weight in ((2, v), (0, v.transpose(0, 2))):
        with pytest.raises(ValueError, match="norms of shape"):
            norm(weight, g, dim)
