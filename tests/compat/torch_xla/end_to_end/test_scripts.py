"""Training scripts in the style of PyTorch/XLA's own examples: the same losses as on the CPU, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import glassengine.compat.torch_xla.core.xla_model as xm
import glassengine.compat.torch_xla.debug.metrics as met
import glassengine.compat.torch_xla.distributed.parallel_loader as pl
import glassengine.compat.torch_xla.distributed.xla_multiprocessing as xmp
import glassengine.compat.torch_xla.test.test_utils as test_utils
from glassengine.compat import torch_xla


class Mnist(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, kernel_size=5)
        self.norm = nn.BatchNorm2d(4)
        self.out = nn.Linear(4 * 12 * 12, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.relu(nn.functional.max_pool2d(self.norm(self.conv(x)), 2))
        x = nn.functional.dropout(x, 0.2, self.training)
        return nn.functional.log_softmax(self.out(torch.flatten(x, 1)), dim=1)


def mnist(index: int, lazy: bool, losses: list[float]) -> float:
    """Train and test; only what chooses the device differs."""
    torch.manual_seed(1)
    device = xm.xla_device() if lazy else torch.device("cpu")
    data = torch.utils.data.TensorDataset(torch.randn(48, 1, 28, 28), torch.randint(10, (48,)))
    loader: Iterable[Any] = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model = Mnist().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * xm.xrt_world_size(), momentum=0.5)
    loss_fn = nn.NLLLoss()

    def update(step: int, loss: torch.Tensor, tracker: xm.RateTracker) -> None:
        losses.append(loss.item())
        test_utils.print_training_update(device, step, loss.item(), tracker.rate(), tracker.global_rate())

    def train() -> None:
        tracker = xm.RateTracker()
        model.train()
        for step, (images, target) in enumerate(pl.MpDeviceLoader(loader, device) if lazy else loader):
            optimizer.zero_grad()
            loss = loss_fn(model(images), target)
            loss.backward()
            xm.optimizer_step(optimizer)
            tracker.add(len(images))
            if lazy:
                xm.add_step_closure(update, args=(step, loss, tracker))
            else:
                losses.append(loss.item())

    def test() -> float:
        model.eval()
        correct, total = torch.zeros((), dtype=torch.int64, device=device), 0
        for images, target in pl.MpDeviceLoader(loader, device) if lazy else loader:
            pred = model(images).max(1, keepdim=True)[1]
            correct += pred.eq(target.view_as(pred)).sum()
            total += images.size()[0]
        return float(xm.mesh_reduce("accuracy", 100.0 * correct.item() / total, lambda found: sum(found) / len(found)))

    for _ in range(2):
        train()
        accuracy = test()
    return accuracy


def test_mnist(device: torch.device, counters: Callable[[str], int]) -> None:
    plain: list[float] = []
    lazy: list[float] = []
    assert xmp.spawn(mnist, args=(False, plain)) == xmp.spawn(mnist, args=(True, lazy), nprocs=1)
    assert lazy == plain and len(lazy) == 12
    # Two graphs of training, two of tests: the first of each has nothing to read of a step before it.
    assert counters("UncachedCompile") <= 5 and counters("MarkStep") == 24
    # The accuracy of each epoch alone is read outside of a step.
    assert counters("TensorRead") <= 2 and met.executed_fallback_ops() == []


def test_a_loop_with_transformers(device: torch.device, counters: Callable[[str], int]) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip

    def batches() -> list[BatchEncoding]:
        torch.manual_seed(2)
        ids = torch.randint(1, 32, (6, 2, 8))
        mask = torch.ones_like(ids)
        mask[:, 0, :3] = 0
        return [
            BatchEncoding({"input_ids": one, "attention_mask": m, "labels": one})
            for one, m in zip(ids, mask, strict=True)
        ]

    def run(where: torch.device | None) -> list[float]:
        torch.manual_seed(0)
        model: nn.Module = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
        model = model if where is None else xmp.MpModelWrapper(model).to(where)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = get_linear_schedule_with_warmup(optimizer, 2, 6)
        losses: list[torch.Tensor] = []
        for batch in batches() if where is None else pl.ParallelLoader(batches(), [where]).per_device_loader(where):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            xm.optimizer_step(optimizer)
            schedule.step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses]

    assert run(torch_xla.device()) == run(None)
    assert counters("UncachedCompile") <= 3
    # Transformers itself asks whether a mask hides anything, twice for each batch.
    reads = [name for name in met.counter_names() if name.startswith("TensorRead::")]
    assert counters("TensorRead") == 2 * 6 and all("masking_utils.py" in name for name in reads)


@pytest.mark.slow
def test_nothing_is_printed_when_a_program_ends_with_lazy_tensors() -> None:
    """Planted: tensors that live until the modules of the process are gone."""
    code = (
        "import torch, glassengine.compat.torch_xla.core.xla_model as xm\n"
        "value = torch.ones(2).to(xm.xla_device())\n"
        "pending = value + 1\n"
        "class Keeps: pass\n"
        "Keeps.kept = Keeps; Keeps.value = value; torch.kept = [value, pending]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("name", ["xla", "xla:0"])
def test_the_type_of_the_device_is_ours(device: torch.device, name: str) -> None:
    """As documented among the limits: code that names the type has to be changed."""
    assert torch_xla.device().type == "lazy"
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones(1).to(name)
