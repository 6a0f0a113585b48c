"""Ops in float64: with the arguments of others, none of which may write elsewhere; and ops that read no tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.numerics.float64 import call_in_double, target_of
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


class Windowed(nn.Module):
    """A spectrum whose window is made in each forward.

    Args:
        window: Makes it, of its length.
    """

    def __init__(self, window: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.enter, self.leave, self.window = nn.Linear(16, 16), nn.Linear(9, 4), window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.enter(x) * self.window(16))
        result: torch.Tensor = self.leave(spectrum.abs())
        return result


WINDOWS = [torch.hann_window, torch.hamming_window, torch.blackman_window, torch.bartlett_window]


@pytest.mark.parametrize("window", WINDOWS)
def test_windows_without_a_dtype_are_made_in_float64(window: Callable[..., torch.Tensor]) -> None:
    program = export_module(Windowed(window).eval(), {"x": torch.randn(2, 16)})
    node = next(node for node in program.graph.nodes if "window" in node.name)
    args, kwargs = call_in_double(node, node.args, node.kwargs)
    assert torch.equal(target_of(node)(*args, **kwargs), window(16, dtype=torch.float64))


@pytest.mark.parametrize("window", WINDOWS)
def test_a_wrong_window_is_the_first_divergence(window: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    right, wrong = Windowed(window).eval(), Windowed(partial(window, periodic=False)).eval()
    wrong.load_state_dict(right.state_dict())
    found = glass.check(right, candidate=wrong, inputs={"x": torch.randn(6, 16)})
    assert found.first_divergence is not None and "window" in found.first_divergence.site
    spectrum = [one for one in found.pairs if one.dtype == "complex64" and one.level == "candidate"]
    assert spectrum and all(one.verdict == "wrong" and one.reason is None for one in spectrum)


def test_a_right_window_by_hand_is_rounding() -> None:
    def by_hand(size: int) -> torch.Tensor:
        return 0.5 - 0.5 * torch.cos(torch.arange(size) * (2 * math.pi / size))

    torch.manual_seed(0)
    right, port = Windowed(torch.hann_window).eval(), Windowed(by_hand).eval()
    port.load_state_dict(right.state_dict())
    assert glass.check(right, candidate=port, inputs={"x": torch.randn(6, 16)}).ok
