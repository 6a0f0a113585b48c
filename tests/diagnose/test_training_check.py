"""Training runs: the step, the phase and the op where two of them part company; wrong gradients are named first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

import glassengine as glass
from glassengine.errors import IncomparableError, UsageError
from glassengine.results import Comparison
from glassengine.testing import models


class Net(nn.Module):
    """Two blocks and a loss: x [B, 16], target [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return x + self.down(self.act(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.features(x))
        return {"loss": nn.functional.cross_entropy(logits.float(), target), "logits": logits}


class Doubled(torch.autograd.Function):
    """A SiLU whose gradient is twice what it should be."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return nn.functional.silu(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s * (1 + x * (1 - s))) * 2


class WrongBackward(Net):
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)  # type: ignore[no-any-return]


class Skipped(Net):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        return x + self.down(self.act(self.up(self.norm(x.detach()))))


class WrongForward(Net):
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(x) * 1.01


def net(kind: type[Net] = Net) -> Net:
    made = models.drawn(Net)
    made.__class__ = kind
    return made.train()  # type: ignore[return-value]


def batches(number: int = 1) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randn(8, 16, generator=generator),
            "target": torch.randint(0, 10, (8,), generator=generator),
        }
        for _ in range(number)
    ]


def adamw(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda module: torch.optim.AdamW(module.parameters(), **{"lr": 0.01, "weight_decay": 0.1, **options})


def decaying(first: int) -> Callable[[nn.Module], Any]:
    def make(module: nn.Module) -> Any:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** max(0, step - first))

    return make


def check(candidate: nn.Module | None, **options: Any) -> Comparison:
    return glass.check_training(net(), candidate, **{"inputs": batches(), "optimizer": adamw(), **options})


def where(result: Comparison) -> tuple[int, str | None, str]:
    assert result.first_divergence is not None
    return result.first_divergence.step, result.first_divergence.level, result.first_divergence.site


def test_a_wrong_backward_is_named() -> None:
    result = check(net(WrongBackward))
    step, phase, site = where(result)
    assert (result.ok, result.verdict, step, phase) == (False, "wrong", 0, "backward")
    assert site.startswith(".:backward/mul.")
    assert result.first_divergence is not None and "test_training_check.py" in str(
        result.first_divergence.candidate_source
    )
    # The forward is right, and the update is right for the gradients that it was given.
    assert {level.name: level.verdict in ("identical", "rounding") for level in result.levels} == {
        "forward": True,
        "backward": False,
        "run": False,
        "update": True,
    }


def test_a_skipped_gradient_is_a_matter_of_the_backward() -> None:
    result = check(net(Skipped))
    assert (result.ok, *where(result)[:2]) == (False, 0, "backward")
    assert any(pair.verdict == "wrong" and pair.site == "embed.weight:grad" for pair in result.pairs)
    assert not any(pair.verdict == "wrong" and pair.site == "head.weight:grad" for pair in result.pairs)


def test_a_frozen_parameter_has_a_gradient_of_zeros() -> None:
    def forgets(module: nn.Module) -> torch.optim.Optimizer:
        module.up.weight.register_hook(torch.zeros_like)  # type: ignore[union-attr, operator]
        return adamw()(module)

    result = check(None, candidate_optimizer=forgets)
    assert where(result) == (0, "run", "up.weight:grad")


def test_a_wrong_forward_is_named_with_its_line() -> None:
    result = check(net(WrongForward))
    assert where(result)[:2] == (0, "forward")
    assert result.first_divergence is not None and result.first_divergence.source is not None
    assert "test_training_check.py" in result.first_divergence.source


@pytest.mark.parametrize(
    ("options", "site", "hint"),
    [
        (
            {"betas": (0.9, 0.99)},
            "state.exp_avg_sq",
            "betas: (0.9, 0.999) in the baseline, (0.9, 0.99) in the candidate",
        ),
        (
            {"betas": (0.8, 0.999)},
            "state.exp_avg",
            "betas: (0.9, 0.999) in the baseline, (0.8, 0.999) in the candidate",
        ),
        ({"weight_decay": 0.01}, "param", "weight_decay: 0.1 in the baseline, 0.01 in the candidate"),
        ({"eps": 1e-3}, "param", "eps: 1e-08 in the baseline, 0.001 in the candidate"),
    ],
)
def test_a_wrong_hyperparameter_is_named(options: dict[str, Any], site: str, hint: str) -> None:
    result = check(None, candidate_optimizer=adamw(**options))
    assert where(result) == (0, "update", f"embed.weight:{site}")
    assert result.first_divergence is not None
    assert [found.text for found in result.first_divergence.hints] == [hint]
    assert [item.difference for item in result.written_differently] == [hint]


def test_a_schedule_that_is_off_by_one_parts_in_the_step_where_it_does() -> None:
    result = check(None, inputs=batches(3), optimizer=decaying(0), candidate_optimizer=decaying(1))
    step, phase, site = where(result)
    assert (step, phase) == (1, "update")
    assert site.endswith(":param")
    assert all(pair.verdict in ("identical", "rounding") for pair in result.pairs if pair.step == 0)


def test_an_optimizer_of_another_class_is_wrong() -> None:
    result = check(None, candidate_optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.01))
    assert where(result)[:2] == (0, "update")
    assert any("keeps no such value" in item.reason for item in result.skipped)


@pytest.mark.parametrize("variant", ["foreach", "for-loop", "fused", "bfloat16", "written otherwise", "aot_eager"])
def test_legal_variants_part_nowhere(variant: str) -> None:
    class Otherwise(Net):
        def act(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(x)

    candidate = net(Otherwise) if variant == "written otherwise" else net()
    options = {"foreach": {"foreach": True}, "for-loop": {"foreach": False}, "fused": {"fused": True}}.get(variant, {})
    baseline = net()
    inputs: list[dict[str, torch.Tensor]] = batches(2)
    if variant == "bfloat16":
        baseline, candidate = baseline.bfloat16(), candidate.bfloat16()
        inputs = [{**batch, "x": batch["x"].bfloat16()} for batch in inputs]
    before = {name: tensor.clone() for name, tensor in candidate.state_dict().items()}
    given = torch.compile(candidate, backend="aot_eager") if variant == "aot_eager" else candidate
    coverage = 0.5 if variant == "written otherwise" else 0.9
    result = glass.check_training(
        baseline,
        given,
        inputs=inputs,
        optimizer=adamw(foreach=False),
        candidate_optimizer=adamw(**options),
        min_coverage=coverage,
    )
    assert result.ok, result.not_ok_because
    assert result.verdict in ("identical", "rounding") and result.origins == ()
    assert result.counts["compared"] > 100
    after = candidate.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


class Normalized(Net):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.embed(x), 0.2)
        statistics = self.mean, self.variance
        return x + self.down(nn.functional.batch_norm(self.up(x), *statistics, training=True))


class OtherEpsilon(Normalized):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.embed(x), 0.2)
        statistics = self.mean, self.variance
        return x + self.down(nn.functional.batch_norm(self.up(x), *statistics, training=True, eps=0.1))


@pytest.mark.parametrize("kind", [Normalized, OtherEpsilon])
def test_batch_normalization_and_dropout_are_judged_op_by_op(kind: type[Net]) -> None:
    sides = net(Normalized), net(kind)
    for side in sides:
        side.register_buffer("mean", torch.zeros(64))
        side.register_buffer("variance", torch.ones(64))
    result = glass.check_training(*sides, inputs=batches(), optimizer=adamw())
    assert result.ok == (kind is Normalized), result.not_ok_because
    assert torch.equal(sides[1].mean, torch.zeros(64)), "what a run wrote is put back"
    if kind is OtherEpsilon:
        assert where(result)[:2] == (0, "forward")
        assert result.first_divergence is not None
        assert any("1e-05 in the baseline, 0.1 in the candidate" in hint.text for hint in result.first_divergence.hints)


def test_a_compiler_that_breaks_the_backward_is_found_by_the_run_itself() -> None:
    def scaled(graph: torch.fx.GraphModule, example: Any) -> Any:
        product = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.mm.default)
        with graph.graph.inserting_after(product):
            wrong = graph.graph.call_function(torch.ops.aten.mul.Tensor, (product, 1.5))
        product.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
        graph.recompile()
        from functorch.compile import make_boxed_func

        return make_boxed_func(graph.forward)

    from functorch.compile import make_boxed_func

    backend = aot_autograd(fw_compiler=lambda g, e: make_boxed_func(g.forward), bw_compiler=scaled)
    result = check(torch.compile(net(), backend=backend))  # type: ignore[arg-type]
    step, level, site = where(result)
    assert (result.ok, step, level) == (False, 0, "run")
    assert site.endswith(":grad")
    verdicts = {level.name: level.verdict for level in result.levels}
    assert verdicts["forward"] == verdicts["backward"] == "identical"


# After a graph break (transformers logs which loss it takes) dynamo itself looks at `.grad` of what the first graph
# made; it hides the warning from users, but not from a filter that makes an error of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.slow
def test_a_step_compiled_by_inductor_parts_nowhere() -> None:
    for make in (models.llama, models.gpt2):
        ids = torch.randint(1, 256, (2, 9), generator=torch.Generator().manual_seed(0))
        result = glass.check_training(
            make(),
            torch.compile(make()),  # type: ignore[arg-type]
            inputs=[{"input_ids": ids, "labels": ids, "use_cache": False}] * 2,
            optimizer=adamw(),
        )
        assert result.ok, result.not_ok_because


def test_a_language_model_is_judged_in_every_op() -> None:
    ids = torch.randint(1, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    wrong = models.llama()
    wrong.model.layers[1].mlp.act_fn.register_full_backward_hook(lambda *a: (a[1][0] * 0.9,))
    result = glass.check_training(
        models.llama(), wrong, inputs={"input_ids": ids, "labels": ids, "use_cache": False}, optimizer=adamw()
    )
    step, phase, site = where(result)
    assert (step, phase) == (0, "backward") and site.startswith("model.layers.1.mlp")
    assert result.coverage > 0.95


def test_training_that_cannot_be_judged_is_refused() -> None:
    with pytest.raises(IncomparableError, match="begin with different parameters"):
        other = net()
        other.up.weight.data[0, 0] += 1
        check(other)
    with pytest.raises(IncomparableError, match="have different parameters"):
        check(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="holds no loss"):
        glass.check_training(nn.Linear(3, 2), inputs={"input": torch.ones(4, 3)}, optimizer=adamw())
    with pytest.raises(UsageError, match="did not return an optimizer"):
        check(None, candidate_optimizer=lambda module: module)
    with pytest.raises(UsageError, match="needs a closure"):
        check(None, candidate_optimizer=lambda module: torch.optim.LBFGS(module.parameters()))
    with pytest.raises(UsageError, match="no step"):
        check(None, inputs=[])


class Faint(Net):
    factor = 1.0

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x) + 1e-9 * self.act(self.embed(x))


class FaintOtherwise(Faint):
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x) * self.factor


class FaintWrong(FaintOtherwise):
    factor = 1.5


@pytest.mark.parametrize("kind", [FaintOtherwise, FaintWrong])
def test_an_op_that_drowns_in_a_rewritten_module_is_said(kind: type[Net]) -> None:
    result = glass.check_training(net(Faint), net(kind), inputs=batches(), optimizer=adamw(), min_coverage=0.5)
    run = next(level for level in result.levels if level.name == "run")
    assert run.verdict in ("identical", "rounding"), "loss and gradients agree"
    if kind is FaintWrong:
        assert result.verdict in ("suspicious", "wrong") and result.origins
    else:
        assert result.ok and result.verdict in ("identical", "rounding") and not result.origins


def test_buffers_that_a_forward_writes_are_listed() -> None:
    """Running statistics: each step is judged from the candidate's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    result = glass.check_training(
        model, inputs={"input": torch.randn(5, 3)}, loss=lambda y: y.square().mean(), optimizer=adamw()
    )
    listed = {item.site for item in result.skipped if "a buffer that the forward writes" in item.reason}
    assert listed == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_memory_that_an_optimizer_writes_to_stays_that_of_the_run() -> None:
    """Momentum matters from the second step on; the floor of rounding is not that of the first."""
    optimizers = [lambda module, m=m: torch.optim.SGD(module.parameters(), lr=0.1, momentum=m) for m in (0.9, 0.95)]
    result = check(None, inputs=batches(2), optimizer=optimizers[0], candidate_optimizer=optimizers[1])
    step, level, site = where(result)
    assert (result.ok, step, level) == (False, 1, "update") and site.endswith(":state.momentum_buffer")
    assert result.verdict == "wrong"


Backward = Callable[[Tensor, Tensor], Tensor]


def function(forward: Callable[[Tensor], Tensor], backward: Backward) -> Callable[[Tensor], Tensor]:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return backward(gradient, *ctx.saved_tensors)

    return Custom.apply  # type: ignore[no-any-return]


def normed(x: Tensor, *, detach_mean: bool = False, detach_variance: bool = False) -> Tensor:
    variance, mean = torch.var_mean(x.view(-1, 4, 4), -1, unbiased=False, keepdim=True)
    mean = mean.detach() if detach_mean else mean
    variance = variance.detach() if detach_variance else variance
    return ((x.view(-1, 4, 4) - mean) * torch.rsqrt(variance + 1e-5)).view_as(x)


def silu(gradient: Tensor, x: Tensor) -> Tensor:
    s = x.sigmoid()
    return gradient * s * (1 + x * (1 - s))


class SmallNet(nn.Module):
    """x [B, 8], target [B] -> the loss."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mistake = mistake
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.GroupNorm(4, 16), nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)

    def normed(self, x: Tensor) -> Tensor:
        if self.mistake in ("var_mean", "detached mean", "detached variance"):
            found = normed(
                x,
                detach_mean="mean" in self.mistake and self.mistake != "var_mean",
                detach_variance="variance" in self.mistake,
            )
            return found * self.norm.weight + self.norm.bias
        return self.norm(x)

    def acted(self, x: Tensor) -> Tensor:
        backward = ACTIVATIONS.get(self.mistake)
        return F.silu(x) if backward is None else function(F.silu, backward)(x)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = self.normed(self.first(x))
        y = self.acted(self.second(h))
        h = h.detach() + y if self.mistake == "detached residual" else h + y
        h = function(torch.clone, lambda g, _: -g)(h) if self.mistake == "sign" else h
        h = function(torch.clone, lambda g, _: g.clamp(-0.05, 0.05))(h) if self.mistake == "clipped" else h
        h = function(torch.clone, lambda g, _: torch.cat([g[:3], 0 * g[3:]]))(h) if self.mistake == "rows" else h
        logits = self.last(h)
        scale = 0.5 if self.mistake == "half" else 2.0 if self.mistake == "twice" else 1.0
        logits = logits if scale == 1 else function(torch.clone, lambda g, _: scale * g)(logits)
        return {"loss": F.cross_entropy(logits, target)}


ACTIVATIONS: dict[str, Backward] = {
    "right": silu,
    "half of it": lambda g, x: g * x.sigmoid(),
    "straight through": lambda g, x: g,
    "relu": lambda g, x: g * (x > 0),
    "twice the gradient": lambda g, x: 2 * silu(g, x),
    "zero": lambda g, x: torch.zeros_like(g),
    "of gelu": lambda g, x: g * (0.5 * (1 + torch.erf(x / 2**0.5)) + x * torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5),
    "no derivative": lambda g, x: silu(torch.ones_like(g), x),
    "of its result": lambda g, x: silu(g, F.silu(x)),
    "one column": lambda g, x: torch.cat([silu(g, x)[:, :-1], g[:, -1:]], 1),
    "rolled": lambda g, x: silu(g, x).roll(1, 0),
    "in half precision": lambda g, x: silu(g.bfloat16(), x.bfloat16()).float(),
}
MISTAKES = {name: "second" for name in ACTIVATIONS if name != "right"}
MISTAKES |= {"detached mean": "first", "detached variance": "first", "detached residual": "norm"}
MISTAKES |= {"sign": "second", "clipped": "second", "rows": "second", "half": "last", "twice": "last"}
"""Mistake -> the module whose gradient is the first that is wrong."""
QUICK = ("half of it", "detached variance")


def checked(mistake: str) -> glass.Comparison:
    torch.manual_seed(1)
    batch = {"x": torch.randn(6, 8), "target": torch.randint(0, 3, (6,))}
    return glass.check_training(
        SmallNet(),
        candidate=SmallNet(mistake),
        inputs=[batch],
        optimizer=lambda module: torch.optim.SGD(module.parameters(), 0.1),
    )


@pytest.mark.parametrize(
    "mistake", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in MISTAKES]
)
def test_f72_a_wrong_backward_is_named_as_the_gradient_of_its_parameter(mistake: str) -> None:
    result = checked(mistake)
    first = result.first_divergence
    assert not result.ok and first is not None and first.level != "forward", mistake
    assert str(result.not_ok_because).startswith("the loss agrees, "), result.not_ok_because
    assert f"gradients are wrong, first that of {MISTAKES[mistake]}." in str(result.not_ok_because), (
        result.not_ok_because
    )
    assert (
        ":backward/" in first.site
        and first.candidate_source is not None
        and "test_training_check.py" in first.candidate_source
    )


@pytest.mark.parametrize("right", ["right", "var_mean"])
def test_f72_a_right_backward_of_ones_own_is_ok(right: str) -> None:
    result = checked(right)
    assert result.ok, result.not_ok_because
