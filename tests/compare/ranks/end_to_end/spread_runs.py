"""Runs of `spread_model` in several processes, right ones and ones with a planted mistake, each recorded by `glass`.

python spread_runs.py DIRECTORY STORE RANK WORLD [NAME...]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

import glassengine as glass
from tests.compare.ranks.end_to_end.spread_model import Net, Place, batch, share

Change = Callable[[nn.Module], None]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        baseline: The run in one process to judge it against.
        mesh: Dimension -> size.
        mistakes: Of all processes.
        rank: The process that has `own` alone.
        own: A mistake of that process, or what it does to its model.
        site: Where the mistake is; None of a right run.
        blamed: The rank that is to be named; None where all have it wrong.
        hint: Kind of the first hint; None where there need not be one.
    """

    baseline: str
    mesh: dict[str, int]
    mistakes: tuple[str, ...] = ()
    rank: int = -1
    own: str | Change = ""
    site: str | None = None
    blamed: int | None = None
    hint: str | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def world(self) -> int:
        """Number of processes."""
        size = 1
        for one in self.mesh.values():
            size *= one
        return size


def scaled(path: str, factor: float = 1.05) -> Change:
    """A module of this process gives something else."""

    def change(net: nn.Module) -> None:
        net.get_submodule(path).register_forward_hook(lambda module, args, result: result * factor)

    return change


def stale(path: str) -> Change:
    """A weight of this process is of another time."""

    def change(net: nn.Module) -> None:
        with torch.no_grad():
            net.get_parameter(path).add_(0.05 * torch.randn(net.get_parameter(path).shape))

    return change


def epsilon(path: str) -> Change:
    def change(net: nn.Module) -> None:
        net.get_submodule(path).eps = 1e-2  # type: ignore[assignment]

    return change


def coarse(path: str) -> Change:
    """A module of this process computes in bfloat16."""

    def change(net: nn.Module) -> None:
        module = net.get_submodule(path)
        original = module.forward

        def forward(x: Tensor) -> Tensor:
            found: Tensor = original(x.bfloat16().float())
            return found.bfloat16().float()

        module.forward = forward  # type: ignore[method-assign]

    return change


def reseeded(net: nn.Module) -> None:
    """This process draws other numbers."""
    torch.manual_seed(77)


def train(net: nn.Module, place: Place, path: Path, changes: dict[str, Any]) -> None:
    """Two steps; gradients are put together by hand."""
    wrong = place.wrong
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3 if wrong("other rate") else 0.1)
    count = place.of("dp")[1] * place.of("cp")[1]
    with glass.record(net, path, gradients=True, optimizer=optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            loss = net(**share(place, batch()))["loss"]
            if wrong("loss scale"):
                loss = loss / 2
            loss.backward()
            for name, parameter in net.named_parameters():
                if parameter.grad is None:
                    continue
                for dim in ("dp", "cp"):
                    if place.of(dim)[1] > 1 and not wrong("gradients not exchanged"):
                        distributed.all_reduce(parameter.grad, group=place.group(dim))
                if count > 1 and not wrong("gradients added up"):
                    parameter.grad /= count
                is_shared = "norm" in name or name.endswith(("o_proj.bias", "down.bias"))
                if place.sequence and is_shared and not wrong("norms not exchanged"):
                    distributed.all_reduce(parameter.grad, group=place.group("tp"))
            if not wrong("step left out"):
                optimizer.step()


def infer(net: nn.Module, place: Place, path: Path) -> None:
    """Two forwards."""
    with torch.no_grad(), glass.record(net, path):
        for _ in range(2):
            net(**share(place, batch()))


def run(name: str, of: Run, path: Path) -> None:
    """Record one run in this process."""
    mesh, rank = None, 0
    if of.world > 1:
        rank = distributed.get_rank()
        mesh = distributed.device_mesh.init_device_mesh("cpu", tuple(of.mesh.values()), mesh_dim_names=tuple(of.mesh))
    mistakes = {*of.mistakes, *([of.own] if isinstance(of.own, str) and rank == of.rank else [])}
    options = dict(of.options)
    is_training = options.pop("training", False)
    place = Place(mesh, mistakes=frozenset(mistakes - {""}), **options)
    net = Net(place)
    torch.manual_seed(5)
    if callable(of.own) and rank == of.rank:
        of.own(net)
    if is_training:
        train(net, place, path / name, {})
    else:
        infer(net.eval(), place, path / name)


TP2 = {"tp": 2}
TRAIN = {"training": True}

RIGHT: dict[str, Run] = {
    **{
        f"{name}{suffix}": Run(f"{baseline}{suffix}", mesh, options={**options, **extra})
        for suffix, extra in (("", {}), ("-train", TRAIN))
        for name, baseline, mesh, options in (
            ("tp2", "one", TP2, {}),
            ("tp2sp", "one", TP2, {"sequence": True}),
            ("tp2fused", "one-fused", TP2, {"fused": True}),
            ("dp2", "one", {"dp": 2}, {}),
            ("cp2", "one", {"cp": 2}, {}),
            ("cp2zigzag", "one", {"cp": 2}, {"zigzag": True}),
            ("ep2", "one-experts", {"ep": 2}, {"experts": True}),
            ("dp2tp2", "one", {"dp": 2, "tp": 2}, {}),
            ("tp2dp2", "one", {"tp": 2, "dp": 2}, {}),
            ("cp2tp2sp", "one", {"cp": 2, "tp": 2}, {"sequence": True}),
            ("dp2cp2", "one", {"dp": 2, "cp": 2}, {"zigzag": True}),
            ("ep4", "one-experts", {"ep": 4}, {"experts": True}),
            ("dp2ep2", "one-experts", {"dp": 2, "ep": 2}, {"experts": True}),
            ("dp4", "one", {"dp": 4}, {}),
        )
    },
    "tp2 masked outside": Run("one", TP2, options={"outside": "zero"}),
    "dp2tp2 masked outside": Run("one", {"dp": 2, "tp": 2}, options={"outside": "zero"}),
    "tp2 masked outside, cut off": Run("one", TP2, options={"outside": "ends"}),
    "tp2dropout-train": Run("one-dropout-train", TP2, options={"dropout": 0.3, **TRAIN}),
}
ONE: dict[str, Run] = {
    "one": Run("", {}),
    "one-train": Run("", {}, options=TRAIN),
    "one-fused": Run("", {}, options={"fused": True}),
    "one-fused-train": Run("", {}, options={"fused": True, **TRAIN}),
    "one-experts": Run("", {}, options={"experts": True}),
    "one-experts-train": Run("", {}, options={"experts": True, **TRAIN}),
    "one-dropout-train": Run("", {}, options={"dropout": 0.3, **TRAIN}),
}
EXPERTS = {"experts": True}
SEQUENCE = {"sequence": True}
WRONG: dict[str, Run] = {
    "no all-reduce": Run("one", TP2, ("no all-reduce 1.down",), site="layers.1.mlp.down", hint="reduction"),
    "no all-reduce, tp x dp": Run(
        "one", {"dp": 2, "tp": 2}, ("no all-reduce 0.o_proj",), site="layers.0.attn.o_proj", hint="reduction"
    ),
    "double all-reduce": Run(
        "one", TP2, ("double all-reduce 0.o_proj",), site="layers.0.attn.o_proj", hint="reduction"
    ),
    "bias on each rank": Run("one", TP2, ("bias on each rank 1.o_proj",), site="layers.1.attn.o_proj", hint="bias"),
    "wrong shard": Run("one", TP2, ("wrong shard 1.up",), site="layers.1.mlp.up", hint="order"),
    "wrong shard of rows": Run("one", TP2, ("wrong shard 0.down",), site="layers.0.mlp.down"),
    "fused cut through": Run(
        "one-fused", TP2, ("fused cut through",), site="layers.0.mlp.act:in[0]", options={"fused": True}
    ),
    "kv head off by one": Run("one", TP2, ("kv head off by one",), site="layers.0.attn.k_proj", blamed=1),
    "no all-reduce of embedding": Run("one", TP2, ("no all-reduce embed",), site="embed", hint="reduction"),
    "ids of others not masked": Run("one", TP2, ("ids of others not masked",), site="embed"),
    "table starts elsewhere": Run("one", TP2, ("table starts elsewhere",), site="embed"),
    "ids off by one, masked outside": Run(
        "one", TP2, rank=1, own="ids off by one", site="embed:in[0]", options={"outside": "zero"}
    ),
    "rows of others not masked, outside": Run(
        "one", TP2, ("rows of others not masked",), site="layers.0:in[0]", options={"outside": "zero"}
    ),
    "rows not added up, outside": Run("one", TP2, ("rows not added up",), site="embed", options={"outside": "zero"}),
    "a slip behind a mask outside": Run(
        "one",
        TP2,
        rank=1,
        own=scaled("layers.1.mlp.act"),
        site="layers.1.mlp.act",
        blamed=1,
        options={"outside": "ends"},
    ),
    "logits in reverse": Run("one", TP2, ("logits gathered in reverse",), site=".:out.logits", hint="order"),
    "stale replica": Run("one", TP2, rank=1, own=stale("layers.1.norm2.weight"), site="layers.1.norm2", blamed=1),
    "stale shard": Run("one", TP2, rank=1, own=stale("layers.1.mlp.up.weight"), site="layers.1.mlp.up", blamed=1),
    "another epsilon": Run("one", TP2, rank=0, own=epsilon("layers.0.norm2"), site="layers.0.norm2", blamed=0),
    "another dtype": Run("one", TP2, rank=1, own=coarse("layers.0.mlp.act"), site="layers.0.mlp.act", blamed=1),
    "another seed": Run(
        "one-dropout-train",
        TP2,
        rank=1,
        own=reseeded,
        site="layers.0.dropout",
        blamed=1,
        options={"dropout": 0.3, **TRAIN},
    ),
    "no all-reduce in backward": Run(
        "one-train", TP2, ("no all-reduce in backward 1.up",), site="layers.1.norm2:grad_out", options=TRAIN
    ),
    "norms not exchanged": Run(
        "one-train", TP2, ("norms not exchanged",), site="norm.weight:grad", options={**SEQUENCE, **TRAIN}
    ),
    "wrong shard, sequence": Run("one", TP2, ("wrong shard 1.up",), site="layers.1.mlp.up", options=SEQUENCE),
    "a slip under sequence parallel": Run(
        "one", TP2, rank=1, own=scaled("layers.0.mlp.act"), site="layers.0.mlp.act", blamed=1, options=SEQUENCE
    ),
    "positions of another rank": Run(
        "one", {"cp": 2}, ("positions of another rank",), site="layers.0.attn.rotary:in[1]", blamed=1, hint="order"
    ),
    "keys stay at home": Run("one", {"cp": 2}, ("keys stay at home",), site="layers.0.attn.o_proj:in[0]", blamed=1),
    "zigzag masked as if in order": Run(
        "one", {"cp": 2}, ("masks as if in order",), site="layers.0.attn.o_proj:in[0]", options={"zigzag": True}
    ),
    "expert map off by one": Run(
        "one-experts", {"ep": 2}, ("expert map off by one",), site="layers.0.mlp", options=EXPERTS
    ),
    "experts exchanged": Run(
        "one-experts", {"ep": 2}, ("experts exchanged",), site="layers.0.mlp.experts.0", options=EXPERTS
    ),
    "experts not combined": Run(
        "one-experts", {"ep": 2}, ("experts not combined",), site="layers.0.mlp", hint="reduction", options=EXPERTS
    ),
    "an expert of one rank": Run(
        "one-experts",
        {"ep": 4},
        rank=2,
        own=scaled("layers.1.mlp.experts.0"),
        site="layers.1.mlp.experts.2",
        blamed=2,
        options=EXPERTS,
    ),
    "same rows": Run("one", {"dp": 2}, ("same rows",), site=".:in.input_ids", blamed=1, hint="order"),
    "gradients not exchanged": Run(
        "one-train", {"dp": 2}, ("gradients not exchanged",), site="head.bias:grad", hint="reduction", options=TRAIN
    ),
    "gradients added up": Run(
        "one-train", {"dp": 2}, ("gradients added up",), site="embed.weight:param", hint="average", options=TRAIN
    ),
    "loss scale of a rank": Run(
        "one-train", {"dp": 4}, rank=2, own="loss scale", site=".:grad_out.loss", blamed=2, options=TRAIN
    ),
    "step left out": Run(
        "one-train", {"dp": 2}, rank=1, own="step left out", site="embed", blamed=1, hint="rank", options=TRAIN
    ),
    "another rate": Run(
        "one-train", {"dp": 2}, rank=1, own="other rate", site="embed.weight:param", blamed=1, options=TRAIN
    ),
    "parameters not broadcast": Run(
        "one-train",
        {"dp": 2},
        rank=1,
        own=stale("layers.0.mlp.up.weight"),
        site="layers.0.mlp.up",
        blamed=1,
        options=TRAIN,
    ),
    "a slip in a mesh": Run(
        "one", {"dp": 2, "tp": 2}, rank=3, own=scaled("layers.1.mlp.act"), site="layers.1.mlp.act", blamed=3
    ),
    "a layer left out by a data rank": Run(
        "one", {"dp": 2}, rank=1, own="layer skipped", site="layers.1.norm1:in[0]", blamed=1, hint="rank"
    ),
}
PAIRS = {
    "tp2|dp2": None,
    "dp2|tp2": None,
    "tp2|tp2sp": None,
    "cp2zigzag|cp2": None,
    "dp2tp2|tp2dp2": None,
    "tp2-train|dp2-train": None,
    "dp2-train|dp4-train": None,
    "cp2tp2sp-train|dp2-train": None,
    "dp2cp2|cp2zigzag": None,
    "dp2tp2-train|tp2-train": None,
    "ep2|ep4": None,
    "dp2|no all-reduce": ("layers.1.mlp.down", None),
    "dp2|kv head off by one": ("layers.0.attn.k_proj", 1),
    "dp2tp2|stale shard": ("layers.1.mlp.up", 1),
    "ep2|an expert of one rank": ("layers.1.mlp.experts.2", 2),
    "tp2-train|loss scale of a rank": (".:grad_out.loss", 2),
}
"""Two layouts of the same run, and what is to be named."""
ALL = {**ONE, **RIGHT, **WRONG}


def record_all(
    runs: dict[str, Run], make: Callable[[str, Run, Path], None], directory: str, store: str, rank: str, world: str,
    *names: str,
) -> None:  # fmt: skip
    """Record all runs of a number of processes, in one of them."""
    torch.set_num_threads(1)
    if int(world) > 1:
        distributed.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    for name, of in runs.items():
        if of.world == int(world) and (not names or name in names):
            try:
                make(name, of, Path(directory))
            except Exception as error:
                raise RuntimeError(name) from error
    if int(world) > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    record_all(ALL, run, *sys.argv[1:])
