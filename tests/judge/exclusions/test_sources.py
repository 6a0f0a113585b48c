"""Each source of exclusions: what it marks, what depends on that, and what does not; undefined casts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from glassengine.diagnose import check
from glassengine.judge.exclusions.masked import HiddenRows
from glassengine.judge.exclusions.perturbation import Source
from glassengine.judge.exclusions.sources import Draws, Exclusions, UndefinedCasts, Unwritten
from glassengine.judge.exclusions.ties import Ties
from glassengine.numerics.exemptions import DRAWN, PADDING, TIES, UNWRITTEN, Ledger
from glassengine.numerics.verdict import Reference
from tests.judge.exclusions.test_masked import left_out

aten = torch.ops.aten
Values = dict[Node, list[Any]]


def run(graph: Graph, given: Mapping[str, Tensor], noise: float = 0.0) -> Values:
    """Return the values of all nodes in float64, in float32, and of one run with noise in the inputs."""
    env: Values = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            x = given[node.name]
            is_float = x.is_floating_point()
            env[node] = [x.double(), x, x.double() * (1 + noise)] if is_float else [x, x, x]
        elif node.op == "call_function":
            each = []
            for lane in range(3):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n, lane=lane: env[n][lane])
                each.append(node.target(*args, **kwargs))
            env[node] = each
        if node in env:
            node.meta["val"] = env[node][1]
    return env


def again(env: Values) -> Callable[[Node, Mapping[Node, Any]], Any]:
    def once_more(node: Node, others: Mapping[Node, Any]) -> Any:
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda n: others[n] if n in others else env[n][0]
        )
        return node.target(*args, **kwargs)  # type: ignore[operator]

    return once_more


def excluded(
    build: Callable[[Graph, dict[str, Node]], dict[str, Node]],
    sources: list[Source],
    *,
    noise: float = 0.0,
    **given: Tensor,
) -> dict[str, dict[str, Any]]:
    """Return what is excluded of the named nodes of a graph, by reason."""
    graph = Graph()
    named = build(graph, {name: graph.placeholder(name) for name in given})
    graph.output(tuple(named.values()))
    env = run(graph, given, noise)
    exclusions = Exclusions(sources, again(env))
    found: dict[str, dict[str, Any]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        exclusions.visit(node, env)
        for name, wanted in named.items():
            exact = env[node][0]
            if wanted is node and isinstance(exact, Tensor):
                masks = exclusions.of(node, env, None, torch.float32).by_reason
                found[name] = {reason: mask.expand(exact.shape).tolist() for reason, mask in masks.items()}
    return found


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    return graph.call_function(target, args, kwargs)


def test_an_undefined_cast_is_followed_until_it_is_dropped() -> None:
    def build(graph: Graph, x: dict[str, Node]) -> dict[str, Node]:
        logarithm = call(graph, aten.log.default, x["x"])
        cast = call(graph, aten._to_copy.default, logarithm, dtype=torch.int64)
        plus = call(graph, aten.add.Tensor, cast, 1)
        small = call(graph, aten.lt.Scalar, x["x"], 1.0)
        kept = call(graph, aten.where.self, small, x["other"], plus)
        read = call(graph, aten.where.self, small, plus, x["other"])
        return {"cast": cast, "plus": plus, "kept": kept, "read": read, "small": small}

    given = {"x": torch.tensor([0.0, 2.0, 9.0]), "other": torch.tensor([7, 7, 7])}
    found = excluded(build, [UndefinedCasts()], **given)
    first = {"undefined casts": [True, False, False]}
    assert found == {"cast": first, "plus": first, "kept": {}, "read": first, "small": {}}


@pytest.mark.parametrize("hides", [-1e4, -1e9, -math.inf])
def test_a_row_that_sees_no_key_is_followed_and_other_rows_are_not(hides: float) -> None:
    def build(graph: Graph, x: dict[str, Node]) -> dict[str, Node]:
        scores = call(graph, aten.add.Tensor, x["scores"], x["mask"])
        shares = call(graph, aten._softmax.default, scores, -1, False)
        mixed = call(graph, aten.mm.default, shares, x["values"])
        other = call(graph, aten.mul.Tensor, x["values"], 2.0)
        return {"scores": scores, "shares": shares, "mixed": mixed, "other": other}

    mask = torch.tensor([[hides, hides, hides], [0.0, hides, hides], [0.0, 0.0, 0.0]])
    given = {"scores": torch.randn(3, 3), "mask": mask, "values": torch.randn(3, 2)}
    found = excluded(build, [HiddenRows()], **given)
    assert found["scores"] == found["other"] == {}
    assert found["shares"] == {"masked rows": [[True] * 3, [False] * 3, [False] * 3]}
    assert found["mixed"] == {"masked rows": [[True] * 2, [False] * 2, [False] * 2]}


def test_a_tensor_of_which_nothing_would_be_left_is_judged() -> None:
    def build(graph: Graph, x: dict[str, Node]) -> dict[str, Node]:
        return {"shares": call(graph, aten._softmax.default, x["mask"], -1, False)}

    assert excluded(build, [HiddenRows()], mask=torch.full((2, 3), -1e9)) == {"shares": {}}


@pytest.mark.parametrize(("gap", "is_tie"), [(1e-9, True), (0.5, False)])
def test_a_tie_is_followed_through_what_it_picks(gap: float, is_tie: bool) -> None:
    def build(graph: Graph, x: dict[str, Node]) -> dict[str, Node]:
        place = call(graph, aten.argmax.default, x["scores"], -1)
        picked = call(graph, aten.index_select.default, x["table"], 0, place)
        same = call(graph, aten.mul.Tensor, picked, 0.0)
        return {"place": place, "picked": picked, "same": same}

    scores = torch.tensor([[1.0, 3.0, 0.0], [2.0, 1.0, 2.0 - gap]])
    given = {"scores": scores.double().float(), "table": torch.tensor([[1.0], [2.0], [3.0]])}
    graph = Graph()
    x = {name: graph.placeholder(name) for name in given}
    named = build(graph, x)
    graph.output(tuple(named.values()))
    env = run(graph, given)
    env[x["scores"]] = [scores.double(), scores, scores.double() + torch.tensor([[0.0] * 3, [1e-7, 0.0, -1e-7]])]
    exclusions = Exclusions([Ties()], again(env))
    masks: dict[str, list[Any]] = {}
    for name, node in named.items():
        exclusions.visit(node, env)
        tied = exclusions.of(node, env, None, torch.float32).tied
        masks[name] = [] if tied is None else tied.flatten().tolist()
    assert masks["place"] == masks["picked"] == ([False, True] if is_tie else [])
    assert masks["same"] == [], "what comes to the same is no tie"


def test_unwritten_memory_counts_again_where_it_is_overwritten() -> None:
    def build(graph: Graph, x: dict[str, Node]) -> dict[str, Node]:
        memory = call(graph, aten.empty.memory_format, [3])
        written = call(graph, aten.slice_scatter.default, memory, x["x"], 0, 0, 2)
        doubled = call(graph, aten.mul.Tensor, written, 2.0)
        above = call(graph, aten.gt.Scalar, doubled, 0.0)
        taken = call(graph, aten.slice.Tensor, doubled, 0, 0, 2)
        like = call(graph, aten.zeros_like.default, memory)
        return {"memory": memory, "doubled": doubled, "above": above, "taken": taken, "like": like}

    found = excluded(build, [Unwritten()], x=torch.tensor([1.0, -2.0]))
    last = {UNWRITTEN: [False, False, True]}
    everything = {UNWRITTEN: [True] * 3}
    assert found == {"memory": everything, "doubled": last, "above": last, "taken": {}, "like": {}}


def test_all_that_reads_a_draw_depends_on_it_as_a_whole() -> None:
    """Two draws may fall on one side of a threshold: no other value tells that nothing depends on them."""

    def build(graph: Graph, x: dict[str, Node]) -> dict[str, Node]:
        drawn = call(graph, aten.rand.default, [2])
        kept = call(graph, aten.gt.Scalar, drawn, -1.0)
        dropped = call(graph, aten.where.ScalarOther, kept, x["x"], 0.0)
        size = call(graph, aten.ones_like.default, drawn)
        beside = call(graph, aten.mul.Tensor, x["x"], size)
        return {"drawn": drawn, "dropped": dropped, "beside": beside}

    whole = {DRAWN: [True, True]}
    found = excluded(build, [Draws()], x=torch.tensor([1.0, -2.0]))
    assert found == {"drawn": whole, "dropped": whole, "beside": {}}


def test_a_value_that_a_candidate_chose_settles_choices_and_nothing_else() -> None:
    graph = Graph()
    drawn, memory = call(graph, aten.rand.default, [2]), call(graph, aten.empty.memory_format, [2])
    both = call(graph, aten.add.Tensor, drawn, memory)
    env = run(graph, {})
    exclusions = Exclusions([Unwritten(), Draws()], again(env))
    for node in (drawn, memory):
        exclusions.visit(node, env)
        exclusions.of(node, env, None, torch.float32)
        exclusions.force(node)
    exclusions.visit(both, env)
    assert exclusions.of(both, env, None, torch.float32).by_reason.keys() == {UNWRITTEN}
    carried = exclusions.carried(both)
    assert carried.keys() == {UNWRITTEN}
    following = Exclusions([Unwritten(), Draws()], again(env))
    following.carry(both, carried)
    assert following.of(both, env, None, torch.float32).by_reason.keys() == {UNWRITTEN}


def test_unwritten_memory_and_padding_are_reasons_of_their_own() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    memory = call(graph, aten.empty.memory_format, [2, 2])
    node = call(graph, aten.where.ScalarOther, x, memory, 1.0)
    env = run(graph, {"x": torch.tensor([[False, True], [False, False]])})
    exclusions = Exclusions([Unwritten()], again(env))
    for one in (memory, node):
        exclusions.visit(one, env)
    real = torch.tensor([[True], [False]])
    found = exclusions.of(node, env, real, torch.float32)
    assert found.by_reason.keys() == {PADDING, UNWRITTEN} and found.tied is None
    assert found.valid is not None and found.valid.tolist() == [[True, False], [False, False]]
    ledger = Ledger()
    ledger.add("where", 4, found.by_reason)
    assert {one.reason: one.num_elements for one in ledger.exemptions()} == {PADDING: 2, UNWRITTEN: 1}


def test_an_element_with_several_reasons_is_counted_once() -> None:
    ledger = Ledger()
    ledger.add("x", 3, {PADDING: torch.tensor([True, True, False]), TIES: torch.tensor([False, True, True])})
    assert sum(one.num_elements for one in ledger.exemptions()) == 3


# Of each source: what builds a tensor of which the first row is excluded, and what it reads.
ROWS: dict[str, tuple[Source, dict[str, Tensor]]] = {
    "undefined casts": (UndefinedCasts(), {"x": torch.tensor([[math.inf] * 3, [2.0, 5.0, 3.0]])}),
    "masked rows": (HiddenRows(), {"x": torch.tensor([[-1e9] * 3, [2.0, 1.0, -1e9]])}),
    "unwritten memory": (Unwritten(), {"x": torch.tensor([[2.0, 1.0, 5.0]])}),
    "ties": (Ties(), {"x": torch.tensor([[1.0, 1.0 + 2.0**-23, 0.0], [0.0, 2.0, 9.0]])}),
}


def first_row_excluded(graph: Graph, x: Node, kind: str) -> Node:
    if kind == "undefined casts":
        return call(graph, aten.mul.Tensor, call(graph, aten._to_copy.default, x, dtype=torch.int32), 0.5)
    if kind == "masked rows":
        return call(graph, aten.mul.Tensor, call(graph, aten._softmax.default, x, -1, False), 2.0)
    if kind == "unwritten memory":
        memory = call(graph, aten.empty.memory_format, [2, 3])
        return call(graph, aten.exp.default, call(graph, aten.slice_scatter.default, memory, x, 0, 1, 2))
    one_hot = call(graph, aten.eq.Tensor, call(graph, aten.argmax.default, x, -1, True), torch.arange(3))
    return call(graph, aten.where.ScalarOther, one_hot, x, 7.0)


@pytest.mark.parametrize("kind", ROWS)
def test_a_mistake_in_what_is_excluded_is_none_and_one_beside_it_is(kind: str) -> None:
    source, given = ROWS[kind]
    graph = Graph()
    node = first_row_excluded(graph, graph.placeholder("x"), kind)
    env = run(graph, given, noise=1e-7)
    exclusions = Exclusions([source], again(env))
    for one in graph.nodes:
        if one.op == "call_function":
            exclusions.visit(one, env)
            found = exclusions.of(one, env, None, torch.float32) if isinstance(env[one][0], Tensor) else None
    assert found is not None and list(found.by_reason) == [kind]
    exact, native, *noisy = env[node]
    reference = Reference(exact, native, noisy, dtype=torch.float32, valid=found.valid, tied=found.tied)
    right = torch.where(exact.isfinite(), exact, 0.0).float()
    for row, is_mistake in ((0, False), (1, True)):
        candidate = right.clone()
        candidate[row, 1] += 0.25
        assert (reference.judge(candidate).verdict == "wrong") is is_mistake
    assert reference.judge(right).verdict in ("identical", "rounding")


class Drops(nn.Module):
    """A logarithm of 0 that is cast, and random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        bucket = torch.where(x < 0.5, 7, (x.log() * 3).to(torch.int64))
        return bucket + 0 * torch.rand(4)


def test_a_check_counts_what_it_left_out(tmp_path: Path) -> None:
    torch.save({"x": torch.tensor([0.0, 1.0, 2.0, 5.0])}, tmp_path / "x.pt")
    found = check(Drops().eval(), candidate=Drops().eval(), inputs=str(tmp_path / "x.pt"))
    assert found.ok
    counted = {one.reason: one for one in found.exemptions}
    assert counted["undefined casts"].num_elements == 3, "the logarithm, its product and the number it is cast to"
    assert counted["random"].num_elements == 4 and counted["random"].largest_site == "./rand.0"
    assert all(0 < one.share < 1 for one in found.exemptions) and found.num_elements
    assert json.loads(json.dumps(found.to_dict()))["exemptions"][0]["num_elements"] > 0


class Buffer(nn.Module):
    """Doubles a buffer of which it has written the first half, and returns powers of that half, or one element more."""

    def __init__(self, *, factor: float = 2.0, ends: int = 2) -> None:
        super().__init__()
        self.factor, self.ends = factor, ends

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.empty(4)
        memory[:2] = x
        return (memory * self.factor).exp()[: self.ends]


def test_arithmetic_on_unwritten_memory_is_no_mistake_and_hides_none(tmp_path: Path) -> None:
    torch.save({"x": torch.tensor([1.0, 2.0])}, tmp_path / "x.pt")
    inputs = str(tmp_path / "x.pt")
    right = check(Buffer().eval(), candidate=Buffer().eval(), inputs=inputs)
    assert right.ok and {one.reason for one in right.exemptions} == {"unwritten memory"}
    assert not check(Buffer().eval(), candidate=Buffer(factor=2.1).eval(), inputs=inputs).ok
    whole = check(Buffer(ends=3).eval(), candidate=Buffer(ends=3).eval(), inputs=inputs)
    assert not any(pair.verdict == "wrong" for pair in whole.pairs)
    assert not check(Buffer(ends=3).eval(), candidate=Buffer(factor=2.1, ends=3).eval(), inputs=inputs).ok


class Filled(nn.Module):
    """Fills a buffer in two halves, and goes on with it."""

    def __init__(self, *, factor: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.factor = nn.Linear(4, 3), factor

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.empty(3, 4)
        memory[:, :2] = x.sin()
        memory[:, 2:] = x.cos()
        return self.last(memory.exp() * self.factor)


def test_a_buffer_that_is_written_counts_in_full(tmp_path: Path) -> None:
    torch.save({"x": torch.tensor([[0.1, 0.2], [0.3, 0.7], [1.1, 2.3]])}, tmp_path / "x.pt")
    inputs = str(tmp_path / "x.pt")
    right = check(Filled().eval(), candidate=Filled().eval(), inputs=inputs)
    assert right.ok
    memory, part = 3 * 4, 3 * 2
    assert [one.num_elements for one in right.exemptions] == [memory + 3 * part], "allocated, and written in part"
    wrong = check(Filled().eval(), candidate=Filled(factor=2.1).eval(), inputs=inputs)
    assert not wrong.ok and {found.site for found in wrong.origins} == {"./mul.0"}


class Noisy(nn.Module):
    """Scales random numbers, which every run draws anew."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return (x + torch.rand(4)) * self.factor


def test_below_a_draw_a_replay_judges_and_nothing_else(tmp_path: Path) -> None:
    torch.save({"x": torch.tensor([3.0, 1.0, 2.0, 5.0])}, tmp_path / "x.pt")
    inputs = str(tmp_path / "x.pt")
    right = check(Noisy().eval(), candidate=Noisy().eval(), inputs=inputs)
    assert not any(pair.verdict in ("suspicious", "wrong") for pair in right.pairs)
    assert not right.results, "no result is compared with what another run drew"
    wrong = check(Noisy().eval(), candidate=Noisy(2.1).eval(), inputs=inputs)
    assert not wrong.ok and [found.site for found in wrong.origins] == ["./mul.0"]


class Buckets(nn.Module):
    """Relative positions as T5 has them: small distances as they are, the logarithm of large ones."""

    def forward(self, distance: torch.Tensor) -> dict[str, torch.Tensor]:
        large = 2 + torch.log(distance.float() / 2).to(torch.int64)
        capped = torch.minimum(large, torch.full_like(large, 3))
        return {"capped": capped, "bucket": torch.where(distance < 2, distance, capped)}


def undefined(module: nn.Module, **inputs: torch.Tensor) -> dict[str, list[Any]]:
    return {name: mask.tolist() for name, mask in left_out(UndefinedCasts(), module, **inputs).items()}


def test_discarded_undefined_casts_leave_no_trace() -> None:
    found = undefined(Buckets(), distance=torch.tensor([0, 1, 2, 40]))
    first = [True, False, False, False]
    after = ("_to_copy.1", "add.0", "minimum.0")
    before = ("_to_copy.0", "div.0", "log.0")
    assert found == dict.fromkeys([*before, *after], first)


class Read(nn.Module):
    """Logarithms that are cast, one of which is read by somebody else too."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        scale = torch.log(torch.tensor(4.0))
        cast, read = (x / 2).log() / scale, (x * 3).log()
        return [cast.to(torch.int64), torch.ceil(cast).to(torch.int64), read.to(torch.int64), read.sum()]


def test_what_is_made_for_the_cast_alone_does_not_count_and_what_others_read_does() -> None:
    found = undefined(Read(), x=torch.tensor([0.0, 5.0]))
    assert set(found) == {"div.0", "log.1", "div.1", "ceil.0", "_to_copy.0", "_to_copy.1", "_to_copy.2"}
    assert all(mask == [True, False] for mask in found.values())


class Halves(nn.Module):
    """Of each place one cast is undefined, and never both."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x * 2
        return [x.log().to(torch.int64), (1 - x).log().to(torch.int64)]


def test_values_that_a_cast_can_hold_count() -> None:
    found = undefined(Halves(), x=torch.tensor([0.0, 0.25]))
    assert "mul.0" not in found
    assert found["log.0"] == [True, False]


def test_nothing_is_undefined_without_an_infinity() -> None:
    assert undefined(Buckets(), distance=torch.tensor([1, 2, 3])) == {}


class Casts(nn.Module):
    def forward(self, x: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
        whole = x.to(torch.int32)
        return [whole.sum(), table[whole.clamp(0, 3).long()], x.argsort(), x.isinf().to(torch.int64)]


def test_numbers_too_large_and_nan_are_undefined_and_orders_are_not() -> None:
    x = torch.tensor([1.0, float("nan"), 3e9, -2.0, 2147483000.0])
    found = undefined(Casts(), x=x, table=torch.arange(8.0).reshape(4, 2) + 1)
    cast = [False, True, True, False, False]
    assert found["_to_copy.0"] == cast
    assert found["sum.0"] is True
    assert [any(row) for row in found["index.0"]] == cast
    assert not any("argsort" in name or "sort" in name or "isinf" in name for name in found)


class Positions(nn.Module):
    """Relative positions in buckets of a table, written in one way or another."""

    def __init__(self, *, clamps: bool = False, far: float = 16.0) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 3, generator=torch.Generator().manual_seed(1)))
        self.clamps, self.far = clamps, far

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        size = distance.float().clamp(min=1) if self.clamps else distance.float()
        large = 2 + (torch.log(size / 2) / math.log(self.far / 2) * 2).to(torch.int64)
        return self.table[torch.where(distance < 2, distance, large.clamp(max=3))]


@pytest.mark.parametrize("clamps", [(False, True), (True, False)])
def test_a_logarithm_that_is_kept_from_zero_is_no_mistake(clamps: tuple[bool, bool], tmp_path: Path) -> None:
    torch.save({"distance": torch.arange(12).reshape(3, 4)}, tmp_path / "x.pt")
    ours, theirs = (Positions(clamps=one).eval() for one in clamps)
    found = check(ours, candidate=theirs, inputs=str(tmp_path / "x.pt"))
    assert found.ok and found.coverage == 1.0
    listed = {item.site for item in found.skipped if "a cast to integers" in item.reason}
    assert "./log.0" in listed
    wrong = Positions(clamps=clamps[1], far=64.0).eval()
    assert not check(ours, candidate=wrong, inputs=str(tmp_path / "x.pt")).ok
