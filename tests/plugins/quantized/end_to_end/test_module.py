"""Modules quantized in memory: right ones lose what their weights cost; a wrong scale or other code is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine.diagnose import check
from glassengine.program.loading.quantized_grid import quantized_module
from glassengine.results import Comparison

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated, and still what people have


class Codes(Tensor):
    """A weight as codes and scales, as libraries of quantization have it."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Codes:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["codes", "scale"], {"act_quant_kwargs": None}

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Codes:
        return Codes(**inner)

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return self.codes.float() * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        plain = [a.dequantize() if isinstance(a, Codes) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Net(nn.Module):
    def __init__(self, slope: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 16)
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(nn.functional.leaky_relu(self.norm(self.up(x)), self.slope))
        return found


def in_codes(factor: float = 1, slope: float = 0.1) -> nn.Module:
    model = Net(slope).eval()
    for name in ("up", "down"):
        layer = getattr(model, name)
        weight = layer.weight.data
        scale = weight.abs().amax(1, keepdim=True) / 127
        codes = (weight / scale).round().to(torch.int8)
        scale = scale * (factor if name == "down" else 1)
        layer.weight = nn.Parameter(Codes(codes, scale), requires_grad=False)
    return model


def dynamic(factor: float = 1, slope: float = 0.1) -> nn.Module:
    model = Net(slope).eval()
    model.down.weight.data *= factor
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)  # type: ignore[no-any-return]


def checked(other: nn.Module, tmp_path: Path) -> Comparison:
    torch.set_num_threads(1)
    torch.save({"x": torch.randn(24, 32, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    return check(Net().eval(), candidate=other, inputs=str(tmp_path / "x.pt"))


@pytest.mark.parametrize("made", [in_codes, dynamic])
def test_a_right_quantization_is_ok_and_says_what_it_costs(made: Any, tmp_path: Path) -> None:
    found = checked(made(), tmp_path)
    assert found.ok and found.quantization is not None and not found.origins
    assert {weight.name for weight in found.quantization.weights} == {"up.weight", "down.weight"}
    assert found.drift and found.results[0].judged_by == "signal"
    assert found.quantization.method == {"in_codes": "Codes", "dynamic": "Linear"}[made.__name__]


@pytest.mark.parametrize("made", [in_codes, dynamic])
def test_a_wrong_scale_is_named_at_its_weight(made: Any, tmp_path: Path) -> None:
    found = checked(made(1.05), tmp_path)
    assert not found.ok and found.first_divergence is not None
    assert found.first_divergence.site == "down.weight:param"


@pytest.mark.parametrize("made", [in_codes, dynamic])
def test_other_code_is_not_taken_for_the_cost_of_weights(made: Any, tmp_path: Path) -> None:
    found = checked(made(slope=0.2), tmp_path)
    assert not found.ok and found.standing == "results differ"
    assert found.first_divergence is not None and "something else" in found.first_divergence.hints[0].text


class Dropping(Net):
    """The same with a dropout, which does nothing in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


def test_f48_a_quantized_module_in_training_mode_differs(tmp_path: Path) -> None:
    def quantized() -> Any:
        return torch.ao.quantization.quantize_dynamic(Dropping().eval(), {nn.Linear}, torch.qint8)

    assert checked(quantized(), tmp_path).ok
    left = quantized()
    left.drop.train()
    found = checked(left, tmp_path)
    assert (found.ok, found.standing) == (False, "results differ")
    assert found.not_ok_because == "1 module of the candidate is in training mode: drop"


def test_unquantized_weights_have_no_grid() -> None:
    assert quantized_module(Net()) is None
    held = quantized_module(in_codes())
    assert held is not None and not held.rounds_inputs
    held = quantized_module(dynamic())
    assert held is not None and held.rounds_inputs and "up.bias" in held.weights
