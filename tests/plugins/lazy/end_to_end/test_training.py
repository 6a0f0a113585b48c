"""Models that train in lazy code: bit by bit as in eager code, or up to rounding by our own verdict."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import glassengine as glass
from glassengine.executable.compilation import compilations
from glassengine.numerics.verdict import Reference
from glassengine.plugins.lazy.running import settings
from glassengine.testing import models

STEPS = 20
Loss = Callable[[nn.Module, int, torch.dtype], Tensor]


def _llama_loss(model: nn.Module, step: int, dtype: torch.dtype) -> Tensor:
    ids = torch.randint(5, 60, (2, 6), generator=torch.Generator().manual_seed(step)).to(_device(model))
    return model(input_ids=ids, labels=ids, use_cache=False).loss  # type: ignore[no-any-return]


def _resnet_loss(model: nn.Module, step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randn(4, 3, 32, 32, generator=generator).to(_device(model), dtype)
    labels = torch.randint(0, 2, (4,), generator=generator).to(_device(model))
    return model(pixel_values=pixels, labels=labels).loss  # type: ignore[no-any-return]


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


MODELS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "llama": (lambda: models.llama(num_hidden_layers=2), _llama_loss),
    "resnet": (models.resnet, _resnet_loss),
}


def trained(model: nn.Module, loss_of: Loss, dtype: torch.dtype = torch.float32, lr: float = 1e-3) -> Tensor:
    """Return the losses of a training, with the model's dropout and statistics as they are in training."""
    model = copy.deepcopy(model).to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    torch.manual_seed(7)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, dtype)
        loss.backward()
        optimizer.step()
        glass.mark_step()
        losses.append(loss.detach())
    return torch.stack([loss.cpu() for loss in losses])


def compiled_in(backend: str, model: nn.Module, loss_of: Loss) -> tuple[Tensor, int]:
    """Train in lazy code, and return the losses and how many compilations that took."""
    settings.graphs.clear()
    with glass.lazy.mode(backend=backend):
        before = len(compilations())
        losses = trained(glass.lazy.module(copy.deepcopy(model)), loss_of)
        return losses, len(compilations()) - before


@pytest.mark.parametrize("name", MODELS)
def test_back_end_eager_gives_the_bits_of_eager_code(name: str) -> None:
    make, loss_of = MODELS[name]
    torch.manual_seed(0)
    model = make()
    losses, count = compiled_in("eager", model, loss_of)
    assert torch.equal(losses, trained(model, loss_of))
    assert count <= 3


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_inductor_gives_the_losses_of_eager_code_up_to_rounding(name: str) -> None:
    make, loss_of = MODELS[name]
    torch.manual_seed(0)
    model = make()
    # Rounding of the first weights stands for that of every operation: a training enlarges both alike.
    noisy = []
    for seed in range(3):
        other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
        for parameter in other.parameters():
            parameter.data *= 1 + (torch.rand(parameter.shape, generator=generator) - 0.5) * 2.0**-22
        noisy.append(trained(other, loss_of).double())
    exact = trained(model, loss_of, torch.float64)
    reference = Reference(exact, trained(model, loss_of), noisy, dtype=torch.float32, valid=None)
    losses, count = compiled_in("inductor", model, loss_of)
    assert reference.judge(losses).verdict in ("identical", "rounding")
    assert count <= 3
    # Planted: another rate of learning, by a thousandth.
    assert reference.judge(trained(model, loss_of, lr=1.001e-3)).verdict == "wrong"
