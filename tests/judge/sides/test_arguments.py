"""Ports whose forward has other arguments: what belongs to what is told by position, or by what is done with it."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from glassengine.diagnose import check
from glassengine.errors import IncomparableError
from glassengine.testing import models
from glassengine.testing.architectures import FAMILIES


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.kinds, self.linear = nn.Embedding(20, 8), nn.Embedding(3, 8), nn.Linear(8, 8)

    def run(self, ids: Tensor, kinds: Tensor, mask: Tensor) -> Tensor:
        x = self.table(ids) + self.kinds(kinds)
        scores = (x @ x.transpose(1, 2)).masked_fill(mask[:, None] == 0, -1e9)
        return self.linear(scores.softmax(-1) @ x)


class Ours(Base):
    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.run(input_ids, token_type_ids, attention_mask)


class OtherOrder(Base):
    def forward(self, pad: Tensor, x: Tensor, segments: Tensor) -> Tensor:
        return self.run(x, segments, pad)


class WithoutMask(Base):
    def forward(self, x: Tensor, segments: Tensor) -> Tensor:
        return self.run(x, segments, torch.ones_like(x))


def save(tmp_path: Path, steps: Any) -> str:
    torch.save(steps, tmp_path / "inputs.pt")
    return str(tmp_path / "inputs.pt")


def step(*, padded: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(2, 6).long()
    mask[1, 4:] = 0 if padded else 1
    kinds = torch.randint(0, 3, (2, 6), generator=generator)
    return {
        "input_ids": torch.randint(3, 20, (2, 6), generator=generator),
        "token_type_ids": kinds,
        "attention_mask": mask,
    }


def alike(port: nn.Module, baseline: nn.Module) -> nn.Module:
    port.load_state_dict(baseline.state_dict())
    return port


def test_f30_several_inputs_of_other_names_in_another_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    baseline = Ours()
    inputs = save(tmp_path, [step(padded=True)])
    result = check(baseline, candidate=alike(OtherOrder(), baseline), inputs=inputs)
    assert result.ok and result.coverage == 1.0
    wrong = alike(OtherOrder(), baseline)
    wrong.linear.weight.data[0, 0] += 0.1  # type: ignore[union-attr, operator]
    assert not check(baseline, candidate=wrong, inputs=inputs).ok


def test_f30_an_input_that_the_port_does_not_take(tmp_path: Path) -> None:
    torch.manual_seed(0)
    baseline = Ours()
    port = alike(WithoutMask(), baseline)
    with pytest.raises(IncomparableError, match="does not take all inputs"):
        check(baseline, candidate=port, inputs=save(tmp_path, [step(padded=True)]))


class Optional(Base):
    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self.run(input_ids, token_type_ids, mask)


def test_f30_a_mask_without_padding_says_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    baseline = Optional()
    port = alike(WithoutMask(), baseline)
    assert check(baseline, candidate=port, inputs=save(tmp_path, [step(padded=False)])).ok


class VeryMany(Base):
    """As wrappers of research packages are: a dozen flags before the mask."""

    def forward(
        self,
        x: Tensor,
        segments: Tensor,
        return_a: Any = None,
        return_b: Any = None,
        return_c: Any = None,
        return_d: Any = None,
        return_e: Any = None,
        return_f: Any = None,
        return_g: Any = None,
        return_h: Any = None,
        mask: Tensor | None = None,
        return_i: Any = None,
        return_j: Any = None,
    ) -> Tensor:
        return self.run(x, segments, torch.ones_like(x) if mask is None else mask)


@pytest.mark.parametrize("padded", [False, True])
def test_a_forward_of_very_many_arguments(padded: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    baseline = Ours()
    inputs = save(tmp_path, [step(padded=padded)])
    result = check(baseline, candidate=alike(VeryMany(), baseline), inputs=inputs)
    assert result.ok and result.coverage == 1.0, result.not_ok_because
    wrong = alike(VeryMany(), baseline)
    wrong.linear.weight.data[0, 0] += 0.1  # type: ignore[union-attr, operator]
    assert not check(baseline, candidate=wrong, inputs=inputs).ok


class GptPort(nn.Module):
    """A model of transformers behind a forward of the kind that tutorials have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        logits = self.model(input_ids=idx, use_cache=False).logits
        loss = None if targets is None else nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


def test_f30_a_language_model_that_takes_idx() -> None:
    result = check(models.gpt2(), candidate=GptPort(models.gpt2()), steps=0)
    assert result.ok and result.coverage > 0.9
    wrong = models.gpt2()
    wrong.transformer.h[1].mlp.c_fc.weight.data[0, 0] += 1.0
    assert not check(models.gpt2(), candidate=GptPort(wrong), steps=0).ok


def given_to(family: str, tmp_path: Path) -> str:
    ids = torch.randint(3, 60, (2, 5), generator=torch.Generator().manual_seed(0))
    inputs: dict[str, Tensor] = {"input_ids": ids}
    if family == "whisper":
        inputs = {"input_features": torch.randn(2, 16, 60), "decoder_input_ids": ids}
    return save(tmp_path, [inputs])


class Whisper(nn.Module):
    """Hands on all that the model returns, its cache among it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, mel: Tensor, tokens: Tensor) -> Any:
        return self.model(input_features=mel, decoder_input_ids=tokens)


@pytest.mark.parametrize("family", ["mamba", pytest.param("whisper", marks=pytest.mark.slow)])
def test_f29_a_reference_that_returns_a_cache_unless_it_is_told(family: str, tmp_path: Path) -> None:
    result = check(FAMILIES[family](), candidate=FAMILIES[family](), inputs=given_to(family, tmp_path))
    assert result.ok and result.coverage > 0.9, result.not_ok_because


@pytest.mark.slow
def test_f29_a_port_that_hands_on_a_cache(tmp_path: Path) -> None:
    port = Whisper(FAMILIES["whisper"]())
    result = check(FAMILIES["whisper"](), candidate=port, inputs=given_to("whisper", tmp_path))
    assert result.ok and result.coverage > 0.9, result.not_ok_because


class Cache:
    """An object of its own, as a cache is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"y": y, "cache": Cache(y)}


def test_f29_an_object_among_the_results_is_left_out(tmp_path: Path) -> None:
    baseline, port = Caching(), Caching()
    port.load_state_dict(baseline.state_dict())
    inputs = save(tmp_path, [{"x": torch.randn(2, 4)}])
    result = check(baseline, candidate=port, inputs=inputs)
    assert result.ok and result.coverage == 1.0
    port.linear.bias.data += 0.1
    assert not check(baseline, candidate=port, inputs=inputs).ok


class Tied(nn.Module):
    """One norm that two layers know by names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        for layer in self.layers:
            layer.norm = self.norm

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.step(layer, x)
        return x

    def step(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(layer.norm(x))  # type: ignore[operator]


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_f26_methods_that_were_replaced_on_an_instance(factor: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    baseline, port = Tied(), Tied()
    port.load_state_dict(baseline.state_dict())

    def step(self: Tied, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(layer.norm(x)) * factor  # type: ignore[operator]

    def linear(self: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias)

    port.step = MethodType(step, port)  # type: ignore[method-assign]
    port.forward = MethodType(Tied.forward, port)  # type: ignore[method-assign]
    for layer in port.layers:
        layer.forward = MethodType(linear, layer)
    result = check(baseline, candidate=port, inputs=save(tmp_path, [{"x": torch.randn(2, 4)}]))
    assert result.ok == (factor == 1.0)
    assert result.coverage == 1.0
    assert "candidate" in {level.name for level in result.levels}
    assert isinstance(vars(port)["forward"], MethodType) and type(port) is Tied


class OneImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class AnyImage(OneImage):
    """Takes what it does not know, too, and says what is missing itself."""

    def forward(self, pixels: Tensor | None = None, scale: float | None = None, **more: Any) -> Tensor:  # type: ignore[override]
        if pixels is None:
            raise ValueError("give pixels")
        return super().forward(pixels if scale is None else pixels * scale)


class HandsOn(nn.Module):
    """Gives what it does not know to what is inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.own = OneImage()

    def forward(self, scale: float | None = None, **more: Any) -> Tensor:
        return self.own(**more) if scale is None else self.own(**more) * scale


class Silent(OneImage):
    def forward(self, ids: Tensor | None = None, padding: Tensor | None = None, **more: Any) -> Tensor:  # type: ignore[override]
        x = self.linear(more["x"]) if ids is None else self.linear(ids)
        return x.relu() if padding is None else x.relu() * padding


@pytest.mark.parametrize("Port", [AnyImage, HandsOn, Silent])
@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_an_input_that_a_forward_of_any_arguments_has_another_name_for(
    Port: type[nn.Module], factor: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    baseline, port = OneImage(), Port()
    own = port.own if isinstance(port, HandsOn) else port
    own.load_state_dict(baseline.state_dict())
    own.linear.weight.data *= factor  # type: ignore[union-attr, operator]
    result = check(baseline, candidate=port, inputs=save(tmp_path, [{"x": torch.randn(2, 4)}]))
    assert result.ok == (factor == 1.0)
    assert result.coverage == 1.0


class Registered(OrderedDict[str, Any]):
    """What a package tells torch of, as diffusers does, without names of its entries."""


@dataclass
class Unregistered:
    pooled: Tensor
    parts: dict[str, Tensor]
    missing: Tensor | None = None


class Row:
    """Another container, of which nobody knows the names."""

    def __init__(self, *items: Tensor) -> None:
        self.items = items


pytree.register_pytree_node(
    Registered,
    lambda tree: (list(tree.values()), list(tree)),
    lambda values, names: Registered(zip(names, values, strict=True)),
)
pytree.register_pytree_node(Row, lambda tree: (list(tree.items), None), lambda items, _: Row(*items))


class Returning(nn.Module):
    def __init__(self, how: str, factor: float = 1.0) -> None:
        super().__init__()
        self.linear, self.how, self.factor = nn.Linear(4, 4), how, factor

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        z = y.tanh() * self.factor
        if self.how == "registered":
            return Registered(pooled=z, states=[y])
        if self.how == "row":
            return Row(z, y)
        if self.how == "mapping":
            return UserDict(pooled=z, states=y)
        return Unregistered(z, {"y": y})


@pytest.mark.parametrize("how", ["registered", "row", "mapping", "dataclass"])
@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_results_in_containers_whose_entries_torch_has_no_names_for(how: str, factor: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    baseline, port = Returning(how), Returning(how, factor)
    port.load_state_dict(baseline.state_dict())
    result = check(baseline, candidate=port, inputs=save(tmp_path, [{"x": torch.randn(2, 4)}]))
    assert result.ok == (factor == 1.0)
    assert result.coverage == 1.0
    assert len({found.name for found in result.results}) == 2


class Labeled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table, self.times = nn.Linear(8, 8), nn.Embedding(5, 8), nn.Linear(1, 8)

    def run(self, image: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        return self.linear(image) + self.table(labels)[:, None] + self.times(times[:, None])[:, None]


class ByNames(Labeled):
    def forward(self, image: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        return self.run(image, times, labels)


class Insists(Labeled):
    """Has a default for what it cannot do without, and more that it can."""

    def forward(
        self, x: Tensor, t: Tensor, y: Tensor | None = None, mask: Tensor | None = None, low: Tensor | None = None
    ) -> Tensor:
        assert y is not None, "give y"
        made = self.run(x, t, y)
        return made if low is None else made + low


def test_an_argument_with_a_default_that_a_forward_insists_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    baseline = ByNames()
    inputs = {"image": torch.randn(2, 3, 8), "times": torch.rand(2), "labels": torch.tensor([3, 1])}
    result = check(baseline, candidate=alike(Insists(), baseline), inputs=save(tmp_path, [inputs]))
    assert result.ok and result.coverage == 1.0
