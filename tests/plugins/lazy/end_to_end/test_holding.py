"""Every way in which training code holds tensors gives the bits of eager code."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import glassengine as glass

Way = Callable[[torch.device], Any]
WAYS: dict[str, Way] = {}


def way(function: Way) -> Way:
    WAYS[function.__name__] = function
    return function


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(10, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 5)
    )


def loss_of(model: nn.Module, where: torch.device, seed: int = 0) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(seed)
    given, wanted = torch.randn(4, 10, generator=numbers), torch.randint(0, 5, (4,), generator=numbers)
    return nn.functional.cross_entropy(model(given.to(where)), wanted.to(where))


def training(
    where: torch.device, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> Any:
    model = net().to(where)
    optimizer = make(model.parameters(), **options)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(loss_of(model, where, step))
        losses[-1].backward()
        optimizer.step()
        glass.mark_step()
    return losses, model.state_dict(), optimizer.state_dict()["state"]


@way
def copies(where: torch.device) -> Any:
    model = net().to(where)
    twin = copy.deepcopy(model)
    loss_of(twin, where).backward()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(parameter.grad)  # type: ignore[arg-type]
    third = copy.deepcopy(twin)
    return model.state_dict(), twin.state_dict(), [parameter.grad is None for parameter in third.parameters()]


@way
def files(where: torch.device) -> Any:
    model = net().to(where)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, where).backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, map_location=where)
    other = net().to(where)
    again = torch.optim.AdamW(other.parameters())
    other.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    loss_of(other, where, 1).backward()
    again.step()
    return other.state_dict(), again.state_dict()["state"]


@way
def norms_of_gradients(where: torch.device) -> Any:
    model = net().to(where)
    loss_of(model, where).backward()
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach) for foreach in (True, False, None)]
    return norms, [parameter.grad for parameter in model.parameters()]


@way
def fused(where: torch.device) -> Any:
    return training(where, torch.optim.AdamW, fused=True), training(where, torch.optim.SGD, fused=True)


@way
def lists(where: torch.device) -> Any:
    return training(where, torch.optim.AdamW, foreach=True), training(where, torch.optim.RAdam, foreach=True)


@way
def rate_in_a_tensor(where: torch.device) -> Any:
    return training(where, torch.optim.AdamW, lr=torch.tensor(0.01))


@way
def scaled_gradients(where: torch.device) -> Any:
    model = net().to(where)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(where.type, init_scale=2.0**16, growth_interval=2)  # type: ignore[attr-defined]
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast(where.type, dtype=torch.float16):
            loss = loss_of(model, where, step) * (1e36 if step == 1 else 1)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, model.state_dict()


@way
def accumulated_and_computed_again(where: torch.device) -> Any:
    model = net().to(where)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        for reentrant in (True, False):
            given = torch.ones(4, 10).to(where).requires_grad_()
            checkpoint(model, given, use_reentrant=reentrant).square().sum().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            glass.mark_step()
    return model.state_dict()


@way
def averages(where: torch.device) -> Any:
    model = net().to(where)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, where, step).backward()
        optimizer.step()
        average.update_parameters(model)
    return average.state_dict()


@way
def recurrent_layers(where: torch.device) -> Any:
    torch.manual_seed(0)
    layer = nn.LSTM(10, 6, 2, batch_first=True, bidirectional=True).to(where)
    given = torch.linspace(-1, 1, 210).view(3, 7, 10).to(where)
    result, (hidden, _) = layer(given)
    (result.sum() + hidden.square().sum()).backward()
    packed = nn.utils.rnn.pack_padded_sequence(given, torch.tensor([7, 5, 2]), batch_first=True)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(layer.eval()(packed)[0], batch_first=True)
    return result, padded, lengths, [parameter.grad for parameter in layer.parameters()]


@way
def counts_of_integers(where: torch.device) -> Any:
    experts = torch.tensor([0, 2, 2, 3]).to(where)
    kind = torch.float32 if where.type == "cpu" else torch.int32  # as mixtures of experts ask the device
    return torch.histc(experts.to(kind), bins=4, min=0, max=3).int()


@way
def threads(where: torch.device) -> Any:
    models = [net().eval() for _ in range(3)]

    def run(number: int) -> None:
        model = models[number].to(where)
        for _ in range(3):
            model.zero_grad()
            loss = loss_of(model, where, number)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
            loss.item()

    started = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in started:
        thread.start()
        if where.type == "cpu":
            thread.join()
    for thread in started:
        thread.join()
    return [model.state_dict() for model in models]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return [plain(one) for one in value.values()]
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def require_equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            require_equal(one, other)
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", WAYS)
def test_bits_are_those_of_eager_code(device: torch.device, name: str) -> None:
    made = []
    for where in (torch.device("cpu"), device):
        torch.manual_seed(7)
        made.append(plain(WAYS[name](where)))
    require_equal(*made)


def test_a_parameter_is_shown_as_one(device: torch.device) -> None:
    shown = repr(nn.Parameter(torch.ones(2).to(device)))
    assert shown == "Parameter containing:\ntensor([1., 1.], device='lazy:0', requires_grad=True)"


def test_reading_in_a_long_program_does_not_compute_all_of_it_again(device: torch.device) -> None:
    """Code without steps: what other tensors hold is kept when a large graph runs for one of them."""
    value = torch.ones(2).to(device)
    for _ in range(400):
        value = value + 1
    other = value * 2
    assert value.sum().item() == 802.0
    assert glass.lazy.text(other).count("aten.") == 1
