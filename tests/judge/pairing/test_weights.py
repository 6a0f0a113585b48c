"""Weights of two sides by name, and what a check says of them."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.diagnose import check
from glassengine.judge.pairing import weights
from glassengine.judge.pairing.weights import compare_weights

BASE = {"a.weight": torch.randn(6, 6, generator=torch.Generator().manual_seed(0)), "b": torch.arange(4)}


def different(**changes: torch.Tensor | None) -> tuple[str, ...]:
    candidate = {name: changes.get(name.replace(".", "_"), tensor) for name, tensor in BASE.items()}
    return compare_weights(BASE, {name: t for name, t in candidate.items() if t is not None}).different


def test_copies_casts_transposes_and_roundings_are_the_same() -> None:
    weight = BASE["a.weight"]
    for same in (weight.clone(), weight.bfloat16(), weight.T, weight.double(), weight * (1 + 2.0**-23)):
        assert different(a_weight=same) == ()


def test_one_element_another_shape_and_integers_count() -> None:
    changed = BASE["a.weight"].clone()
    changed[2, 3] *= 1.001
    assert different(a_weight=changed) == ("a.weight",)
    assert different(a_weight=torch.zeros(6, 5)) == ("a.weight",)
    assert different(b=torch.arange(4) + 1) == ("b",)
    assert different(a_weight=torch.full((6, 6), torch.nan)) == ("a.weight",)


def test_weights_of_one_side_alone_are_listed() -> None:
    found = compare_weights(BASE, {"b": BASE["b"], "c": torch.zeros(1)})
    assert (found.compared, found.only_baseline, found.only_candidate) == (1, ("a.weight",), ("c",))


def test_a_weight_that_no_prompt_reaches_is_suspicious(llama: nn.Module, token_ids: str) -> None:
    candidate: Any = copy.deepcopy(llama)
    with torch.no_grad():
        candidate.model.embed_tokens.weight[1] *= 2
    result = check(llama, candidate=candidate, inputs=token_ids, steps=0)
    assert result.ok and result.verdict == "suspicious" and result.first_divergence is None
    assert result.weights is not None and result.weights.different == ("model.embed_tokens.weight",)
    assert result.weights.compared > 10
    strict = check(llama, candidate=candidate, inputs=token_ids, steps=0, fail_on="suspicious")
    assert not strict.ok and strict.not_ok_because == "weights differ"


class Named(nn.Module):
    """Two layers, a norm and a tied head; `order` renames the layers, so that names coincide by chance."""

    def __init__(self, order: tuple[str, str] = ("a", "b"), tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.embed = nn.Embedding(12, 8)
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        for name, layer in zip(order, layers, strict=True):
            setattr(self, name, layer)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight if tied else nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for name in self.order:
            x = torch.tanh(getattr(self, name)(x))
        return self.head(x)


def checked(candidate: nn.Module, tmp_path: Path) -> Any:
    torch.save({"ids": torch.tensor([[1, 2, 3, 4]])}, tmp_path / "ids.pt")
    return check(Named().eval(), candidate=candidate.eval(), inputs=str(tmp_path / "ids.pt"))


def test_f34_names_that_coincide_by_chance_are_no_difference(tmp_path: Path) -> None:
    result = checked(Named(("b", "a")), tmp_path)
    assert result.weights.different == () and result.weights.compared == 5


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.a.weight.copy_(m.a.weight.view(2, 4, 8).transpose(0, 1).reshape(8, 8)), "interleaved halves"),
        (lambda m: m.a.weight.copy_(m.b.weight), "holds the weight of b.weight"),
        (lambda m: m.a.weight.copy_(m.a.weight.T.clone()), "transposed"),
        (lambda m: m.a.bias.zero_(), "a.bias is zero"),
        (lambda m: m.a.weight.mul_(1.5), "scaled by 1.5"),
        (lambda m: m.a.weight.view(-1)[3:5].add_(1), "differs in 2 of 64 elements"),
    ],
    ids=["rows", "another", "transposed", "bias", "scaled", "elements"],
)
def test_f34_the_weight_of_a_pair_says_how_it_differs(change: Any, says: str, tmp_path: Path) -> None:
    candidate = Named(("a", "b"))
    with torch.no_grad():
        change(candidate)
    result = checked(candidate, tmp_path)
    assert not result.ok and len(result.weights.different) == 1 and says in result.weights.how[0]
    assert result.first_divergence.hints[0].score == 1.0


def test_f34_a_head_that_is_tied_in_the_baseline_only(tmp_path: Path) -> None:
    candidate = Named(tied=False)
    assert checked(candidate, tmp_path).weights.different == ()
    with torch.no_grad():
        candidate.head.weight.mul_(-0.3).add_(0.1)
    result = checked(candidate, tmp_path)
    assert not result.ok and result.weights.how == (
        "head.weight: tied to embed.weight in the baseline only, and not its values",
    )


class Normed(nn.Module):
    """A convolution and a batch norm, which the exporter to ONNX folds into its weights."""

    def __init__(self, epsilon: float = 1e-5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, eps=epsilon)
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.02, 0.1)  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)))


def test_weights_that_a_norm_was_folded_into_are_judged_by_what_they_make(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    torch.save({"x": x}, tmp_path / "x.pt")
    torch.onnx.export(Normed().eval(), (x,), tmp_path / "folded.onnx", dynamo=True, input_names=["x"], verbose=False)
    given = {"candidate": tmp_path / "folded.onnx", "inputs": str(tmp_path / "x.pt")}
    right = check(Normed().eval(), fail_on="suspicious", **given)
    assert right.ok and right.weights is not None and right.weights.different == ()
    assert not check(Normed(epsilon=1e-3).eval(), **given).ok


def test_weights_that_are_nan_on_both_sides_are_equal() -> None:
    nan, number = torch.tensor([math.nan, 1.0]), torch.tensor([2.0, 1.0])
    assert weights.is_equal(nan, nan.clone())
    assert not weights.is_equal(nan, number)


class Two(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.ModuleDict({"fc": nn.Linear(8, 8)}) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer["fc"](x))  # type: ignore[index]
        return x


class Stacked(nn.Module):
    """The same with one tensor for all layers; both read the weight of the first."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([layers[0]["fc"].weight.detach()] * 2))
        self.bias = nn.Parameter(torch.stack([layer["fc"].bias.detach() for layer in layers]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(2):
            x = torch.tanh(x @ self.weight[number].T + self.bias[number])
        return x


def test_the_weight_of_another_layer_has_the_name_of_that_layer(tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 8)}, tmp_path / "x.pt")
    found = check(Two().eval(), candidate=Stacked(Two().layers).eval(), inputs=str(tmp_path / "x.pt"))
    assert found.first_divergence.hints[0].text == "layers.0.fc.weight instead of fc.weight"
