"""Inputs that are made up for plain modules: found by trying, told apart by what the forward does with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine.errors import UsageError
from glassengine.program import example_inputs
from glassengine.program.inputs.modules import module_inputs
from glassengine.testing.architectures import FAMILIES
from glassengine.testing.models import ENCODER, IMAGE_ENCODER, from_config
from tests.corpus.mistakes.input_mutations import unseen


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(30, 8), nn.Embedding(16, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids) + self.places(torch.arange(ids.shape[1])))


class Masked(Positions):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        return self.layer(x, src_key_padding_mask=mask == 0) * mask[..., None]


class TwoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items, self.head = nn.Embedding(7, 4), nn.Embedding(50, 4), nn.Linear(8, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.head(torch.cat([self.users(user), self.items(item)], -1))


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.time = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1), nn.Linear(4, 8)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None].to(x.dtype) * torch.tensor([0.01, 0.1, 1.0, 2.0])
        return self.last(torch.relu(self.first(x) + self.time(angles.sin())[..., None, None]))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


class Sound(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv1d(1, 4, 64, stride=16), nn.ReLU(), nn.Conv1d(4, 4, 8, stride=4))


class Image(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.Flatten(2), nn.Softmax(-1)
        )


class Tabular(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(12, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 2))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(20, 8, mode="sum"), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.bag(ids)) + ids.to(torch.float32)[:, :4].cumsum(-1)


MODULES: tuple[Callable[[], nn.Module], ...] = (
    Positions,
    Masked,
    TwoTables,
    Diffusion,
    Recurrent,
    Sound,
    Image,
    Tabular,
    Bags,
)


def ready(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    module = make().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def run(module: nn.Module) -> Callable[[dict[str, Any]], Any]:
    def call(step: dict[str, Any]) -> Any:
        with torch.no_grad():
            return module(**step)

    return call


@pytest.mark.parametrize("make", MODULES)
def test_f3_inputs_of_a_plain_module_show_what_a_port_does_to_them(make: Callable[[], nn.Module]) -> None:
    module = ready(make)
    steps = module_inputs(module, make.__name__)
    missed = unseen(run(module), steps)
    # The sum of a bag has no order.
    assert [one for one in missed if make is not Bags or "axis 1" not in one] == []
    assert steps.origin == "made up" and set(steps.recipes) == set(steps[0])


def test_f3_tables_of_two_sizes_bound_the_ids_of_each() -> None:
    recipes = module_inputs(ready(TwoTables), "two tables").recipes
    assert "below 7" in recipes["user"] and "below 50" in recipes["item"]


class Nested(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"] + batch["y"]


def test_f3_what_cannot_be_made_up_is_told_with_a_factory_to_fill_in() -> None:
    with pytest.raises(UsageError, match="give inputs with --inputs") as raised:
        module_inputs(Nested(), "nested")
    assert "'batch':" in str(raised.value)


_SOUND = {"conv_dim": [8, 8], "conv_stride": [5, 2], "conv_kernel": [10, 3]}
_GROUPS = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}

TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    **{name: FAMILIES[name] for name in ("bert", "t5", "bart", "whisper", "vit", "resnet")},
    "hubert": lambda: from_config("HubertModel", "HubertConfig", {**ENCODER, **_SOUND, **_GROUPS}),
    "clip": lambda: from_config("CLIPVisionModel", "CLIPVisionConfig", {**IMAGE_ENCODER, "projection_dim": 16}),
    "distilbert": lambda: from_config(
        "DistilBertModel",
        "DistilBertConfig",
        {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 2, "vocab_size": 64, "max_position_embeddings": 32},
    ),
    "roberta": lambda: from_config(
        "RobertaModel", "RobertaConfig", {**ENCODER, "vocab_size": 64, "max_position_embeddings": 40}
    ),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "bert" else pytest.mark.slow) for n in TRANSFORMERS])
def test_f3_inputs_of_models_of_transformers_show_what_a_port_does_to_them(name: str) -> None:
    module = TRANSFORMERS[name]().eval()
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)

    def results(step: dict[str, Any]) -> Any:
        with torch.no_grad():
            found = module(**step)
        return [value for value in found.values() if isinstance(value, Tensor)]

    assert unseen(results, example_inputs(module)) == []
