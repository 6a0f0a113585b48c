"""Debug outputs: which are added, which derived, which left out, and that nothing is computed anew in secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export.graph_signature import OutputKind

from glassengine.capture.observers import run_program
from glassengine.errors import UnknownNameError, UsageError
from glassengine.program.export.export import export_module
from glassengine.program.representation.outputs import (
    DerivedValues,
    add_outputs,
    functional_form,
    is_view,
    plan_outputs,
    result_names,
    size_of,
)
from glassengine.program.representation.program import Program

Exported = Callable[[str], tuple[nn.Module, Program]]
X = torch.linspace(-2, 2, 8).reshape(2, 4)


class Kinds(nn.Module):
    """A node of every kind that is observed in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, 4))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> dict[str, torch.Tensor]:
        table = self.weight.exp()  # exp: weights alone
        turned = x.transpose(0, 1)  # transpose: a view of an input
        old = state.unsqueeze(0).tanh()  # unsqueeze: a view of a cache before it is written
        hidden = x.sin() * table  # sin, mul
        left, right = hidden.chunk(2, -1)  # split, getitem: views of mul
        state.add_(1)  # add: the cache after the step
        later = state.unsqueeze(1)  # unsqueeze_1: a view of it
        result = left + right  # add_1: a result
        flat = result.view(-1)  # view: a view of a result
        return {"result": result, "rest": flat.cos() + later.sum() + old.sum() + turned.sum()}


@pytest.fixture(scope="module")
def program() -> Program:
    return export_module(Kinds(), {"x": X.clone(), "state": X.clone()})


def ops_by_node(program: Program) -> dict[str, str]:
    return {site.node: site.op for site in program.sites if site.kind == "op"}


def test_each_node_is_observed_in_its_own_way(program: Program) -> None:
    nodes = ops_by_node(program)
    plan = plan_outputs(program, nodes)
    assert {node: str(derived) for node, derived in plan.derived.items()} == {
        "exp": "depends on weights alone",
        "transpose": "the input x",
        "getitem": "a view of mul",
        "getitem_1": "a view of mul",
        "add": "the cache state after the step",
        "unsqueeze_1": "the cache state after the step",
        "add_1": "the output result",
        "view": "the output result",
        "add_4": "the output rest",
    }
    # A view of the cache as it was before the step is gone after it, so it is a real output.
    assert plan.added == ("unsqueeze", "tanh", "sin", "mul", "cos", "sum_1", "add_2", "sum_2", "add_3", "sum_3")
    assert set(plan.added) | set(plan.derived) == set(nodes)
    assert not plan.left_out


def test_only_what_was_asked_for_and_what_it_needs(program: Program) -> None:
    plan = plan_outputs(program, ["getitem_1", "view"])
    assert plan.added == ("mul",)
    assert set(plan.derived) == {"getitem_1", "view"}


class ViewOut(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = x.sin().view(-1)
        return flat, flat.unsqueeze(0).cos()


def test_a_view_of_a_result_that_is_a_view_needs_no_output() -> None:
    program = export_module(ViewOut(), {"x": X})
    plan = plan_outputs(program, ["view", "unsqueeze"])
    assert plan.added == ()
    assert {n: str(derived) for n, derived in plan.derived.items()} == dict.fromkeys(
        ["view", "unsqueeze"], "the output 0"
    )


def test_derived_values_are_those_of_the_interpreter(program: Program) -> None:
    nodes = ops_by_node(program)
    watched = add_outputs(program, plan_outputs(program, nodes).added)
    inputs = {"x": X, "state": torch.ones_like(X)}
    values: dict[str, torch.Tensor] = {}
    results = run_program(watched, inputs, lambda node, value: values.setdefault(node.name, value))
    after = {**inputs, "state": results["state"]}
    derived = DerivedValues(watched, after, {k: v for k, v in results.items() if k != "state"})
    for node in nodes:
        assert torch.equal(derived[node], values[node]), node
    assert torch.equal(derived["p_weight"], program.weights()["p_weight"])


def test_what_was_not_returned_is_not_computed_anew(program: Program) -> None:
    inputs = {"x": X, "state": X.clone()}
    results = run_program(program, inputs)
    derived = DerivedValues(program, inputs, results)
    with pytest.raises(UsageError, match=r"'sin' was not observed"):
        _ = derived["sin"]
    with pytest.raises(UsageError, match=r"'mul' was not observed"):
        _ = derived["getitem"]
    with pytest.raises(UnknownNameError, match=r"nearest: sin"):
        _ = derived["sinn"]


def test_a_tensor_of_another_layout_still_has_its_views(program: Program) -> None:
    inputs = {"x": X, "state": X.clone()}
    results = run_program(program, inputs)
    turned = results["result"].t().contiguous().t()
    assert not turned.is_contiguous()
    derived = DerivedValues(program, inputs, {**results, "result": turned})
    assert torch.equal(derived["view"], results["result"].reshape(-1))


def test_views_are_told_by_their_schema(program: Program) -> None:
    views = {node.name for node in program.graph.nodes if is_view(node)}
    assert views == {"transpose", "unsqueeze", "unsqueeze_1", "split", "getitem", "getitem_1", "view"}


def test_the_largest_are_left_out_of_a_byte_budget() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            small = x.sum(-1).sin()
            large = x.cos()
            return (large.transpose(0, 1).exp() + small).sum()

    program = export_module(Two(), {"x": torch.randn(8, 8)})
    nodes = ["sin", "cos", "transpose", "exp"]
    everything = plan_outputs(program, nodes, sizes={"batch": 1})
    assert everything.num_bytes == 4 * (8 + 64 + 64)
    plan = plan_outputs(program, nodes, sizes={"batch": 1}, byte_budget=4 * (8 + 64))
    assert plan.num_bytes <= 4 * (8 + 64)
    assert "sin" in plan.added
    dropped = plan.left_out.keys() & {"cos", "exp"}
    assert len(dropped) == 1
    assert all("256 bytes a step do not fit the byte budget of 288" in reason for reason in plan.left_out.values())
    none = plan_outputs(program, nodes, sizes={"batch": 1}, byte_budget=0)
    assert none.added == ()
    assert set(none.left_out) == set(nodes)  # a view goes with what it is a view of


def test_bytes_of_dynamic_sizes(exported: Exported) -> None:
    _, program = exported("llama")
    (logits,) = program.sites.resolve(["lm_head/linear.0"])
    assert plan_outputs(program, [logits.node]).num_bytes == 0  # a result already
    (hidden,) = program.sites.resolve(["model.layers.0.mlp/mul.0"])
    sizes = {"batch": 2, "sequence": 5, "cache": 16}
    assert plan_outputs(program, [hidden.node], sizes=sizes).num_bytes == 2 * 5 * 128 * 4


@pytest.mark.parametrize(
    ("expression", "size"),
    [
        ("batch", 2),
        ("batch*sequence", 10),
        ("2*batch + 1", 5),
        ("Max(1, batch - 5)", 1),
        ("((sequence - 1)//2)", 2),
        ("batch**2", 4),
        ("-batch + sequence", 3),
        ("unheard_of*batch", 2),
        ("sequence//(unheard_of - 1)", 1),
        ("__import__('os').getpid()", 1),  # text from a file is never evaluated as Python
    ],
)
def test_sizes_are_evaluated_by_arithmetic_alone(expression: str, size: int) -> None:
    assert size_of(expression, {"batch": 2, "sequence": 5}) == size


def test_outputs_are_added_once_in_the_given_order(program: Program) -> None:
    watched = add_outputs(program, ["mul", "sin", "mul"])
    assert result_names(watched) == ["result", "rest", "dbg.mul", "dbg.sin"]
    again = add_outputs(watched, ["sin", "cos"])
    assert result_names(again) == ["result", "rest", "dbg.mul", "dbg.sin", "dbg.cos"]
    results = run_program(again, {"x": X, "state": X.clone()})
    assert torch.equal(results["dbg.sin"], X.sin())
    assert result_names(program) == ["result", "rest"]  # the original is as it was
    with pytest.raises(UnknownNameError, match=r"unknown node 'mull'[\s\S]*nearest: mul"):
        add_outputs(program, ["mull"])


def test_the_functional_form_returns_the_caches(program: Program, exported: Exported) -> None:
    functional = functional_form(add_outputs(program, ["sin"]))
    kinds = {spec.kind for spec in functional.exported.graph_signature.output_specs}
    assert kinds == {OutputKind.USER_OUTPUT}
    assert result_names(functional) == ["state", "result", "rest", "dbg.sin"]
    inputs = {"x": X, "state": torch.ones_like(X)}
    for name, value in run_program(functional, inputs).items():
        if name != "dbg.sin":
            assert torch.equal(value, run_program(program, inputs)[name])
    _, llama = exported("llama")
    names = result_names(functional_form(llama))
    assert names == [*(f"present_{kind}_{i}" for i in (0, 1) for kind in ("key", "value")), "logits"]


class Repeats(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor]:
        y = x.sin()
        return y, None, x, y


def test_result_names_with_repeats_and_without_tensors(tmp_path: Path) -> None:
    program = export_module(Repeats(), {"x": X})
    assert result_names(program) == ["0", "2", "3"]
    assert result_names(add_outputs(program, ["sin"])) == ["0", "2", "3", "dbg.sin"]
