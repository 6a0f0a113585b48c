"""Mistakes of training runs, in the loss, the backward and the update, and the kinds of hint that are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glassengine.results import Kind

Optimizer = Callable[[nn.Module], Any]
IGNORED = -100


class _Silu(torch.autograd.Function):
    """A SiLU with the gradient of another activation, or with a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.how = how
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s if ctx.how == "gradient of a gate" else 2 * (s * (1 + x * (1 - s)))), None


class Language(nn.Module):
    """One block of attention and one of a network: ids [B, T], labels [B, T]."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        self.mistake = mistake
        self.embed = nn.Embedding(24, 16)
        self.norm, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 24, bias=False)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.mistake == "keys and values":
            k, v = v, k
        scores = q @ k.mT * (1.0 if self.mistake == "no scale" else 8**-0.5)
        if self.mistake != "no causal mask":
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        wrong = self.mistake
        x = self.embed(ids)
        norm = F.layer_norm(x, (16,), self.norm.weight, self.norm.bias, 1e-2 if wrong == "epsilon" else 1e-5)
        x = x + self.attend(norm)
        inner = self.norm2(x.detach() if wrong == "branch detached" else x)
        act = self.up(inner)
        act = _Silu.apply(act, wrong) if wrong in ("gradient twice", "gradient of a gate") else F.silu(act)
        if wrong == "dropout on":
            act = F.dropout(act, 0.2)
        x = (0 if wrong == "no residual" else x) + self.down(act)
        logits = self.head(x)
        if wrong == "logits in bfloat16":
            logits = logits.bfloat16().float()
        if wrong == "temperature":
            logits = logits / 0.5
        if wrong == "labels not shifted":
            given, wanted = logits[:, :-1], labels[:, :-1]
        elif wrong == "labels shifted twice":
            given, wanted = logits[:, :-2], labels[:, 2:]
        else:
            given, wanted = logits[:, :-1], labels[:, 1:]
        if wrong == "padding counted":
            wanted = wanted.clamp(min=0)
        loss = F.cross_entropy(
            given.flatten(0, 1),
            wanted.flatten(),
            reduction="sum" if wrong == "sum of losses" else "mean",
            ignore_index=IGNORED,
            label_smoothing=0.1 if wrong == "labels smoothed" else 0.0,
        )
        return {"loss": loss * (4.0 if wrong == "not divided by the steps" else 1.0)}


class ByHand(torch.optim.AdamW):
    """AdamW, written out, with one mistake."""

    mistake = ""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad * (1024.0 if self.mistake == "not unscaled" else 1.0), group)

    def update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, wrong = self.state[p], self.mistake
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        first, second = group["betas"]
        rate = group["lr"] * (0.5 if wrong == "half the rate" else -1.0 if wrong == "up the slope" else 1.0)
        if wrong == "coupled decay":
            gradient = gradient + group["weight_decay"] * p
        elif wrong not in ("no decay", "not updated"):
            p.mul_(1 - abs(rate) * group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        one, two = (1 - b ** float(state["step"]) for b in (first, second))
        if wrong == "no bias correction":
            one = two = 1.0
        root = (state["exp_avg_sq"] / two).sqrt() + group["eps"]
        if wrong != "not updated":
            p.sub_(rate * (state["exp_avg"] / one) / root)


def adamw(**options: Any) -> Optimizer:
    return lambda module: torch.optim.AdamW(
        module.parameters(), **{"lr": 0.01, "weight_decay": 0.1, "foreach": False, **options}
    )


def by_hand(mistake: str) -> Optimizer:
    def make(module: nn.Module) -> torch.optim.Optimizer:
        made = ByHand(module.parameters(), lr=0.01, weight_decay=0.1)
        made.mistake = mistake
        return made

    return make


def sgd(**options: Any) -> Optimizer:
    return lambda module: torch.optim.SGD(module.parameters(), **{"lr": 0.2, "momentum": 0.9, **options})


def scheduled(first: int) -> Optimizer:
    def make(module: nn.Module) -> Any:
        made = torch.optim.SGD(module.parameters(), lr=0.2)
        return made, torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.5 ** max(0, step - first))

    return make


ADAMW = adamw()


@dataclass(frozen=True)
class Trained:
    """A mistake of a training run.

    Attributes:
        kinds: That are right; a second one has its reason beside it.
        baseline: Makes the right optimizer.
        candidate: Makes the candidate's, where that is what is wrong.
    """

    kinds: tuple[Kind, ...]
    baseline: Optimizer = ADAMW
    candidate: Optimizer | None = None


MISTAKES: dict[str, Trained] = {
    "keys and values": Trained(("swapped",)),
    "no scale": Trained(("scale",)),
    "no causal mask": Trained(("mask",)),
    "epsilon": Trained(("eps",)),
    "branch detached": Trained(("bias missing", "other")),  # no word for a term that is not added
    "gradient twice": Trained(("scale",)),
    "gradient of a gate": Trained(("activation", "other")),  # a term of the derivative is left out
    "dropout on": Trained(("other",)),
    "no residual": Trained(("bias missing", "other")),  # as above
    "logits in bfloat16": Trained(("dtype",)),
    "temperature": Trained(("scale",)),
    "labels not shifted": Trained(("position",)),
    "labels shifted twice": Trained(("position",)),
    "padding counted": Trained(("mask", "other")),  # labels are another value, which is a mask to the loss only
    "sum of losses": Trained(("scale", "other")),  # sum for mean
    "labels smoothed": Trained(("other",)),
    "not divided by the steps": Trained(("scale",)),
    "not unscaled": Trained(("scale",), candidate=by_hand("not unscaled")),
    "coupled decay": Trained(("other",), candidate=by_hand("coupled decay")),
    "adam for adamw": Trained(
        ("other",), candidate=lambda module: torch.optim.Adam(module.parameters(), lr=0.01, weight_decay=0.1)
    ),
    "no decay": Trained(("scale",), candidate=by_hand("no decay")),
    "no bias correction": Trained(("scale", "other"), candidate=by_hand("no bias correction")),  # a factor left out
    "half the rate": Trained(("scale",), candidate=by_hand("half the rate")),
    "up the slope": Trained(("scale",), candidate=by_hand("up the slope")),
    "not updated": Trained(("stale",), candidate=by_hand("not updated")),
    "betas": Trained(("scale",), candidate=adamw(betas=(0.9, 0.99))),
    "rate": Trained(("scale",), candidate=adamw(lr=0.02)),
    "decay": Trained(("scale",), candidate=adamw(weight_decay=0.01)),
    "epsilon of the update": Trained(("eps",), candidate=adamw(eps=1e-3)),
    "nesterov": Trained(("other",), sgd(), sgd(nesterov=True)),
    "dampening": Trained(("scale",), sgd(), sgd(dampening=0.5)),
    "no momentum": Trained(("scale",), sgd(), sgd(momentum=0.0)),
    "schedule a step late": Trained(("scale", "stale"), scheduled(0), scheduled(1)),  # the rate of the step before
}


def sides(mistake: str) -> tuple[Language, Language]:
    """Return the right model and the one with a mistake, of the same weights."""
    torch.manual_seed(0)
    right, wrong = Language(), Language(mistake)
    with torch.no_grad():
        for tensor in right.parameters():
            tensor.add_(0.1 * torch.randn_like(tensor))
    wrong.load_state_dict(right.state_dict())
    return right.train(), wrong.train()


def batches(number: int = 2) -> list[dict[str, Tensor]]:
    """Return the inputs of the steps; the last labels of the second row count not."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(number):
        ids = torch.randint(0, 24, (2, 9), generator=generator)
        labels = ids.clone()
        labels[1, -3:] = IGNORED
        made.append({"ids": ids, "labels": labels})
    return made
