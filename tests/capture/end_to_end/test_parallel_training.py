"""Training in four processes, as torch spreads it: recorded by each, put together, judged against one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from glassengine.compare import compare
from tests import children

pytest.importorskip("torch.distributed.tensor.parallel")

SCRIPT = """
import sys, torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
import glassengine as glass

path, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 8)
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(8)
        self.head, self.checkpoints = nn.Linear(8, 12, bias=False), False
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.4)
    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        logits = self.head(self.norm(x))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

made = torch.Generator().manual_seed(1)
ids, labels = (torch.randint(0, 12, (4, 6), generator=made) for _ in range(2))

def train(net, name, part, parts):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with glass.record(net, f"{path}/{name}", gradients=True, optimizer=optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            net(input_ids=ids.chunk(parts)[part], labels=labels.chunk(parts)[part])["loss"].backward()
            optimizer.step()

def slip(net):
    # In rank 3 alone, inside of a layer.
    if rank == 3:
        net.layers[1].act.register_forward_hook(lambda module, args, result: result * 1.01)
    return net

if rank < 0:
    train(Net(), "one", 0, 1)
    sys.exit()

distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
mesh = distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
data = mesh["data"].get_local_rank()
for name, change in (("right", lambda net: net), ("slip", slip)):
    train(nn.parallel.DistributedDataParallel(change(Net())), f"ddp-{name}", rank, 4)

    net = change(Net())
    net.checkpoints = True
    for layer in net.layers:
        fully_shard(layer)
    train(fully_shard(net), f"fsdp-{name}", rank, 4)

    plan = {}
    for layer in range(2):
        plan[f"layers.{layer}.norm"] = SequenceParallel()
        plan[f"layers.{layer}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"layers.{layer}.down"] = RowwiseParallel(output_layouts=Shard(1))
    plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan["norm"] = SequenceParallel()
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    net = parallelize_module(change(Net()), mesh["tensor"], plan)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh["data"])
    train(fully_shard(net, mesh=mesh["data"]), f"mesh-{name}", data, 2)
distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    script = path / "train.py"
    script.write_text(SCRIPT)
    children.run_ranks([str(script), str(path), str(path / "store"), str(rank)] for rank in range(-1, 4))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "mesh"])
def test_f10_f12_training_in_parallel(kind: str, recordings: Path) -> None:
    result = compare(recordings / "one", recordings / f"{kind}-right")
    assert (result.ok, result.coverage) == (True, 1.0), result.first_divergence
    found = compare(recordings / "one", recordings / f"{kind}-slip").first_divergence
    assert found is not None and (found.step, found.site, found.rank) == (0, "layers.1.act", 3)
    found = compare(recordings / f"{kind}-right", recordings / f"{kind}-slip").first_divergence
    assert found is not None and (found.step, found.site, found.rank) == (0, "layers.1.act", 3)
