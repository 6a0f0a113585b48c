"""What lies inside of a region; each explanation on a graph made by hand, and a mistake beside it that still shows."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from glassengine.diagnose import check
from glassengine.judge.cases import module_cases
from glassengine.judge.flat_graphs import flat_program, with_values
from glassengine.judge.pairing.by_value import pair_programs
from glassengine.judge.pieces import cut
from glassengine.judge.replay.expected import ReplayedTensor
from glassengine.judge.replay.replay import EXPLANATIONS, Cut, Replay, covered
from glassengine.program import export_program, load_model
from glassengine.program.representation.program import Program
from glassengine.results import FLAGGED


class Root(nn.Module):
    def __init__(self, written: str) -> None:
        super().__init__()
        self.written = written

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        spread = x.square().mean(-1, keepdim=True) + 0.1
        if self.written == "division":
            return {"y": (x / spread.sqrt()).tanh()}
        if self.written == "wrong division":
            return {"y": (x / (spread + 0.5).sqrt()).tanh()}
        return {"y": (x * spread.rsqrt()).tanh()}


def exported(written: str, inputs: list[dict[str, torch.Tensor]]) -> Program:
    return export_program(load_model(Root(written).eval()), inputs=inputs)


@pytest.mark.parametrize("written", ["division", "wrong division"])
def test_ops_that_the_candidate_lacks_are_inside_of_a_region(written: str) -> None:
    inputs = [{"x": torch.randn(3, 8, generator=torch.Generator().manual_seed(1))}]
    ours, theirs = exported("product", inputs), exported(written, inputs)
    pairs = pair_programs(ours, theirs, module_cases(inputs))
    found = {ours.sites.by_node[node][0].op: pair.candidate.op for node, pair in pairs.items()}
    assert "rsqrt" not in found and (found["mul"], found["tanh"]) == ("div", "tanh")
    inside = covered(ours, pairs)
    assert [(ours.sites.by_node[node][0].op, len(ends)) for node, ends in inside.items()] == [("rsqrt", 1)]


def test_a_result_is_never_inside() -> None:
    inputs = [{"x": torch.randn(3, 8)}]
    program = exported("product", inputs)
    everything = {site.node for site in program.sites if site.kind == "op"}
    assert covered(program, everything) == {}
    assert covered(program, everything - {program.output_nodes["y"]}) == {}
    assert covered(program, set()) == {}


def test_programs_of_the_same_ops_pair_without_being_run() -> None:
    inputs = [{"x": torch.randn(3, 8)}]
    pairs = pair_programs(exported("product", inputs), exported("product", inputs), [])
    assert {pair.method for pair in pairs.values()} == {"name+fingerprint"}


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after((self.before(x) * 0.4 + 0.3).tanh())


class ByLogistic(Gated):
    """tanh(x) as 2 sigmoid(2 x) - 1: nothing between the two products has a counterpart."""

    factor = 0.4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(2 * torch.sigmoid(self.before(x) * (2 * self.factor) + 0.6) - 1)


@pytest.mark.parametrize("factor", [0.4, 0.5])
def test_of_a_region_the_op_is_named_whose_mistake_makes_the_candidates_values(factor: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.save({"x": torch.randn(6, 8)}, tmp_path / "inputs.pt")
    baseline, port = Gated().eval(), ByLogistic().eval()
    port.load_state_dict(baseline.state_dict())
    port.factor = factor
    result = check(baseline, candidate=port, inputs=str(tmp_path / "inputs.pt"))
    # Other numbers before other ops are no evidence of a mistake.
    assert result.ok == (factor == 0.4), result.not_ok_because
    if factor != 0.4:
        first = result.first_divergence
        assert first is not None and (first.site, first.node) == ("./mul.0", "tanh")
        assert [hint.text for hint in first.hints] == ["factor of mul: 0.4 in the baseline, 0.5 in the candidate"]


aten: Any = torch.ops.aten
Build = Callable[[Callable[..., Node], Mapping[str, Node]], Node]
BFLOAT16 = {"dtype": torch.bfloat16}


def built(inputs: Mapping[str, Tensor], build: Build, weights: Mapping[str, Tensor] | None = None) -> Program:
    """Return a program of these inputs and weights; `build` gets what adds an op, and the placeholders by name."""
    graph, given = Graph(), {**inputs, **(weights or {})}
    nodes = {name: graph.placeholder(name) for name in given}
    graph.output((build(lambda op, *args, **kwargs: graph.call_function(op, args, kwargs), nodes),))
    module = GraphModule(nn.Module(), graph)
    with_values(module, list(given.values()))
    stored = {name: (name, tensor) for name, tensor in (weights or {}).items()}
    return flat_program(module, weights=stored, output_names=["out"])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Example:
    """A node of a program with what a candidate observed, and results of it that are right and wrong."""

    program: Program
    inputs: Mapping[str, Tensor]
    node: str
    right: Tensor
    wrong: Tensor
    observed: Mapping[str, Tensor] = field(default_factory=dict)
    own: Callable[[Node], Any] | None = None

    def judge(self, result: Tensor, how: Cut = Cut.OP, *, compiled: bool = True) -> ReplayedTensor | None:
        replay = Replay(self.program, cut=how, compiled=compiled)
        replay.begin_step(self.inputs, {**self.observed, self.node: result})
        (node,) = (node for node in self.program.graph.nodes if node.name == self.node)
        return replay.judge(node, result, None, piece_of=self.own)


def product() -> Example:
    inputs = {"x": drawn(8, 64), "w": drawn(64, 16, seed=1)}
    halves = inputs["x"][:, :32] @ inputs["w"][:32] + inputs["x"][:, 32:] @ inputs["w"][32:]
    wrong = halves.clone()
    wrong[:, 3] *= 1.001
    return Example(
        built(inputs, lambda op, n: op(aten.mm.default, n["x"], n["w"])), inputs, "mm_default", halves, wrong
    )


def unordered() -> Example:
    """The values that a router chose; it may give them in any order, and a chosen value may not be another one."""
    inputs = {"x": drawn(6, 8)}
    chosen = inputs["x"].topk(3).values
    wrong = chosen[:, [2, 0, 1]].clone()
    wrong[2, 0] = inputs["x"][2].min()

    def build(op: Callable[..., Node], n: Mapping[str, Node]) -> Node:
        return op(operator.getitem, op(aten.topk.default, n["x"], 3, -1, True, False), 0)

    return Example(built(inputs, build), inputs, "getitem", chosen[:, [2, 0, 1]], wrong)


def close() -> Example:
    """Two scores that differ by the rounding of their dtype change places; others do not."""
    x = drawn(4, 8).bfloat16()
    x[0, 2], x[0, 5] = 4.0, 4.03125
    right, wrong = x.argmax(-1), x.argmax(-1)
    right[0], wrong[0] = 2, 3
    program = built({"x": x}, lambda op, n: op(aten.argmax.default, n["x"], -1))
    return Example(program, {"x": x}, "argmax_default", right, wrong)


def canceling() -> Example:
    """A sum of terms that cancel was computed once more for its reader, from a product that was not rounded."""
    x = drawn(8, 64).bfloat16()
    y = (-1.7 * x.float() * (1 + 0.01 * drawn(8, 64, seed=1))).bfloat16()
    exact = x.double() * torch.tensor(1.7, dtype=torch.float64)
    product = exact.bfloat16()
    again = (product.double() + y.double()).float()

    def build(op: Callable[..., Node], n: Mapping[str, Node]) -> Node:
        total = op(aten.add.Tensor, op(aten.mul.Tensor, n["x"], 1.7), n["y"])
        return op(aten._to_copy.default, total, dtype=torch.float32)

    observed = {"mul_tensor": product, "add_tensor": (exact + y.double()).bfloat16()}
    inputs = {"x": x, "y": y}
    return Example(built(inputs, build), inputs, "_to_copy_default", again, again * 1.1, observed)


def folded() -> Example:
    """A table that is made of weights alone was summed in another order before it was repeated."""
    x, weights = drawn(3, 4), {"table": drawn(12, 256), "w": drawn(256, 16, seed=1)}
    made = (weights["table"].double() @ weights["w"].double()).float()

    def build(op: Callable[..., Node], n: Mapping[str, Node]) -> Node:
        return op(aten.repeat.default, op(aten.mm.default, n["table"], n["w"]), [2, 1])

    right = made.repeat(2, 1)
    program = built({"x": x}, build, weights)
    return Example(program, {"x": x}, "repeat_default", right, right + 1e-4 * drawn(24, 16, seed=2))


def by_hand(root: float = math.sqrt(2.0)) -> Example:
    """gelu that a candidate writes out in bfloat16, rightly or by another root than that of 2."""
    x = drawn(16, 64).bfloat16()
    ours = built({"x": x}, lambda op, n: op(aten.gelu.default, n["x"]))

    def build(op: Callable[..., Node], n: Mapping[str, Node]) -> Node:
        share = op(aten.add.Tensor, op(aten.erf.default, op(aten.div.Tensor, n["x"], root)), 1.0)
        return op(aten.mul.Tensor, op(aten.mul.Tensor, n["x"], 0.5), share)

    theirs = built({"x": x}, build)
    (last,) = theirs.graph.output_node().all_input_nodes
    made = (x * 0.5) * (torch.erf(x / root) + 1.0)
    return Example(ours, {"x": x}, "gelu_default", made, made, own=lambda _: cut([last], {"x": x}, {"x"}))


EXAMPLES = {
    "as_read": product,
    "in_any_order": unordered,
    "another_choice": close,
    "computed_again": canceling,
    "weights_folded": folded,
}


def test_every_explanation_has_an_example_and_says_its_proof() -> None:
    assert [one.__name__ for one in EXPLANATIONS] == [*EXAMPLES, "written_out"]
    assert all(one.__doc__ for one in EXPLANATIONS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_explanation_does_not_excuse_a_mistake_beside_it(name: str) -> None:
    example = EXAMPLES[name]()
    right, wrong = example.judge(example.right), example.judge(example.wrong)
    assert right is not None and right.explanation == name, right
    assert right.judgement.verdict in ("identical", "rounding")
    assert wrong is not None and wrong.judgement.verdict in FLAGGED, wrong
    assert right.judgement.is_tie is (name in ("in_any_order", "another_choice"))


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "as_read"])
def test_nothing_but_rounding_is_granted_to_the_same_kernels(name: str) -> None:
    example = EXAMPLES[name]()
    found = example.judge(example.right, compiled=False)
    assert found is not None and found.judgement.verdict in FLAGGED, found


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("root", "is_right"), [(math.sqrt(2.0), True), (math.sqrt(2.2), False)])
def test_an_activation_is_written_out_where_float64_makes_the_same(root: float, is_right: bool, compiled: bool) -> None:
    example = by_hand(root)
    found = example.judge(example.right, compiled=compiled)
    assert found is not None
    assert (found.explanation, found.judgement.verdict == "rounding") == (
        ("written_out", True) if is_right else ("as_read", False)
    )
    # Its own ops are right, and it is not what they make.
    for broken in (example.right * 1.1, example.right.where(example.right < 2.0, torch.inf)):
        other = example.judge(broken, compiled=compiled)
        assert other is not None and other.judgement.verdict in FLAGGED, other
    # Without the candidate's program there is no proof.
    example.own = None
    alone = example.judge(example.right, compiled=compiled)
    assert alone is not None and alone.judgement.verdict in FLAGGED


def chain(how: Cut) -> Replay:
    """x -> sin -> mul -> exp -> tanh."""
    inputs = {"x": drawn(8, 32)}

    def build(op: Callable[..., Node], n: Mapping[str, Node]) -> Node:
        wave = op(aten.mul.Tensor, op(aten.sin.default, n["x"]), 0.5)
        return op(aten.tanh.default, op(aten.exp.default, wave))

    return Replay(built(inputs, build), cut=how)


SEEN = {"sin_default", "exp_default", "tanh_default"}
METHODS = {Cut.OP: "reverse replay", Cut.REGION: "reverse replay", Cut.SEGMENT: "segment"}


@pytest.mark.parametrize("how", Cut)
@pytest.mark.parametrize("error", [0.0, 1e-3])
def test_a_piece_begins_where_the_candidate_was_observed(how: Cut, error: float) -> None:
    replay, x = chain(how), drawn(8, 32)
    sine = torch.sin(x) * 1.5  # what comes in is not the piece's doing
    power = torch.exp(sine * 0.5) * (1 + error)
    values = {"sin_default": sine, "exp_default": power, "tanh_default": torch.tanh(power)}
    replay.begin_step({"x": x}, values)
    nodes = {node.name: node for node in replay.program.graph.nodes}
    found = {name: replay.judge(nodes[name], value, None) for name, value in values.items()}
    verdicts = {name: None if one is None else one.judgement.verdict for name, one in found.items()}
    of_region = None if how is Cut.OP else "wrong" if error else "identical"
    assert verdicts == {"sin_default": "wrong", "exp_default": of_region, "tanh_default": "identical"}
    assert replay.method == METHODS[how]
    assert replay.inside(SEEN) == ({} if how is Cut.OP else {"mul_tensor": {"exp_default"}})
    allowed = replay.allowed(nodes["tanh_default"], values["tanh_default"])
    assert (allowed is None) is (how is Cut.SEGMENT)
