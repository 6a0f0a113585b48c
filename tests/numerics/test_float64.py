"""Ops in float64: with the arguments of others, none of which may write elsewhere; and ops that read no tensor."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.numerics.float64 import in_double, target_of
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


class Made(nn.Module):
    """A spectrum of values that are multiplied by what each forward makes.

    Args:
        make: Returns it, given the values.
    """

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.leave, self.make = nn.Linear(16, 16), nn.Linear(9, 4), make

    def forward(self, x: Tensor) -> Tensor:
        entered = self.enter(x)
        result: Tensor = self.leave(torch.fft.rfft(entered * self.make(entered)).abs())
        return result


DEFAULT_DTYPE: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "hann_window": (lambda x: torch.hann_window(16), lambda x: torch.hann_window(16, periodic=False)),
    "blackman_window": (lambda x: torch.blackman_window(16), lambda x: torch.blackman_window(16, periodic=False)),
    "mul": (lambda x: torch.arange(16) * 0.1, lambda x: torch.arange(16) * 0.101),
    "div": (lambda x: torch.arange(16) / 16, lambda x: torch.arange(16) / 15),
    "rsub": (lambda x: 1.5 - (x > 0).long(), lambda x: 1.4 - (x > 0).long()),
    "sin": (lambda x: torch.arange(16).sin(), lambda x: torch.arange(16).cos()),
    "where": (lambda x: torch.where(x > 0, 1.3, 0.7), lambda x: torch.where(x > 0, 1.3, 0.71)),
}
"""Op -> what makes a tensor of the default dtype, right and wrong."""


@pytest.mark.parametrize("name", DEFAULT_DTYPE)
def test_tensors_of_the_default_dtype_are_made_in_float64(name: str) -> None:
    program = export_module(Made(DEFAULT_DTYPE[name][0]).eval(), {"x": torch.randn(2, 16)})
    nodes = [node for node in program.graph.nodes if node.op == "call_function" and name in node.name]
    wrapped = [node for node in nodes if in_double(node, target_of(node)) is not target_of(node)]
    assert wrapped and torch.get_default_dtype() is torch.float32
    if name == "hann_window":
        made = in_double(wrapped[0], target_of(wrapped[0]))(*wrapped[0].args, **wrapped[0].kwargs)
        assert torch.equal(made, torch.hann_window(16, dtype=torch.float64))


@pytest.mark.parametrize("name", DEFAULT_DTYPE)
def test_a_wrong_tensor_of_the_default_dtype_is_the_first_divergence(name: str) -> None:
    torch.manual_seed(0)
    right, wrong = (Made(make).eval() for make in DEFAULT_DTYPE[name])
    wrong.load_state_dict(right.state_dict())
    found = glass.check(right, candidate=wrong, inputs={"x": torch.randn(6, 16)})
    assert found.first_divergence is not None and name in found.first_divergence.site
    judged = {one.site: one for one in found.pairs if one.level == "candidate"}
    assert judged[found.first_divergence.site].verdict == "wrong"
    spectrum = next(one for one in judged.values() if one.dtype == "complex64")
    assert spectrum.verdict == "wrong" and spectrum.reason is None


def test_a_right_window_by_hand_is_rounding() -> None:
    def by_hand(x: Tensor) -> Tensor:
        return 0.5 - 0.5 * torch.cos(torch.arange(16) * (2 * math.pi / 16))

    torch.manual_seed(0)
    right, port = Made(DEFAULT_DTYPE["hann_window"][0]).eval(), Made(by_hand).eval()
    port.load_state_dict(right.state_dict())
    assert glass.check(right, candidate=port, inputs={"x": torch.randn(6, 16)}).ok
