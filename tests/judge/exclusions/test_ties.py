"""Whether a choice that a candidate made is a legal one: ops that choose, on values made by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

import glassengine as glass
from glassengine.diagnose import check
from glassengine.judge.exclusions.ties import tied_choices
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.verdict import TIED
from glassengine.report.words import headline
from glassengine.results import Comparison
from glassengine.testing import models

aten = torch.ops.aten
U = unit_roundoff(torch.float32)
CLOSE, APART = 1 + U, 1 + 99 * U


def tied(target: Any, *args: Any, chosen: Any, settled: Tensor | None = None, **kwargs: Any) -> list[Any] | None:
    """Return where another choice than the exact one is legal, for the first result but values."""
    graph = Graph()
    nodes = [graph.placeholder(f"x{i}") if isinstance(arg, Tensor) else arg for i, arg in enumerate(args)]
    op = graph.call_function(target, tuple(nodes), kwargs)
    values = [arg.double() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
    made = target(*values, **kwargs)
    exact = made[1] if isinstance(made, (tuple, list)) else made
    known = {} if settled is None else {"x0": settled.double()}
    found = tied_choices(op, tuple(values), exact, torch.tensor(chosen), U, known)
    return None if found is None else found.tolist()


@pytest.mark.parametrize(("second", "is_legal"), [(CLOSE, True), (APART, False)])
def test_the_other_of_two_close_values_may_be_the_largest(second: float, is_legal: bool) -> None:
    x = torch.tensor([1.0, second, 0.0], dtype=torch.float64)
    assert tied(aten.argmax.default, x, 0, chosen=0) is is_legal
    assert tied(aten.argmax.default, x, 0, chosen=2) is False, "planted: a value that is far below"
    assert tied(aten.argmax.default, x, 0, chosen=7) is None, "planted: there is no such place"
    assert tied(aten.argmax.default, x, 0, chosen=0, settled=x) is False, "rounding has no part in these values"


@pytest.mark.parametrize(("limit", "is_legal"), [(CLOSE, True), (APART, False)])
def test_a_comparison_may_come_out_otherwise_beside_its_limit(limit: float, is_legal: bool) -> None:
    found = tied(aten.gt.Scalar, torch.tensor([1.0, 5.0]), limit, chosen=[True, False])
    assert found == [is_legal, False]


def test_the_largest_in_any_order_are_the_same_ones() -> None:
    x = torch.tensor([3.0, 1.0, 2.0])
    assert tied(aten.topk.default, x, 2, 0, True, False, chosen=[2, 0]) == [True, True]
    assert tied(aten.topk.default, x, 2, 0, True, True, chosen=[2, 0]) == [False, False]
    assert tied(aten.topk.default, x, 2, 0, True, False, chosen=[0, 1]) != [True, True], "planted: another one"
    assert tied(aten.topk.default, x, 2, 0, True, False, chosen=[0, 0]) != [True, True], "planted: one of them twice"


def test_equal_values_change_places_unless_the_sort_is_stable() -> None:
    x = torch.tensor([4, 4, 1])
    assert tied(aten.sort.default, x, 0, True, chosen=[1, 0, 2]) == [True, True, True]
    assert tied(aten.sort.stable, x, stable=True, dim=0, descending=True, chosen=[1, 0, 2]) is None
    assert tied(aten.sort.default, x, 0, True, chosen=[0, 2, 1]) == [False] * 3, "planted: not in order"


def test_a_pool_takes_either_of_two_equal_values_of_its_plane() -> None:
    x = torch.tensor([[[[1.0, 1.0], [0.0, 0.5]]], [[[1.0, 0.0], [0.0, 0.0]]]])
    legal = tied(aten.max_pool2d_with_indices.default, x, [2, 2], chosen=[[[[1]]], [[[0]]]])
    assert legal == [[[[True]]], [[[True]]]]
    wrong = tied(aten.max_pool2d_with_indices.default, x, [2, 2], chosen=[[[[3]]], [[[0]]]])
    assert wrong is not None and wrong[0] == [[[False]]]


def test_other_ops_choose_nothing() -> None:
    assert tied(aten.neg.default, torch.ones(2), chosen=[1.0, 1.0]) is None


NUM_TOKENS, UNTOUCHED = 120, "candidate, untouched"


class Router(nn.Module):
    """Picks two of four experts; two of them are always close."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 32))

    def picked(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        values, picks = logits.float().softmax(-1).topk(2)
        return (values / values.sum(-1, keepdim=True)).bfloat16(), picks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.picked(nn.functional.linear(x, self.weight))


class Experts(nn.Module):
    """Every token is multiplied by the matrices of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.matrices = nn.Parameter(torch.empty(4, 32, 32))

    def mixed(self, x: Tensor, shares: Tensor, picks: Tensor) -> Tensor:
        found = torch.einsum("ti,tkoi->tko", x, self.matrices[picks])
        return (found * shares[..., None]).sum(1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixed(x, *self.router(x))


class Hidden(Experts):
    """The router is no module of its own: nobody observes what it chooses."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixed(x, *self.router.picked(nn.functional.linear(x, self.router.weight)))


class Mixture(nn.Module):
    """Layers of experts, with a norm between them."""

    experts: type[nn.Module] = Experts

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.experts() for _ in range(2))
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x))
        return x


class HiddenMixture(Mixture):
    """The same, with routers that nobody observes."""

    experts = Hidden


def made(kind: type[Mixture]) -> nn.Module:
    model = models.drawn(kind)
    for layer in model.layers:  # type: ignore[union-attr]
        layer.router.weight.data *= 3  # type: ignore[union-attr, operator]
        layer.router.weight.data[1] = layer.router.weight.data[0] * (1 + 1e-2)  # type: ignore[union-attr, index]
    return model.bfloat16()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("inputs") / "inputs.pt"
    torch.save({"x": torch.randn(NUM_TOKENS, 32, generator=torch.Generator().manual_seed(3)).bfloat16()}, path)
    return str(path)


def in_float32(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    return router.picked(nn.functional.linear(x.float(), router.weight.float()))


def in_halves(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of half of the terms are rounded before they are added."""
    halves = [nn.functional.linear(x[:, part::2], router.weight[:, part::2]) for part in (0, 1)]
    return router.picked(halves[0] + halves[1])


def of_the_other_experts(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    shares, picks = in_halves(router, x)
    return shares, (picks + 1) % 4


def not_normalized(router: Router, x: Tensor) -> tuple[Tensor, Tensor]:
    values, picks = nn.functional.linear(x, router.weight).float().softmax(-1).topk(2)
    return values.bfloat16(), picks


Route = Callable[[Router, Tensor], tuple[Tensor, Tensor]]


def checked(kind: type[Mixture], inputs: str, route: Route, *, scale: float = 1.0) -> tuple[Comparison, list[Any]]:
    """Return the check of a candidate that routes by `route`, and the pairs of its modules."""

    class Other(kind.experts):  # type: ignore[name-defined, misc]
        def forward(self, x: Tensor) -> Tensor:
            mixed: Tensor = (
                self.mixed(x, *route(self.router, x)) if kind is HiddenMixture else self.mixed(x, *self.router(x))
            )
            mixed[7] *= scale
            return x + mixed

    class OtherRouter(Router):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return route(self, x)

    candidate = made(kind)
    for layer in candidate.layers:  # type: ignore[union-attr]
        layer.__class__ = Other
        layer.router.__class__ = OtherRouter  # type: ignore[union-attr]
    result = glass.check(made(kind), candidate=candidate, inputs=inputs)
    return result, [pair for pair in result.pairs if pair.level == UNTOUCHED]


@pytest.mark.parametrize("route", [in_float32, in_halves])
@pytest.mark.parametrize("kind", [Mixture, HiddenMixture])
def test_a_router_that_rounds_otherwise_may_choose_otherwise(kind: type[Mixture], route: Route, inputs: str) -> None:
    with torch.no_grad():
        x = torch.load(inputs, weights_only=True)["x"]
        router: Any = made(kind).layers[0].router  # type: ignore[index, union-attr]
        assert bool((route(router, x)[1] != router(x)[1]).any()), "this candidate chooses as the baseline does"
    _, pairs = checked(kind, inputs, route)
    assert [
        (pair.site, pair.noise_ratio, pair.reason) for pair in pairs if pair.verdict in ("suspicious", "wrong")
    ] == []
    reasons = {pair.site: str(pair.reason) for pair in pairs if pair.reason}
    assert any("depend on a tie" in reason for reason in reasons.values())


@pytest.mark.parametrize(
    ("kind", "route"),
    [
        (Mixture, not_normalized),
        pytest.param(HiddenMixture, of_the_other_experts, marks=pytest.mark.slow),
        pytest.param(Mixture, of_the_other_experts, marks=pytest.mark.slow),
        pytest.param(HiddenMixture, not_normalized, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_router_is_named(kind: type[Mixture], route: Route, inputs: str) -> None:
    result, pairs = checked(kind, inputs, route)
    first = next(pair for pair in pairs if pair.verdict == "wrong")
    assert first.site.startswith("layers.0"), first.site
    # What a candidate makes of what its router picks has no counterpart: there the hint names the op that is not ours.
    found = result.first_divergence
    assert found is not None and found.site.startswith("layers.0")
    assert ".router" in found.site or kind is HiddenMixture or any("remainder" in hint.text for hint in found.hints)


@pytest.mark.slow
def test_a_mistake_in_one_token_is_found_beside_ties(inputs: str) -> None:
    _, pairs = checked(HiddenMixture, inputs, in_halves, scale=1.3)
    first = next(pair for pair in pairs if pair.verdict == "wrong")
    assert first.site == "layers.0/add.0"


class Buckets(nn.Module):
    """Positions by the logarithm of a distance, on the very edge of a bucket where the distance is short."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(9, 16))
        self.back = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        distance = torch.arange(1, 41, dtype=torch.float32) + 0 * x[:, 0]
        far = (3 * (distance / 27).log() / torch.tensor(3.0).log()).to(torch.int64) + 8
        far = torch.max(torch.min(far, torch.full_like(far, 8)), torch.zeros_like(far))  # as T5 writes it
        bias = self.table[torch.where(distance < self.nearest, 0, far)]
        out: Tensor = self.back(x + bias)
        return out

    nearest = 27.5


class UsedBuckets(Buckets):
    """The same, where the buckets on the edge are used."""

    nearest = 1.5


@pytest.mark.parametrize(("kind", "num_tied"), [(Buckets, 0), (UsedBuckets, 2 * 16)])
def test_tensors_without_the_tied_elements_are_judged(tmp_path: Any, kind: type[Buckets], num_tied: int) -> None:
    """Distances 3 and 9 are on the edge of a bucket."""
    path = tmp_path / "inputs.pt"
    torch.save({"x": torch.randn(40, 16, generator=torch.Generator().manual_seed(3))}, path)
    found = []
    for factor in (1.01, 1 + 1e-7):
        candidate = models.drawn(kind)
        candidate.back.weight.data[3] *= factor  # type: ignore[index, union-attr, operator]
        result = glass.check(models.drawn(kind), candidate=candidate, inputs=str(path))
        found += [pair for pair in result.pairs if pair.level == UNTOUCHED]
    assert [(pair.site, pair.verdict) for pair in found] == [("back", "wrong"), ("back", "rounding")]
    assert found[1].reason == (f"{num_tied} of 640 elements: {TIED}" if num_tied else None)


class Counted(nn.Module):
    """Attention over tokens to which the sizes of the groups that a choice makes are added: all hangs on the choice."""

    def __init__(self, *, tiled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.query, self.pair = nn.Linear(8, 3, bias=False), nn.Linear(8, 16), nn.Linear(8, 16)
        self.gate.weight.data[1] = self.gate.weight.data[0]  # nobody can tell these two apart
        self.tiled = tiled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = torch.bincount(self.gate(x).argmax(-1).flatten(), minlength=3)
        x = x + 0.1 * sizes.float().std()
        query, key, value = self.query(x), *self.pair(x).chunk(2, -1)
        query, key, value = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (query, key, value))
        key, value = (p.repeat(1, 2, 1, 1) if self.tiled else p.repeat_interleave(2, 1) for p in (key, value))
        return nn.functional.scaled_dot_product_attention(query, key, value)


def test_a_tie_above_hides_no_mistake_of_an_op(tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    inputs = str(tmp_path / "x.pt")
    assert check(Counted().eval(), candidate=Counted().eval(), inputs=inputs).ok
    assert not check(Counted().eval(), candidate=Counted(tiled=True).eval(), inputs=inputs).ok


class Sorted(nn.Module):
    """Tokens sorted by expert, as grouped products take them."""

    def __init__(self, *, alike: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.back = nn.Linear(8, 4, bias=False), nn.Linear(8, 8)
        self.matrices = nn.Parameter(torch.randn(4, 8, 8))
        if alike:
            self.gate.weight.data[1] = self.gate.weight.data[0]  # nobody can tell these two apart

    def picked(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares, picks = self.gate(x).softmax(-1).topk(1)
        return shares, picks.squeeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        shares, picks = self.picked(x)
        order = picks.argsort()
        ends = torch.histc(picks.float(), bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
        place = torch.arange(len(x), dtype=torch.int32)[:, None]
        mine = (place >= ends).sum(-1)
        found = torch.einsum("ti,tio->to", x[order], self.matrices[mine])
        return self.back(found[order.argsort()] * shares)


class Dense(Sorted):
    """Every expert computes every token; one router has no logits, and takes the last of equals."""

    def __init__(self, *, alike: bool = False, shift: int = 0, hides_router: bool = False) -> None:
        super().__init__(alike=alike)
        self.shift, self.hides_router = shift, hides_router

    def forward(self, x: Tensor) -> Tensor:
        if self.hides_router:
            weight = self.gate.weight
            behind = torch.einsum("ti,kei->tke", x, weight[:, None] - weight)  # of expert k, behind expert e
            place = torch.arange(4)
            wins = ((behind < 0) | ((behind == 0) & (place[:, None] <= place))).all(1, keepdim=True)
            dense = 1 / torch.where(wins, behind.exp(), float("inf")).sum(1)
        else:
            logits = self.gate(x)
            shares, picks = logits.softmax(-1).topk(1)
            dense = torch.zeros_like(logits).scatter(1, picks, shares)
        return self.back(torch.einsum("ti,eio,te->to", x, self.matrices, dense.roll(self.shift, -1)))


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokens") / "x.pt"
    torch.save({"x": torch.randn(13, 8, generator=torch.Generator().manual_seed(2))}, path)
    return str(path)


@pytest.mark.parametrize("hides_router", [False, True])
def test_counts_of_tokens_are_no_tie(hides_router: bool, tokens: str) -> None:
    right = check(Sorted().eval(), candidate=Dense(hides_router=hides_router).eval(), inputs=tokens)
    assert right.ok and right.coverage == 1.0
    assert not any(pair.reason and TIED in pair.reason for pair in right.pairs)
    assert not check(Sorted().eval(), candidate=Dense(hides_router=hides_router, shift=1).eval(), inputs=tokens).ok


def test_tensors_that_depend_on_a_tie_are_not_covered(tokens: str) -> None:
    """The other one of two experts that are alike is as good, and nobody sees which one was picked."""
    found = check(Sorted(alike=True).eval(), candidate=Dense(alike=True, hides_router=True).eval(), inputs=tokens)
    whole = {item.site for item in found.skipped if item.reason == f"all of it: {TIED}"}
    assert whole == {"back", "./mul.0"}, "of the modules of the untouched candidate, and of its program"
    assert not found.ok and found.too_little and found.coverage < 0.1
    assert not any("./" in pair.site for pair in found.pairs), "nothing is said of what was not judged"


class Grouped(nn.Module):
    """The kernel for products of the rows of each expert, which knows no float64."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(1)).bfloat16())

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return nn.functional.grouped_mm(x, self.matrices, offs=ends) * 2


def test_grouped_products_in_half_precision(tmp_path: Path) -> None:
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    torch.save({"x": x, "ends": torch.tensor([5, 5, 12], dtype=torch.int32)}, tmp_path / "x.pt")
    other = Grouped()
    other.matrices.data[2] *= 1.1
    assert check(Grouped().eval(), candidate=Grouped().eval(), inputs=str(tmp_path / "x.pt")).ok
    assert not check(Grouped().eval(), candidate=other.eval(), inputs=str(tmp_path / "x.pt")).ok


class _Routed(nn.Module):
    """Experts chosen among scores of which most are equal: those of the groups that are left out."""

    def __init__(self, by_sort: bool = False, shift: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.out = nn.Linear(16, 8), nn.Linear(16, 16)
        self.experts = nn.Parameter(torch.randn(8, 16, 16) * 0.2)
        self.by_sort, self.shift = by_sort, shift

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        best = scores.view(*scores.shape[:-1], 4, 2).amax(-1).argmax(-1, keepdim=True)
        keep = (torch.arange(8) // 2) == best
        scores = scores.masked_fill(~keep, 0.1)
        if self.by_sort:
            weights, places = scores.sort(dim=-1, descending=True, stable=True)
            weights, places = weights[..., :4], places[..., :4]
        else:
            weights, places = scores.topk(4, -1)
        experts = self.experts[(places + self.shift) % 8]
        return self.out((weights[..., None] * torch.einsum("bti,btkij->btkj", x, experts)).sum(-2))


@pytest.mark.parametrize(("shift", "is_ok"), [(0, True), (1, False)])
def test_equal_scores_may_be_chosen_in_any_order(shift: int, is_ok: bool) -> None:
    base, port = _Routed(), _Routed(by_sort=True, shift=shift)
    port.load_state_dict(base.state_dict())
    torch.manual_seed(1)
    found = check(base.eval(), candidate=port.eval(), inputs={"x": torch.randn(2, 6, 16)})
    assert found.ok is is_ok, found.not_ok_because
    if is_ok:
        assert headline(found).why == "every difference is explained by rounding or a tie"


class _Windows(nn.Module):
    """Attention inside of windows that are numbered by slices, as in Swin: other windows are hidden."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.scale = nn.Linear(8, 8), scale

    def forward(self, x: Tensor) -> Tensor:
        numbers = torch.zeros((1, 8), dtype=x.dtype)
        numbers[:, 2:4] = 1
        numbers[:, 4:] = 2
        apart = numbers.unsqueeze(1) - numbers.unsqueeze(2)
        hidden = apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)
        query = self.project(x)
        return (query @ query.transpose(1, 2) * self.scale + hidden).softmax(-1) @ query


def test_numbers_that_are_written_into_slices_have_no_rounding() -> None:
    """A floor with other windows in it would explain any mistake."""
    torch.manual_seed(1)
    x = torch.randn(2, 8, 8)
    found = check(_Windows(), candidate=_Windows(1.001), inputs={"x": x})
    last = found.results[-1]
    assert not last.agrees and last.exempt == 0 and last.snr_db > 40
    assert check(_Windows(), candidate=_Windows(), inputs={"x": x}).ok
