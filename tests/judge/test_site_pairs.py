"""Which ops of two programs stand in the same place, and walks between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from glassengine.diagnose import check
from glassengine.judge.site_pairs import by_value, difference, down, in_order, pair_sites, readers_of, up, walk
from glassengine.program import Program, export_program, load_model
from glassengine.program.onnx.function import OnnxFunction
from glassengine.program.representation.naming import op_name


class Sums(nn.Module):
    def __init__(self, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.compute(a, b)


def exported(compute: Callable[[Tensor, Tensor], Tensor]) -> Program:
    inputs = {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}
    return export_program(load_model(Sums(compute)), inputs=[inputs])


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        pytest.param(
            lambda a, b: (a + b) + b,
            lambda a, b: (a - b) + b,
            {"add.0": "sub.0", "add.1": "add.0"},
            id="the first of two like ops became another one",
        ),
        pytest.param(
            lambda a, b: ((a + b) + b).tanh(),
            lambda a, b: (a.tanh() + b) + b,
            {"add.0": "add.0", "tanh.0": "add.1"},
            id="another order is no replacement, but for the results",
        ),
    ],
)
def test_an_op_that_was_replaced_shifts_no_name(
    ours: Callable[[Tensor, Tensor], Tensor], theirs: Callable[[Tensor, Tensor], Tensor], expected: dict[str, str]
) -> None:
    pairs, _, _ = pair_sites(exported(ours), exported(theirs))
    found = {pair.baseline.name.partition("/")[2]: pair.candidate.name.partition("/")[2] for pair in pairs}
    assert {name: found.get(name) for name in expected} == expected


def test_arguments_of_a_function_of_ours_are_told_by_name() -> None:
    """The ops of an ONNX file have no schema."""

    def normalized(x: Tensor, eps: float) -> Tensor:
        return x / (x.square().mean() + eps).sqrt()

    graph, target = torch.fx.Graph(), OnnxFunction(normalized, "rms_norm")
    x = graph.placeholder("x")
    ours, theirs = (graph.call_function(target, (x, eps)) for eps in (1e-5, 1e-2))
    assert difference(ours, theirs) == "eps: 1e-05 in the baseline, 0.01 in the candidate"


def test_a_default_that_is_spelled_out_is_no_difference() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    given: tuple[tuple[Any, ...], ...] = ((x, [2, 0]), (x, [2, 0], "constant"), (x, [2, 0], "circular"))
    one, same, other = (graph.call_function(torch.ops.aten.pad.default, args) for args in given)
    assert difference(one, same) is None
    assert difference(one, other) == "mode: constant in the baseline, circular in the candidate"


class Shares(nn.Module):
    def __init__(self, *, axis: int = -1, is_named: bool = False, only_one: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.axis, self.is_named, self.only_one = axis, is_named, only_one

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).tanh() * 2
        shares = torch.softmax(self.last(hidden), self.axis)
        if self.only_one:
            return shares
        return {"shares": shares, "hidden": hidden} if self.is_named else (shares, hidden)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("inputs") / "inputs.pt"
    torch.save({"x": torch.randn(4, 6, generator=torch.Generator().manual_seed(1))}, path)
    return str(path)


@pytest.mark.parametrize("axis", [-1, 0])
def test_results_of_other_names_are_judged(axis: int, inputs: str) -> None:
    baseline, candidate = Shares(is_named=True).eval(), Shares(axis=axis).eval()
    result = check(baseline, candidate=candidate, inputs=inputs, min_coverage=0.5)
    assert result.ok == (axis == -1), result.not_ok_because
    assert "./softmax.0" in {pair.site for pair in result.pairs if pair.level == "candidate"}
    if axis == 0:
        assert result.first_divergence is not None and result.first_divergence.site == "./softmax.0"


def test_other_numbers_of_results_pair_by_what_they_hold(inputs: str) -> None:
    result = check(Shares(is_named=True).eval(), candidate=Shares(only_one=True).eval(), inputs=inputs)
    assert result.standing == "too little judged"
    assert result.not_ok_because is not None and result.not_ok_because.startswith("the candidate returns no ")
    assert all(one.agrees for one in result.results)


def test_results_pair_by_what_they_are_where_names_and_numbers_differ() -> None:
    codes, sound, loss = torch.ones(1, 2, 5, dtype=torch.long), torch.ones(2, 1, 20), torch.ones(())
    assert in_order({"codes": codes, "sound": sound}, {"output": sound}) == {"sound": "output"}
    assert in_order({"codes": codes, "sound": sound}, {"a": sound, "b": codes}) == {"codes": "b", "sound": "a"}
    assert in_order({"loss": loss, "sound": sound, "codes": codes}, {"a": sound, "b": codes}) == {
        "sound": "a",
        "codes": "b",
    }
    # By place, whatever is wrong with the shapes.
    assert in_order({"loss": loss, "sound": sound}, {"a": sound, "b": loss}) == {"loss": "a", "sound": "b"}
    assert in_order({"codes": codes}, {"a": sound}) == {"codes": "a"}


def test_the_last_op_of_an_onnx_file_is_judged(inputs: str, tmp_path: Path) -> None:
    module = Shares(axis=0, only_one=True).eval()
    example = (torch.load(inputs, weights_only=True)["x"],)
    torch.onnx.export(module, example, tmp_path / "wrong.onnx", dynamo=True, input_names=["x"], verbose=False)
    result = check(Shares(only_one=True).eval(), candidate=tmp_path / "wrong.onnx", inputs=inputs, min_coverage=0.5)
    assert not result.ok and result.first_divergence is not None
    assert result.first_divergence.site == "./softmax.0"


class Layers(nn.Module):
    """Returns what the last layer made, and a summary of it.

    Args:
        returned: What comes back: "all" states and the summary, "flat" ones behind the summary, the "other order" with
            names, or what is wrong: the last state is "scaled", "missing", or "early" in its own place.
    """

    def __init__(self, returned: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.returned = returned
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        states = [x]
        for layer in self.layers:
            states.append(states[-1] + torch.tanh(layer(states[-1])))
        summary = torch.tanh(self.head(states[-1][0]))
        if self.returned == "scaled":
            states[-1] = states[-1] * 1.01
        if self.returned in ("all", "scaled"):
            return states, summary
        if self.returned == "missing":
            return states[:-1], summary
        if self.returned == "flat":
            return {"summary": summary, "first": states[0], "middle": states[1:3], "top": states[3]}
        if self.returned == "other order":
            return {"summary": summary, "states": states[-1]}
        if self.returned == "exchanged":
            return summary, states[-1]
        return states[-2 if self.returned == "early" else -1], summary


@pytest.mark.parametrize(("returned", "own"), [("all", "0.3"), ("flat", "top"), ("other order", "states")])
def test_f58_a_result_is_looked_for_among_all_results(returned: str, own: str, inputs: str) -> None:
    result = check(Layers().eval(), candidate=Layers(returned).eval(), inputs=inputs)
    assert result.ok, result.not_ok_because
    (found,) = [one for one in result.results if one.level == "candidate" and one.name == "0"]
    assert (found.candidate_name, found.verdict) == (own, "identical")


@pytest.mark.parametrize("returned", ["scaled", "missing", "early", "exchanged"])
def test_f58_a_result_that_is_wrong_or_missing_is_not_found_elsewhere(returned: str, inputs: str) -> None:
    result = check(Layers().eval(), candidate=Layers(returned).eval(), inputs=inputs)
    assert not result.ok and result.standing == "results differ"


def test_f58_results_are_paired_by_what_they_hold() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    assert by_value({"a": x, "b": y}, {"c": y, "d": x}) == {"a": "d", "b": "c"}
    assert by_value({"a": x}, {"c": x, "d": x.clone()}) == {"a": "d"}
    assert by_value({"a": x, "b": y}, {"c": x * 1.001, "d": -y}) == {"a": "c", "b": "d"}
    assert by_value({"a": x, "b": x.clone()}, {"c": x, "d": x.clone()}) == {"a": "c", "b": "d"}


def made(x: Tensor) -> tuple[Tensor]:
    y = x.sin()
    return (y.reshape(-1).exp() + y.reshape(-1) * y.reshape(-1),)


def nodes() -> dict[str, Node]:
    return {node.name: node for node in make_fx(made)(torch.ones(2, 3)).graph.nodes}


def names(found: object) -> list[str]:
    return [op_name(node) for node in found]  # type: ignore[attr-defined]


def test_up_is_nearest_first_and_each_once() -> None:
    graph = nodes()
    assert names(up(graph["add"])) == ["exp", "mul", "view", "view", "view", "sin", "input"]
    assert names(up(graph["add"], 1)) == ["exp", "mul"]
    assert names(up(graph["add"], 0)) == []


def test_down_stays_within_a_region() -> None:
    graph = nodes()
    inside = {graph[name] for name in ("sin", "exp", "add")} | {one for name, one in graph.items() if "view" in name}
    assert names(down([graph["sin"]], inside)) == ["view", "view", "view", "exp", "add"]
    assert names(down([graph["sin"]], depth=1)) == ["view", "view", "view"]


def test_the_start_of_a_walk_is_not_found_again() -> None:
    graph = nodes()
    assert graph["sin"] not in walk([graph["sin"]], lambda one: [*one.users, *one.all_input_nodes])


def test_readers_are_found_behind_views() -> None:
    graph = nodes()
    assert sorted(names(readers_of(graph["sin"]))) == ["exp", "mul"]
    assert names(readers_of(graph["sin"], lambda one: False)) == ["view", "view", "view"]
