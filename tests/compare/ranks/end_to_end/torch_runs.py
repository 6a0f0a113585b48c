"""Runs spread by what torch and transformers offer: DDP, FSDP2, DTensor plans, `tp_plan`, pipelines, checkpointing.

python torch_runs.py DIRECTORY STORE RANK WORLD [NAME...]
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import glassengine as glass
from tests.compare.ranks.end_to_end.spread_runs import Change, Run, record_all, scaled, stale

WIDTH, VOCAB, LAYERS, ROWS, LENGTH = 8, 12, 4, 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return found


class Net(nn.Module):
    """Whole, or a stage: what a stage does not have is None or absent."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed: nn.Module | None = nn.Embedding(VOCAB, WIDTH)
        self.layers: nn.ModuleDict = nn.ModuleDict({str(i): Block() for i in range(LAYERS)})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCAB, bias=False)
        self.checkpoints = False
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        if self.norm is None or self.head is None:
            return x
        found: Tensor = self.head(self.norm(x)) * 1
        return found

    def stage(self, kept: range) -> Net:
        """Return some layers, with the ends where they belong."""
        part = copy.deepcopy(self)
        for i in range(LAYERS):
            if i not in kept:
                del part.layers[str(i)]
        if 0 not in kept:
            part.embed = None
        if LAYERS - 1 not in kept:
            part.norm = part.head = None
        return part


made = torch.Generator().manual_seed(1)
IDS, LABELS = (torch.randint(0, VOCAB, (ROWS, LENGTH), generator=made) for _ in range(2))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def train(
    net: nn.Module,
    path: Path,
    part: int = 0,
    parts: int = 1,
    *,
    microbatches: int = 1,
    scale: float = 1.0,
    gradients: bool = True,
    scaled_later: bool = False,
) -> None:
    """Two steps."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with glass.record(net, path, **({"gradients": True, "optimizer": optimizer} if gradients else {})):
        for _ in range(2):
            optimizer.zero_grad()
            rows = (x.chunk(parts)[part].chunk(microbatches) for x in (IDS, LABELS))
            for ids, labels in zip(*rows, strict=True):
                (loss_of(net(ids), labels) * scale / (1 if scaled_later else microbatches)).backward()
            for parameter in net.parameters() if scaled_later else ():
                parameter.grad = parameter.grad / microbatches  # type: ignore[operator]
            optimizer.step()


def wanted(change: Change | str) -> Change:
    return change if callable(change) else lambda net: None


def ddp(of: Run, path: Path, rank: int) -> None:
    net = Net()
    net.checkpoints = of.options.get("checkpoints", False)
    of_rank = wanted(of.own) if rank == of.rank else wanted("")
    wrapped = nn.parallel.DistributedDataParallel(net)
    of_rank(net)
    if "no sync" in of.mistakes:
        with wrapped.no_sync():
            train(wrapped, path, rank, of.world)
        return
    part = 0 if of.own == "rows of rank 0" and rank == of.rank else rank
    train(wrapped, path, part, of.world, scale=0.5 if of.own == "loss scale" and rank == of.rank else 1.0)


def fsdp(of: Run, path: Path, rank: int) -> None:
    net = Net().to(of.options.get("dtype", torch.float32))
    net.checkpoints = of.options.get("checkpoints", False)
    if rank == of.rank:
        wanted(of.own)(net)
    for layer in net.layers.values():
        fully_shard(layer)
    sharded = fully_shard(net)
    if of.own == "stale shard" and rank == of.rank:
        with torch.no_grad():
            net.get_parameter("layers.2.up.weight").to_local().mul_(1.5)
    train(sharded, path, rank, of.world, scale=1 / of.world if "divided twice" in of.mistakes else 1.0)


def plan(sequence: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for layer in range(LAYERS):
        up = ColwiseParallel(input_layouts=Shard(1)) if sequence else ColwiseParallel()
        down = RowwiseParallel(output_layouts=Shard(1)) if sequence else RowwiseParallel()
        found[f"layers.{layer}.up"], found[f"layers.{layer}.down"] = up, down
        if sequence:
            found[f"layers.{layer}.norm"] = SequenceParallel()
    if sequence:
        found["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        found["norm"] = SequenceParallel()
        found["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    else:
        found["embed"] = RowwiseParallel(input_layouts=Replicate())
        found["head"] = ColwiseParallel(output_layouts=Replicate())
    return found


def tensor(of: Run, path: Path, rank: int) -> None:
    mesh = distributed.device_mesh.init_device_mesh("cpu", tuple(of.mesh.values()), mesh_dim_names=tuple(of.mesh))
    net = Net()
    if rank == of.rank:
        wanted(of.own)(net)
    spread = plan(of.options.get("sequence", False))
    if "not reduced" in of.mistakes:
        from torch.distributed.tensor import Partial

        spread["layers.1.down"] = RowwiseParallel(output_layouts=Partial())
    parallelize_module(net, mesh["tp"], spread)
    data, count = 0, 1
    if "dp" in of.mesh:
        data, count = mesh["dp"].get_local_rank(), mesh["dp"].size()
        for layer in net.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(net, mesh=mesh["dp"])
    train(net, path, data, count)


def _asked(of: Run, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if not of.options.get("gradients", True):
        return {}
    return {"gradients": True, "optimizer": optimizer, "microbatches": of.options.get("microbatches", 1)}


def pipeline(of: Run, path: Path, rank: int) -> None:
    """Each rank has one stage."""
    size = LAYERS // of.world
    part = Net().stage(range(rank * size, (rank + 1) * size))
    if rank == of.rank:
        wanted(of.own)(part)
    stage = PipelineStage(part, rank, of.world, torch.device("cpu"))
    if "boundary in bfloat16" in of.mistakes and rank == 0:
        part.register_forward_hook(lambda module, args, result: result.bfloat16().float())
    if "layer skipped" in of.mistakes and rank == 1:
        next(iter(part.layers.values())).forward = lambda x: x * 1  # type: ignore[method-assign]
    scale = 2 if "loss scale" in of.mistakes else 1
    kind: Any = getattr(schedules, f"Schedule{of.options['schedule']}")
    microbatches = of.options.get("microbatches", 4)
    schedule = kind(stage, microbatches, loss_fn=lambda logits, labels: scale * loss_of(logits, labels))
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    with glass.record(part, path, **_asked(of, optimizer)):
        for _ in range(2):
            optimizer.zero_grad()
            args = (IDS,) if rank == 0 else ()
            schedule.step(*args, **({"target": LABELS} if rank == of.world - 1 else {}))
            optimizer.step()


def stages(of: Run, path: Path, rank: int) -> None:
    """Each rank has two stages."""
    count = 2 * of.world
    is_v = of.options["schedule"] in ("ZBVZeroBubble", "DualPipeV")
    own = (rank, count - 1 - rank if is_v else rank + of.world)
    size = LAYERS // count
    parts = {i: Net().stage(range(i * size, (i + 1) * size)) for i in own}
    if rank == of.rank:
        wanted(of.own)(parts[own[1]])
    kind: Any = getattr(schedules, f"Schedule{of.options['schedule']}")
    each = [PipelineStage(part, i, count, torch.device("cpu")) for i, part in parts.items()]
    schedule = kind(each, 4, loss_fn=loss_of)
    with contextlib.ExitStack() as stack:
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts.values()]
        for (i, part), optimizer in zip(parts.items(), optimizers, strict=True):
            stack.enter_context(glass.record(part, path / f"stage{i}", **_asked(of, optimizer)))
        for _ in range(2):
            for optimizer in optimizers:
                optimizer.zero_grad()
            args = (IDS,) if 0 in own else ()
            schedule.step(*args, **({"target": LABELS} if count - 1 in own else {}))
            for optimizer in optimizers:
                optimizer.step()


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCAB, max_position_embeddings=32,
    )  # fmt: skip
    net = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.3)
    return net


def transformer(of: Run, path: Path, rank: int) -> None:
    """`tp_plan="auto"`."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    saved = path.parent / "llama-checkpoint"
    if rank == 0 and not (saved / "config.json").is_file():
        llama().save_pretrained(saved)
    net = llama()
    if of.world > 1:
        distributed.barrier()
        net = AutoModelForCausalLM.from_pretrained(saved, distributed_config=DistributedConfig(tp_plan="auto")).eval()
    if rank == of.rank:
        wanted(of.own)(net)
    with torch.no_grad(), glass.record(net, path):
        net.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, do_sample=False, pad_token_id=0)


def one(of: Run, path: Path, rank: int) -> None:
    net = Net().to(of.options.get("dtype", torch.float32))
    if rank == of.rank:
        wanted(of.own)(net)
    facts = {name: of.options[name] for name in ("microbatches", "gradients", "scaled_later") if name in of.options}
    train(net, path, **facts)


KINDS: dict[str, Callable[[Run, Path, int], None]] = {
    "one": one, "ddp": ddp, "fsdp": fsdp, "tensor": tensor, "pipeline": pipeline, "stages": stages,
    "tp_plan": transformer,
}  # fmt: skip


def _of(kind: str, baseline: str, mesh: dict[str, int], *mistakes: str, **facts: Any) -> Run:
    options = {name: facts.pop(name) for name in list(facts) if name not in Run.__dataclass_fields__}
    return Run(baseline, mesh, mistakes, options={"kind": kind, **options}, **facts)


TP2, DP2, PP2 = {"tp": 2}, {"dp": 2}, {"pp": 2}
ACT: dict[str, Any] = {"rank": 1, "own": scaled("layers.1.act"), "site": "layers.1.act", "blamed": 1}
GPIPE: dict[str, Any] = {"schedule": "GPipe", "microbatches": 1}
EARLY: dict[str, Any] = {"schedule": "1F1B", "gradients": False}
LATER: dict[str, Any] = {"microbatches": 4}
GATED = "model.layers.0.mlp.act_fn"
ONE = {
    "one": _of("one", "", {}),
    "one-4": _of("one", "", {}, microbatches=4, gradients=False),
    "one-4, gradients": _of("one", "", {}, **LATER, scaled_later=True),
    "llama": _of("tp_plan", "", {}),
    "one, bfloat16": _of("one", "", {}, dtype=torch.bfloat16),
}
UNSURE = {"fsdp2, bfloat16": _of("fsdp", "one, bfloat16", DP2, dtype=torch.bfloat16)}
RIGHT = {
    "ddp2": _of("ddp", "one", DP2),
    "ddp4": _of("ddp", "one", {"dp": 4}),
    "ddp2 checkpoints": _of("ddp", "one", DP2, checkpoints=True),
    "fsdp2": _of("fsdp", "one", DP2),
    "fsdp4": _of("fsdp", "one", {"dp": 4}),
    "fsdp2 checkpoints": _of("fsdp", "one", DP2, checkpoints=True),
    "dtensor tp2": _of("tensor", "one", TP2),
    "dtensor tp4": _of("tensor", "one", {"tp": 4}),
    "dtensor sp2": _of("tensor", "one", TP2, sequence=True),
    "dtensor dp2 x sp2": _of("tensor", "one", {"dp": 2, "tp": 2}, sequence=True),
    "tp_plan 2": _of("tp_plan", "llama", TP2),
    "gpipe": _of("pipeline", "one", PP2, **GPIPE),
    "gpipe 4": _of("pipeline", "one", {"pp": 4}, **GPIPE),
    "gpipe, microbatches": _of("pipeline", "one-4", PP2, schedule="GPipe", gradients=False),
    "1f1b, microbatches": _of("pipeline", "one-4", PP2, **EARLY),
    "gpipe, gradients": _of("pipeline", "one-4, gradients", PP2, schedule="GPipe", **LATER),
    "interleaved": _of("stages", "one-4", PP2, schedule="Interleaved1F1B", gradients=False),
    "interleaved, gradients": _of("stages", "one-4, gradients", PP2, schedule="Interleaved1F1B", **LATER),
    "zero bubble": _of("stages", "one-4", PP2, schedule="ZBVZeroBubble", gradients=False),
    "1f1b, gradients": _of("pipeline", "one-4, gradients", PP2, schedule="1F1B", **LATER),
    **{
        f"{schedule}, gradients": _of("stages", "one-4, gradients", PP2, schedule=schedule, **LATER)
        for schedule in ("LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    },
}
WRONG = {
    "ddp: a slip": _of("ddp", "one", DP2, **ACT),
    "ddp: stale": _of("ddp", "one", DP2, rank=1, own=stale("layers.2.up.weight"), site="layers.2.up", blamed=1),
    "ddp: no sync": _of("ddp", "one", DP2, "no sync", site="head.weight:grad", hint="reduction"),
    "ddp: loss scale": _of("ddp", "one", DP2, rank=1, own="loss scale", site=".:grad_out", blamed=1),
    "ddp: rows of rank 0": _of("ddp", "one", DP2, rank=1, own="rows of rank 0", site=".:in[0]", blamed=1, hint="order"),
    "fsdp: a slip": _of("fsdp", "one", DP2, **ACT),
    "fsdp: divided twice": _of("fsdp", "one", DP2, "divided twice", site="head.weight:grad", hint="average"),
    "fsdp: a slip in bfloat16": _of("fsdp", "one, bfloat16", DP2, dtype=torch.bfloat16, **ACT),
    "fsdp: stale shard": _of("fsdp", "one", DP2, rank=1, own="stale shard", site="layers.2.up"),
    "dtensor: not reduced": _of("tensor", "one", TP2, "not reduced", site="layers.1.down", hint="reduction"),
    "dtensor: a slip": _of("tensor", "one", TP2, **ACT),
    "dtensor: a slip in a mesh": _of("tensor", "one", {"dp": 2, "tp": 2}, **{**ACT, "rank": 3, "blamed": 3}),
    "tp_plan: a slip": _of("tp_plan", "llama", TP2, rank=1, own=scaled(GATED), site=GATED, blamed=1),
    "gpipe: layer skipped": _of("pipeline", "one", PP2, "layer skipped", **GPIPE, site="layers.2", blamed=1),
    "gpipe: bfloat16": _of("pipeline", "one", PP2, "boundary in bfloat16", **GPIPE, site="layers.2:in[0]", blamed=1),
    "gpipe: loss scale": _of("pipeline", "one", PP2, "loss scale", **GPIPE, site=".:grad_out", blamed=1),
    "interleaved: a slip": _of(
        "stages",
        "one-4",
        PP2,
        schedule="Interleaved1F1B",
        gradients=False,
        rank=1,
        own=scaled("layers.3.act"),
        site="layers.3.act",
        blamed=3,
    ),
    "zero bubble: a slip": _of(
        "stages",
        "one-4, gradients",
        PP2,
        schedule="InterleavedZeroBubble",
        **LATER,
        rank=1,
        own=scaled("layers.3.act"),
        site="layers.3.act",
        blamed=3,
    ),
    "1f1b: loss scale": _of(
        "pipeline", "one-4, gradients", PP2, "loss scale", schedule="1F1B", **LATER, site=".:grad_out", blamed=1
    ),
    "1f1b: stale": _of(
        "pipeline", "one-4", PP2, **EARLY, rank=1, own=stale("layers.3.up.weight"), site="layers.3.up", blamed=1
    ),
}
ALL = {**ONE, **UNSURE, **RIGHT, **WRONG}


def run(name: str, of: Run, directory: Path) -> None:
    """Record one run."""
    KINDS[of.options["kind"]](of, directory / name, distributed.get_rank() if distributed.is_initialized() else 0)


if __name__ == "__main__":
    record_all(ALL, run, *sys.argv[1:])
