"""Reverse replay on small modules: what an op introduced, with its inputs' errors gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.capture.observers import run_program
from glassengine.judge.cases import module_cases
from glassengine.judge.replay.replay import Replay
from glassengine.numerics.exemptions import UNWRITTEN
from glassengine.numerics.float64 import ACCUMULATIONS
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.kinds import KnownValues
from glassengine.program import export_program, load_model
from glassengine.program.export.export import export_module
from glassengine.program.representation.naming import is_tensor_node, op_name
from glassengine.program.representation.program import Program
from glassengine.results import FLAGGED
from tests.corpus import corpus
from tests.corpus.corpus import Bench
from tests.corpus.right.variations import VARIATIONS, VariedSide


class Mixed(nn.Module):
    """A normalization with two more results, a product, a split, a top-k, a comparison, an op without bound."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 24)
        self.norm = nn.BatchNorm1d(24)
        self.register_buffer("table", torch.linspace(0, 1, 24))

    def forward(self, x: torch.Tensor) -> Any:
        y = self.norm(self.linear(x))
        left, right = y.split(12, -1)
        values, picks = (left * right).topk(3)
        return values, picks, (left > right), torch.digamma(y.abs() + self.table.square()), torch.rand_like(y)


class Observed:
    """A program of `Mixed` with the values of one run, as a candidate would have them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(6, 16).to(dtype)
        self.program: Program = export_module(Mixed().to(dtype).eval(), {"x": self.x})
        self.values: dict[str, torch.Tensor] = {}

        def keep(node: torch.fx.Node, value: Any) -> None:
            if is_tensor_node(node):
                self.values[node.name] = value

        run_program(self.program, {"x": self.x}, keep)

    def node(self, op: str, index: int = 0) -> torch.fx.Node:
        return [n for n in self.program.graph.nodes if op_name(n) == op and is_tensor_node(n)][index]

    def judge(
        self,
        node: torch.fx.Node,
        change: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
        *,
        compiled: bool = True,
        **others: torch.Tensor,
    ) -> Judgement | None:
        replay = Replay(self.program, compiled=compiled)
        replay.begin_step({"x": self.x}, {**self.values, **others})
        found = replay.judge(node, change(self.values[node.name]), None)
        return found.judgement if found is not None else None


@pytest.fixture(scope="module")
def single() -> Observed:
    return Observed()


@pytest.fixture(scope="module")
def half() -> Observed:
    return Observed(torch.bfloat16)


@pytest.mark.parametrize("compiled", [False, True])
def test_every_op_of_an_equal_run_is_identical(single: Observed, half: Observed, compiled: bool) -> None:
    for run in (single, half):
        nodes = [n for n in run.program.graph.nodes if n.name in run.values and op_name(n) != "rand_like"]
        found = {node.name: run.judge(node, compiled=compiled) for node in nodes}
        assert {name for name, one in found.items() if one is None or one.verdict != "identical"} == set()


@pytest.mark.parametrize("op", ["linear", "getitem", "mul", "abs"])
def test_an_error_of_the_op_is_wrong_by_floor_and_bound(half: Observed, op: str) -> None:
    found = half.judge(half.node(op), lambda value: value * 1.1)
    assert found is not None and found.verdict == "wrong"
    assert (
        found.noise_ratio is not None
        and found.noise_ratio > 10
        and found.bound_ratio is not None
        and found.bound_ratio > 1
    )


def test_errors_of_the_inputs_are_not_counted(single: Observed) -> None:
    product, split = single.node("mul"), single.node("getitem", 1)
    assert split.name in {source.name for source in product.all_input_nodes} or op_name(split) == "getitem"
    sources = {n.name: single.values[n.name] * 1.5 for n in product.all_input_nodes}
    inherited = torch.ops.aten.mul.Tensor(*[sources[n.name] for n in product.args])  # type: ignore[union-attr]
    found = single.judge(product, lambda _: inherited, **sources)
    assert found is not None and found.verdict == "identical"


def test_what_reads_and_makes_the_bits_of_the_baseline_is_proven_without_its_kernel(
    single: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = Replay(single.program, compiled=True)
    replay.begin_step({"x": single.x}, single.values)
    calls: list[str] = []
    run = replay.ops.called
    monkeypatch.setattr(replay.ops, "called", lambda claim: calls.append(claim.node.name) or run(claim))
    product, other = single.node("mul"), single.node("linear")
    nodes = [n for n in single.program.graph.nodes if is_tensor_node(n) and n.name in single.values]
    nodes = [n for n in nodes if op_name(n) != "rand_like"]
    found = {n.name: replay.judge(n, single.values[n.name], None, native=single.values[n.name]) for n in nodes}
    assert all(one is not None and one.judgement.verdict == "identical" for one in found.values())
    assert product.name not in calls and other.name in calls  # it reads an input, which was not compared
    proven = found[product.name]
    assert proven is not None
    torch.testing.assert_close(proven.predicted, single.values[product.name].double(), rtol=1e-6, atol=0)
    assert proven.again(single.values[product.name] * 1.1).verdict == "wrong"
    # An input that differs is no longer the baseline's: the op is computed on it.
    changed = {n.name: single.values[n.name] * 1.5 for n in product.all_input_nodes}
    replay.begin_step({"x": single.x}, {**single.values, **changed})
    calls.clear()
    after = replay.judge(product, single.values[product.name], None, native=single.values[product.name])
    assert calls == [product.name] and after is not None and after.judgement.verdict == "wrong"


def test_one_more_rounding_is_legal_for_another_kernel(half: Observed) -> None:
    """A fused kernel uses unrounded registers: a result may be off by a unit in the last place."""
    node = half.node("mul")
    found = half.judge(node, lambda value: (value.float() * (1 + 2.0**-8)).bfloat16())
    assert found is not None and found.verdict in ("identical", "rounding")


def test_f2_without_a_bound_the_floor_decides_far_beyond_rounding(single: Observed) -> None:
    found = [single.judge(single.node("digamma"), lambda v, e=e: v * (1 + e)) for e in (0.5, 1e-3, 1e-5, 1e-9)]
    assert [one.verdict for one in found if one is not None] == ["wrong", "wrong", "suspicious", "identical"]
    assert all(one is not None and one.bound_ratio is None for one in found)


def test_values_not_finite_count_in_padding(single: Observed) -> None:
    node = single.node("linear")
    broken = single.values[node.name].clone()
    broken[0, 3] = torch.nan
    valid = torch.ones(6, 1, dtype=torch.bool)
    valid[0] = False
    replay = Replay(single.program, compiled=True)
    replay.begin_step({"x": single.x}, single.values)
    found = replay.judge(node, broken, valid)
    assert found is not None and found.judgement.verdict == "wrong"
    assert found.judgement.reason is not None and "not finite" in found.judgement.reason
    garbage = single.values[node.name].clone()
    garbage[0] = 1e3
    clean = replay.judge(node, garbage, valid)
    assert clean is not None and clean.judgement.verdict == "identical"
    # What reads it is not to blame.
    after = {**single.values, node.name: broken}
    replay.begin_step({"x": single.x}, after)
    follower = next(n for n in single.program.graph.nodes if node in n.all_input_nodes)
    getitem = next((n for n in follower.users if op_name(n) == "getitem"), follower)
    assert replay.judge(getitem, single.values[getitem.name], valid) is None


def test_random_numbers_and_missing_inputs_are_not_judged(single: Observed) -> None:
    assert single.judge(single.node("rand_like")) is None
    replay = Replay(single.program, compiled=True)
    replay.begin_step({}, {})
    assert replay.judge(single.node("mul"), single.values[single.node("mul").name], None) is None


def test_a_choice_between_equal_values_is_a_tie_and_any_other_is_wrong(half: Observed) -> None:
    values, picks = (
        n for n in half.program.graph.nodes if op_name(n) == "getitem" and n.args[0].name.startswith("topk")
    )
    scores = half.values[half.node("mul").name].clone()
    scores[0, 0], scores[0, 1] = 50.0, 50.25
    chosen = scores.topk(3)
    swapped = chosen.indices.clone()
    swapped[0, 0], swapped[0, 1] = chosen.indices[0, 1], chosen.indices[0, 0]
    observed = {half.node("mul").name: scores, values.name: chosen.values}
    tie = half.judge(picks, lambda _: swapped, **observed)
    assert tie is not None and tie.verdict == "rounding" and tie.is_tie
    shifted = half.judge(picks, lambda _: (chosen.indices + 1) % 12, **observed)
    assert shifted is not None and shifted.verdict == "wrong"
    outside = half.judge(picks, lambda _: chosen.indices + 100, **observed)
    assert outside is not None and outside.verdict == "wrong"


def test_a_comparison_of_close_values_is_a_tie(half: Observed) -> None:
    node = half.node("gt")
    left, right = (half.values[source.name].clone() for source in node.all_input_nodes)
    left[0, 0], right[0, 0] = 1.0, 1.0
    sources = {source.name: value for source, value in zip(node.all_input_nodes, (left, right), strict=True)}
    honest = left > right
    flipped = honest.clone()
    flipped[0, 0] = True
    tie = half.judge(node, lambda _: flipped, **sources)
    assert tie is not None and tie.verdict == "rounding" and tie.is_tie
    wrong = half.judge(node, lambda _: ~honest, **sources)
    assert wrong is not None and wrong.verdict == "wrong"


def test_an_engine_in_a_coarser_dtype_than_the_baseline(single: Observed) -> None:
    """Weights and results in bfloat16 of a float32 program: rounding; 10 % more: wrong."""
    replay = Replay(single.program, compiled=True, dtype=torch.bfloat16)
    values = {k: v.bfloat16() if v.is_floating_point() else v for k, v in single.values.items()}
    replay.begin_step({"x": single.x.bfloat16()}, values)
    node = single.node("linear")
    own = torch.nn.functional.linear(single.x.bfloat16(), *(w.bfloat16() for w in _linear(single.program)))
    clean, wrong = replay.judge(node, own, None), replay.judge(node, (own * 1.1).bfloat16(), None)
    assert clean is not None and clean.judgement.verdict in ("identical", "rounding")
    assert wrong is not None and wrong.judgement.verdict == "wrong"


def test_reduced_accumulation_shows_unless_it_is_declared(single: Observed) -> None:
    """TF32: operands of a float32 product keep ten bits of mantissa."""

    def tf32(value: torch.Tensor) -> torch.Tensor:
        return (value.view(torch.int32) & -(1 << 13)).view(torch.float32)

    weight, bias = _linear(single.program)
    reduced = torch.nn.functional.linear(tf32(single.x), tf32(weight.detach()), bias.detach())
    node, verdicts = single.node("linear"), {}
    for name in ("float32", "tf32"):
        replay = Replay(single.program, compiled=True, accumulation=ACCUMULATIONS[name])
        replay.begin_step({"x": single.x}, single.values)
        found = replay.judge(node, reduced, None)
        assert found is not None
        verdicts[name] = found.judgement.verdict
        wrong = replay.judge(node, reduced * 1.1, None)
        assert wrong is not None and wrong.judgement.verdict == "wrong"
    assert verdicts == {"float32": "wrong", "tf32": "rounding"}


def _linear(program: Program) -> list[torch.Tensor]:
    weights = {program.weight_names()[name]: tensor for name, tensor in program.weights().items()}
    return [weights["linear.weight"], weights["linear.bias"]]


class Assembled(nn.Module):
    """A tensor put together in memory that holds whatever was there, as DeepSeek's keys are; one part is never set."""

    def forward(self, x: torch.Tensor) -> Any:
        whole = x.new_empty(x.shape[0], 12)
        whole[:, :8] = x * 2
        partly = whole + 0.0
        whole[:, 8:] = x[:, :4] + 1
        return whole * 3, partly


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_memory_that_nothing_has_written_is_not_judged_and_what_was_written_is(factor: float) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    model = load_model(Assembled().eval())
    program = export_program(model, inputs=[{"x": x}])
    bench = Bench("assembled/float32", model, program, module_cases([{"x": x}])[0])

    class Garbage(VariedSide):
        """Whatever the memory held, everywhere where nothing was written."""

        def _compute(self, node: torch.fx.Node, registers: dict[str, torch.Tensor]) -> Any:
            value = super()._compute(node, registers)
            if op_name(node) == "new_empty":
                return torch.full_like(value, 7e5)
            return value * factor if op_name(node) == "mul" and 3 in node.args else value

    nodes = {node.name: node.name for node in program.graph.nodes if is_tensor_node(node)}
    side = Garbage(program, nodes, VARIATIONS[0], Replay(program, compiled=True))
    (found,) = corpus.judge(bench, [side])[1:]
    assert ("wrong" in {pair.verdict for pair in found.pairs}) is (factor != 1.0)
    assert found.first_divergence is None or "mul" in str(found.first_divergence.node)
    assert [one.reason for one in found.skipped if "new_empty" in one.site] == ["memory not yet written"]


class Canceling(nn.Module):
    """Terms that nearly cancel, as branches of a network do that are added up."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu((x * 1.7 + y).float() * 0.5)


def _fused(x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> tuple[Program, dict[str, torch.Tensor]]:
    """The values of fused code: what is dumped is rounded once, and what comes next read the rounded product."""
    program = export_module(Canceling().eval(), {"x": x, "y": y})
    product, total, wide, half, relu = (n.name for n in program.graph.nodes if is_tensor_node(n))
    exact = x.double() * torch.tensor(1.7, dtype=torch.float64)
    rounded = exact.bfloat16()
    values = {product: rounded, total: (exact + y.double()).bfloat16()}
    again = (rounded.double() + y.double()).float()
    return program, values | {wide: again, half: again * 0.5, relu: torch.relu(again * 0.5 * factor)}


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, ("identical", "rounding")), (1.1, ("wrong",))])
def test_a_sum_that_is_computed_once_more_for_its_reader(factor: float, verdict: tuple[str, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 64, generator=generator).bfloat16()
    y = (-1.7 * x.float() * (1 + 0.01 * torch.randn(8, 64, generator=generator))).bfloat16()
    program, values = _fused(x, y, factor)
    replay = Replay(program, compiled=True)
    replay.begin_step({"x": x, "y": y}, values)
    found = {}
    for node in program.graph.nodes:
        if node.name in values:
            replayed = replay.judge(node, values[node.name], None)
            assert replayed is not None
            found[node.name] = replayed.judgement.verdict
    *before, last = found.values()
    assert set(before) <= {"identical", "rounding"}, found
    assert last in verdict, found


class Halves(nn.Module):
    """Memory that is written in part, as DeepSeek's keys are before their second half is known."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x.new_empty(x.shape[0], 2 * x.shape[1])
        made[:, : x.shape[1]] = x
        made[:, x.shape[1] :] = x * 2
        return made


@pytest.mark.parametrize(("broken", "is_wrong"), [(slice(4, 8), False), (slice(0, 1), True)])
def test_unwritten_memory_may_hold_anything(broken: slice, is_wrong: bool) -> None:
    x = torch.randn(3, 4)
    program = export_module(Halves().eval(), {"x": x})
    values = {}

    def keep(node: torch.fx.Node, value: Any) -> None:
        if is_tensor_node(node):
            values[node.name] = value.clone()

    run_program(program, {"x": x}, keep)
    first = next(node for node in program.graph.nodes if op_name(node) == "slice_scatter")
    values["new_empty" if "new_empty" in values else "empty"] = torch.zeros(3, 8)
    values[first.name][:, broken] = float("nan")
    written = torch.zeros(3, 8, dtype=torch.bool)
    written[:, :4] = True
    replay = Replay(program, compiled=True)
    replay.begin_step({"x": x}, values)
    found = replay.judge(first, values[first.name], written, KnownValues({UNWRITTEN: ~written}))
    assert found is not None and (found.judgement.verdict == "wrong") == is_wrong, found


class Unordered(nn.Module):
    """A router that does not care which of the chosen experts comes first; the other groups are hidden by -inf."""

    def forward(self, x: torch.Tensor) -> Any:
        hidden = x.masked_fill(torch.arange(8) >= 5, float("-inf"))
        values, picks = hidden.topk(3, dim=-1, sorted=False)
        return values, picks


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda chosen, order: chosen, "identical"),
        (lambda chosen, order: chosen[:, order], "rounding"),
        (lambda chosen, order: chosen[:, [0, 1, 1]], "wrong"),
        (lambda chosen, order: torch.cat([chosen[:, :2], chosen[:, 2:] * 0], -1), "wrong"),
    ],
)
def test_what_is_chosen_in_any_order(change: Callable[..., torch.Tensor], verdict: str) -> None:
    x = torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) + 1
    x[:, 0] = 1  # never chosen, so that index 0 is wrong everywhere
    program = export_module(Unordered().eval(), {"x": x})
    values: dict[str, torch.Tensor] = {}

    def keep(node: torch.fx.Node, value: Any) -> None:
        if is_tensor_node(node):
            values[node.name] = value

    run_program(program, {"x": x}, keep)
    replay = Replay(program, compiled=True)
    replay.begin_step({"x": x}, values)
    chosen = [n for n in program.graph.nodes if op_name(n) == "getitem" and n.args[0].name.startswith("topk")]
    assert len(chosen) == 2
    for node in chosen:
        found = replay.judge(node, change(values[node.name], [2, 0, 1]), None)
        assert found is not None and found.judgement.verdict == verdict, (node, found)
        assert found.judgement.is_tie == (verdict == "rounding")


class ReadsOut(nn.Module):
    """States times one column, as in Mamba: inductor fuses that with what makes these, which it does not round."""

    def forward(self, state: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        column = (c * 1.25).bfloat16()[:, 0:1][:, 0].unsqueeze(-1)
        return torch.matmul((state * 1.25).bfloat16(), column)


@pytest.mark.parametrize(("factor", "is_wrong"), [(1, False), (99, True)])
def test_a_product_of_one_column_may_read_what_is_not_rounded_yet(factor: int, is_wrong: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    # Terms of size 1 cancel, so that their rounding shows.
    state = 1 + 0.1 * torch.randn(2, 1, 16, generator=generator) + 1e-3 * torch.randn(2, 64, 16, generator=generator)
    c = 1 / state[:, :1] * torch.tensor([1.0, -1.0]).repeat(8)
    inputs = {"state": state, "c": c.repeat(1, 3, 1)}
    program = export_module(ReadsOut().eval(), inputs)
    values: dict[str, torch.Tensor] = {}
    run_program(program, inputs, lambda node, value: values.update({node.name: value}))
    (node,) = (n for n in program.graph.nodes if op_name(n) in ("matmul", "bmm"))
    wide = (state.double() * 1.25) @ (inputs["c"][:, :1].double().mT * 1.25) * factor
    replay = Replay(program, compiled=True)
    replay.begin_step(inputs, values)
    found = replay.judge(node, wide.bfloat16().reshape(values[node.name].shape), None)
    assert found is not None and (found.judgement.verdict in FLAGGED) is is_wrong, found


class SortsByExpert(nn.Module):
    def __init__(self, stable: bool) -> None:
        super().__init__()
        self.stable = stable

    def forward(self, x: torch.Tensor) -> Any:
        return torch.sort(x, dim=0, stable=self.stable)[1] if self.stable else x.sort(0)[1]


@pytest.mark.parametrize(
    ("stable", "order", "verdict"),
    [
        (False, [1, 3, 5, 0, 2, 4], "identical"),
        (False, [5, 1, 3, 4, 0, 2], "rounding"),
        (True, [5, 1, 3, 4, 0, 2], "wrong"),
        (False, [1, 3, 0, 5, 2, 4], "wrong"),
        (False, [1, 1, 5, 0, 2, 4], "wrong"),
        (False, [1, 3, 5, 0, 2, 9], "wrong"),
    ],
)
def test_equal_integers_are_sorted_in_any_order(stable: bool, order: list[int], verdict: str) -> None:
    experts = torch.tensor([2, 0, 2, 0, 2, 0])
    program = export_module(SortsByExpert(stable).eval(), {"x": experts})
    values: dict[str, torch.Tensor] = {}
    run_program(program, {"x": experts}, lambda node, value: values.update({node.name: value}))
    (node,) = (n for n in program.graph.nodes if op_name(n) == "getitem" and n.args[1] == 1)
    replay = Replay(program, compiled=True)
    replay.begin_step({"x": experts}, values)
    found = replay.judge(node, torch.tensor(order), None)
    assert found is not None and found.judgement.verdict == verdict, found


def test_an_input_that_does_not_fit_what_it_was_made_of_is_judged_where_it_is_made() -> None:
    x, y = torch.randn(8, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    program, values = _fused(x, y)
    names = [node.name for node in program.graph.nodes if is_tensor_node(node)]
    cut = {name: value[:4] if name != names[0] else value for name, value in values.items()}
    cut[names[-1]] = cut[names[-1]] * 1.5
    replay = Replay(program, compiled=True)
    replay.begin_step({"x": x, "y": y}, cut)
    last = next(node for node in program.graph.nodes if node.name == names[-1])
    found = replay.judge(last, cut[last.name], None)
    assert found is not None and found.judgement.verdict == "wrong"


class ReadsFolded(nn.Module):
    """Positions that are made of weights alone, repeated for each row, and a copy of a weight as it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.project = nn.Linear(256, 16)
        self.table = nn.Parameter(torch.randn(12, 256))

    def forward(self, x: torch.Tensor) -> Any:
        rows = x.shape[0]
        return self.project(self.table).repeat(rows, 1) + x[:, :1].repeat(12, 16), self.table[:, :3].repeat(rows, 1)


@pytest.mark.parametrize(
    ("index", "change", "is_wrong"),
    [
        (0, lambda value: value + 1e-7 * torch.randn(value.shape), False),  # a sum in another order
        (0, lambda value: value + 4e-5 * torch.randn(value.shape), True),
        (0, lambda value: value.roll(1, 1), True),
        (2, lambda value: value + 4e-7 * torch.randn(value.shape), True),  # nothing was rounded
    ],
)
def test_folded_constants_are_rounded_by_kernels_of_compilers(
    index: int, change: Callable[[torch.Tensor], torch.Tensor], is_wrong: bool
) -> None:
    x = torch.randn(3, 4)
    program = export_module(ReadsFolded().eval(), [{"x": x}, {"x": x[:2]}])
    values: dict[str, torch.Tensor] = {}
    run_program(program, {"x": x}, lambda node, value: values.update({node.name: value}))
    node = [node for node in program.graph.nodes if op_name(node) == "repeat"][index]
    replay = Replay(program, compiled=True)
    replay.begin_step({"x": x}, {})
    found = replay.judge(node, change(values[node.name]), None)
    assert found is not None
    assert (found.judgement.verdict in FLAGGED) is is_wrong
