"""Functional graphs made by rewriting: the same as torch makes by running, for every rule, and for whole models."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from glassengine.program import export_program, load_model
from glassengine.program.export import export
from glassengine.program.export.export import export_module
from glassengine.program.export.functional_rules import NoRule
from glassengine.program.export.functionalize import decomposed, functional, rewritten
from glassengine.testing import models
from tests.corpus import families


def described(exported: ExportedProgram) -> list[str]:
    """Everything that is read of a program later on."""

    def kind(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.requires_grad}"
        return str([kind(item) for item in value] if isinstance(value, (list, tuple)) else value)

    lines = []
    for node in exported.graph.nodes:
        stack, line = node.meta.get("nn_module_stack") or {}, node.meta.get("stack_trace") or ""
        what = f"{node.name} = {node.op} {node.target} {node.args} {sorted(node.kwargs.items())}"
        where = f"{list(stack.items())} {line if node.op == 'call_function' else ''}"
        lines.append(f"{what} :: {kind(node.meta.get('val'))} @ {where}")
    signature = exported.graph_signature
    lines += [str(spec) for spec in [*signature.input_specs, *signature.output_specs]]
    return [*lines, str(exported.module_call_graph), str(exported.range_constraints)]


def traced(function: Callable[..., Any], *sizes: tuple[int, ...], module: nn.Module | None = None) -> ExportedProgram:
    """Export `function`, whose inputs are dynamic in their first dimension."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module or nn.Linear(6, 6)

        def forward(self, *inputs: torch.Tensor) -> Any:
            return function(self.inner, *inputs)

    inputs = tuple(torch.ones(size) for size in sizes)
    dynamic = (tuple({0: Dim.DYNAMIC} for _ in sizes),)
    with torch.no_grad():
        return torch.export.export(Model().eval(), inputs, dynamic_shapes=dynamic, strict=False)


def written_cache(inner: nn.Module, x: torch.Tensor, cache: torch.Tensor) -> Any:
    """Views of a tensor that was written: taken before, after, twice, and through one another."""
    before = cache.transpose(1, 2)
    cache.index_copy_(1, torch.arange(2), x[:, :2])
    after = cache[:, None].expand(-1, 3, -1, -1)
    first = inner(after.reshape(x.shape[0], 3 * 4, -1))
    cache.mul_(2)
    return first, before @ x[:, :4], after.sum(0), cache + 1


def parts(_: nn.Module, x: torch.Tensor) -> Any:
    """Chunks and splits, of which not all are used; and of what was written."""
    a, _, c = x.chunk(3, dim=2)
    d, e = x.split([2, 2], dim=1)
    y = x + 1
    f, g = y.split(3, dim=-1)
    y.add_(1)
    return a + c, d @ e.transpose(1, 2), f * g, torch.topk(x, 2).values, x.unbind(1)[3] + 1


def conversions(_: nn.Module, x: torch.Tensor) -> Any:
    """What may be its input, and what copies."""
    y = x.float().contiguous().to(torch.float64).to("cpu", torch.float32)
    z = y.transpose(1, 2).contiguous()
    flat = z.reshape(z.shape[0], 24).view(-1, 2, 12).reshape(-1, 24)
    return flat.to(torch.int64, copy=True), y.transpose(1, 2).reshape(y.shape[0], 24), z.type_as(y), y.half().float()


def constants(_: nn.Module, x: torch.Tensor, state: torch.Tensor) -> Any:
    """Constants of the code, and a state that is replaced."""
    empty, weights = torch.tensor([]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    state.copy_(x * weights)
    return torch.cat((empty, weights)) + x, state.sum(1)


def convolution(inner: nn.Module, x: torch.Tensor) -> Any:
    """A norm by stored statistics, a dropout that drops nothing, an image laid flat."""
    return inner(x[:1].contiguous()), inner(x).sum(0).flatten()


def written_parts(_: nn.Module, x: torch.Tensor) -> Any:
    """Parts that are written: slices, selects and permutations, of one another, and those that splits make."""
    y, z, s = x + 1, x * 2, x - 1
    y[:, 1:3, 0] = x[:, :2, 1]
    y[:, 1:3][:, :, 1:3].copy_(x[:, :2, 1:3])
    y.permute(2, 0, 1)[1].add_(x[:, :, 0])
    z[:, 0].zero_()
    z.transpose(1, 2)[:, 0].mul_(2)
    z[:, :, :4].diagonal(0, 1, 2).fill_(3.0)
    z[0].view(-1)[2:5].mul_(3)
    z[:, torch.tensor([0, 2])] = 0.0
    s.chunk(2, -1)[0].mul_(2)
    s.split([1, 3], 1)[1].exp_()
    s.unsqueeze(1).mul_(3)
    s[:, :, :1].squeeze(-1).sigmoid_()
    return y[:, 1:3] * 2, z * 2, s * 2


def in_place(_: nn.Module, x: torch.Tensor) -> Any:
    """Ops in place, and those that change the shape of their tensor."""
    y = nn.functional.leaky_relu(nn.functional.hardtanh(nn.functional.silu(x + 1, inplace=True), 0, 6, True), 0.2, True)
    z = (x + 1).tril_().fill_(torch.tensor(2.0)).unsqueeze_(1)
    mask = (x > 0).__ior__(x < -1)
    zeros = torch.zeros(x.shape[0], 4, 6).index_add_(1, torch.tensor([0, 2]), x[:, :2])
    return y, z * 2, torch.where(mask, x, x * 2), zeros + x, (x + 1).index_put_((torch.tensor([0]),), x[0])


def composed(_: nn.Module, x: torch.Tensor) -> Any:
    """Views that are made of others, complex numbers, and another size of an image."""
    made = torch.fft.rfft(x)
    resized = nn.functional.interpolate(x[:, None], size=(8, 8), mode="bilinear")
    numbers = torch.view_as_real(torch.view_as_complex(x.reshape(x.shape[0], 4, 3, 2) * 1) * 2)
    few = x.narrow(1, 1, 2) * 2, x.mT * 2, x[0].T * 2, x[0, :1].expand_as(x[1]) * 2, x.detach() * 2
    return *few, made.real * 2 + made.imag, resized * 1, numbers


SMALL: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], Callable[[], nn.Module] | None]] = {
    "written": (written_cache, ((2, 4, 6), (2, 4, 6)), None),
    "parts": (parts, ((2, 4, 6),), None),
    "written parts": (written_parts, ((2, 4, 6),), None),
    "in place": (in_place, ((2, 4, 6),), None),
    "composed": (composed, ((2, 4, 6),), None),
    "conversions": (conversions, ((2, 4, 6),), None),
    "constants": (constants, ((2, 4, 6), (2, 4, 6)), None),
    "convolution": (
        convolution,
        ((2, 3, 4, 4),),
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout()),
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_a_rewritten_graph_is_that_of_torch(name: str) -> None:
    function, sizes, module = SMALL[name]
    exported = traced(function, *sizes, module=module and module())
    before = described(exported)
    with torch.no_grad():
        found = described(rewritten(exported))
        assert described(exported) == before
        assert found == described(decomposed(exported))


def conjugates(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (3, 2)) * 1).conj() * 2)


def returns_its_input(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def finds_a_size(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).reshape(-1, 6)


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x + self.seen


@pytest.mark.parametrize(
    ("function", "module"),
    [
        (conjugates, None),
        (returns_its_input, None),
        (finds_a_size, None),
        (lambda inner, x: inner(x), Counts()),
        (lambda inner, x: x[:, x.sum().int().item() :], None),
    ],
)
def test_ops_without_a_rule_are_left_to_torch(function: Callable[..., Any], module: nn.Module | None) -> None:
    exported = traced(function, (2, 4, 6), module=module)
    with pytest.raises(NoRule):
        rewritten(exported)
    found = functional(exported)
    assert not any(node.target._schema.is_mutable for node in found.graph.nodes if hasattr(node.target, "_schema"))
    result = found.graph.output_node().args[0]
    names = {spec.arg.name for spec in found.graph_signature.output_specs}
    assert {node.name for node in result} == names  # type: ignore[union-attr]
    x = torch.randn(2, 4, 6)
    results = [copy.deepcopy(program).module(check_guards=False)(x.clone()) for program in (exported, found)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("batches", [(2,), (2, 5)])
def test_a_model_without_a_rule_is_exported(batches: tuple[int, ...]) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return conjugates(self, x)

    program = export_module(Model(), [{"x": torch.ones(batch, 4, 6)} for batch in batches])
    with pytest.raises(NoRule):
        rewritten(traced(conjugates, (2, 4, 6)))
    result = program.exported.module(check_guards=False)(x=torch.ones(2, 4, 6))
    torch.testing.assert_close(result, conjugates(Model(), torch.ones(2, 4, 6)))


def test_names_are_counted_by_op() -> None:
    # Torch counts products of sizes, too.
    program = export_program(load_model(models.llama(num_hidden_layers=1)))
    sums = [node.name for node in program.graph.nodes if node.name.startswith("add")]
    assert sums == ["add", *(f"add_{number}" for number in range(1, len(sums)))]


def compared(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> bool:
    """Make a program; return whether its graph was rewritten, which is then that of torch."""
    found = []

    def both(exported: ExportedProgram) -> ExportedProgram:
        try:
            short = rewritten(exported)
        except NoRule:
            found.append(False)
            return decomposed(exported)
        assert described(short) == described(decomposed(exported))
        found.append(True)
        return short

    monkeypatch.setattr(export, "functional", both)
    make()
    return all(found)


def test_a_decoder_is_rewritten_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(monkeypatch, lambda: export_program(load_model(models.llama(num_hidden_layers=1))))


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in families.FAMILIES if name not in ("bundled", "llama-1024")])
def test_every_family_is_rewritten_as_torch_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = compared(monkeypatch, lambda: families.make_bench(family, "float32"))
    # A size is found by a reshape that copies.
    assert short == (family not in ("deepseek", "bloom"))


class _Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * 2


class _WithRegions(nn.Module):
    """Runs a module without gradients and without autocast, one inside of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scaled = nn.Linear(6, 6), _Scaled()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            first = self.inner(x)
            with torch.autocast("cuda", enabled=False):
                first = self.scaled(first)
        return first, self.scaled(first) + 1


def test_ops_of_regions_keep_their_modules_and_lines() -> None:
    torch.manual_seed(0)
    module, x = _WithRegions().eval(), torch.randn(3, 6)
    exported = torch.export.export(module, (x,), strict=False)
    found = functional(exported)
    ops = [node for node in found.graph.nodes if node.op == "call_function"]
    paths = [list(node.meta["nn_module_stack"].values())[-1][0] for node in ops]
    assert paths == ["inner", "scaled", "scaled", "scaled", "scaled", ""]
    assert all("in forward" in node.meta["stack_trace"] for node in ops)
    for ours, theirs in zip(found.module()(x), module(x), strict=True):
        assert torch.equal(ours, theirs)


class Mapped(nn.Module):
    """A module in `torch.vmap`, in which another one captures a tensor of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def of_one(rows: torch.Tensor) -> torch.Tensor:
            weight = self.weight * self.scale(rows).mean(0)
            return torch.vmap(lambda row: weight @ row)(rows)

        return torch.vmap(of_one)(x)


def test_modules_that_run_in_vmap_keep_their_names() -> None:
    inputs = {"x": torch.randn(3, 5, 4)}
    module = Mapped().eval()
    program = export_module(module, inputs)
    names = [site.name for site in program.sites]
    assert any(name.startswith("scale/") for name in names), names
    (result,) = torch.fx.Interpreter(program.exported.graph_module).run(
        *({**program.weights(), "x": inputs["x"]}[node.name] for node in program.graph.find_nodes(op="placeholder"))
    )
    assert torch.allclose(result, module(**inputs), atol=1e-6)


class Precise(nn.Module):
    """Writes in place in a region without autocast, once with an op that has no rule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x.unflatten(-1, (2, 3)).sin()
            y.add_(1.0)
        return y.flatten(1)


@pytest.mark.parametrize("way", [functional, decomposed])
def test_a_region_may_write_in_place(way: Callable[[ExportedProgram], ExportedProgram]) -> None:
    module, x = Precise().eval(), torch.randn(3, 6)
    found = way(torch.export.export(module, (x,), strict=False))
    (added,) = found.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert added.meta["stack_trace"].endswith("y.add_(1.0)")
    assert torch.equal(found.module()(x), module(x))


def _part(t: torch.Tensor, at: random.Random) -> torch.Tensor:
    """Return one of the views of a tensor."""
    several, dims, last = t.dim() > 1, at.sample(range(t.dim()), t.dim()), t.shape[-1]
    views: list[Callable[[], torch.Tensor]] = [
        lambda: t[:, at.randrange(t.shape[1])] if several else t[1:],
        lambda: t[..., at.randrange(max(1, last - 1)) :],
        lambda: t.transpose(0, -1),
        lambda: t.unsqueeze(at.randrange(t.dim())),
        lambda: t.permute(*dims),
        lambda: t.reshape(-1) if t.is_contiguous() else t,
        lambda: t.chunk(2, -1)[at.randrange(2)] if last > 2 else t,
        lambda: t.unbind(0)[at.randrange(t.shape[0])] if several else t,
        lambda: t.narrow(-1, 0, max(1, last - 1)),
        lambda: t.squeeze(0) if several and t.shape[0] == 1 else t,
        lambda: t[::2],
        lambda: t.split([1, last - 1], -1)[1] if last > 1 else t,
        lambda: t.detach(),
        lambda: t.diagonal(0, 0, 1) if several else t,
        lambda: t.mT if several else t,
    ]
    return at.choice(views)()


_WRITES: tuple[Callable[[torch.Tensor], Any], ...] = (
    lambda t: t.mul_(1.5),
    lambda t: t.add_(t.mean()),
    lambda t: t.zero_(),
    lambda t: t.copy_(t.flip(0) * 2),
    lambda t: t.tanh_(),
    lambda t: t.masked_fill_(t > 0.1, -1.0),
    lambda t: nn.functional.silu(t, inplace=True),
    lambda t: t.__setitem__(t < 0, 0.7),
    lambda t: t.sub_(t.sum(0, keepdim=True)),
    lambda t: t.index_fill_(0, torch.tensor([0]), 2.0),
)


class Drawn(nn.Module):
    """Takes views of tensors, and of views, and writes to them, in an order that a seed draws."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        at, pool = random.Random(self.seed), [x + 1, x * 2]
        for _ in range(at.randrange(3, 9)):
            tensor = at.choice(pool)
            for _ in range(at.randrange(3)):
                tensor = _part(tensor, at)
                pool.append(tensor)
            if at.random() < 0.7:
                at.choice(_WRITES)(tensor)
            if at.random() < 0.3:
                pool.append(tensor.sin())
        return tuple(tensor * 1 for tensor in pool)


@pytest.mark.parametrize("start", [0, 40, 400, 5180])  # views that do not fit any more are in 423 and 5196
def test_drawn_writes_through_views_make_what_they_made(start: int) -> None:
    num_short = 0
    for seed in range(start, start + 40):
        x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            try:
                wanted = Drawn(seed)(x.clone())
            except (RuntimeError, IndexError):  # what was drawn does not run
                continue
            exported = torch.export.export(Drawn(seed).eval(), (x,), strict=False)
            try:
                found = rewritten(exported)
            except NoRule:
                continue
            num_short += 1
            torch.testing.assert_close(found.module(check_guards=False)(x.clone()), wanted, equal_nan=True)
    assert num_short > 20
