"""User passes: sites follow what the pass does, and a pass that breaks the program is told so."""

from __future__ import annotations

import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from glassengine.capture.observers import run_program
from glassengine.errors import UnknownNameError, UsageError
from glassengine.program.export.export import export_module
from glassengine.program.representation.outputs import add_outputs, plan_outputs
from glassengine.program.representation.passes import apply_function, apply_pass
from glassengine.program.representation.program import Program, copied_graph
from glassengine.sites import Site

aten = torch.ops.aten
X = torch.linspace(-2, 2, 8).reshape(2, 4)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.fc(x).relu() * 2).exp()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Body()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x)
        return y.sin(), y


@pytest.fixture(scope="module")
def program() -> Program:
    torch.manual_seed(0)
    return export_module(Model().eval(), [{"x": torch.randn(batch, 4)} for batch in (2, 3)])


def find(module: GraphModule, target: Any) -> Node:
    (node,) = module.graph.find_nodes(op="call_function", target=target)
    return node


def result(program: Program) -> torch.Tensor:
    return run_program(program, {"x": X})["0"]


def site_of(program: Program, name: str) -> Site:
    site = program.sites.get(name)
    assert site is not None, [s.name for s in program.sites]
    return site


def hidden(program: Program) -> torch.Tensor:
    """Return what the linear layer of the model makes of X."""
    weights = program.exported.state_dict
    return nn.functional.linear(X, weights["body.fc.weight"], weights["body.fc.bias"])


def test_a_pass_that_does_nothing_changes_nothing(program: Program) -> None:
    after = apply_function(program, lambda module: None, name="nothing")
    assert list(after.sites) == list(program.sites)
    assert after.output_nodes == program.output_nodes
    assert torch.equal(result(after), result(program))


def change_in_place(module: GraphModule) -> None:
    node = find(module, aten.relu.default)
    node.target = aten.neg.default


def test_a_node_changed_in_place_keeps_its_site(program: Program) -> None:
    after = apply_function(program, change_in_place, name="p")
    site = site_of(after, "body/relu.0")
    assert (site.node, site.op) == ("relu", "neg")
    assert site.fingerprint != site_of(program, "body/relu.0").fingerprint
    # What it feeds is computed otherwise too, what feeds it is not.
    assert site_of(after, "body/exp.0").fingerprint != site_of(program, "body/exp.0").fingerprint
    assert site_of(after, "body.fc/linear.0") == site_of(program, "body.fc/linear.0")
    assert torch.equal(result(after), ((-hidden(program)) * 2).exp().sin())
    assert torch.equal(result(program), (hidden(program).relu() * 2).exp().sin())  # the original is as it was


def make_double(module: GraphModule) -> None:
    node = find(module, aten.relu.default)
    with module.graph.inserting_after(node):
        wide = module.graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.float64})
    node.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)


def test_an_inserted_op_gets_a_site_and_what_follows_its_dtype(program: Program) -> None:
    after = apply_function(program, make_double, name="p")
    site = site_of(after, "body/_to_copy.0")
    assert (site.kind, site.op, site.dtype, site.shape) == ("op", "_to_copy", "float64", site_of(after, "body").shape)
    assert site_of(after, "body/relu.0").dtype == "float32"
    assert site_of(after, "body/mul.0").dtype == site_of(after, "./sin.0").dtype == "float64"
    order = [s.name for s in after.sites if s.kind == "op"]
    assert order.index("body/relu.0") + 1 == order.index("body/_to_copy.0")
    assert result(after).dtype == torch.float64
    assert site.node in plan_outputs(after, [site.node], sizes={"batch": 2}).added


def second_relu(module: GraphModule) -> None:
    node = find(module, aten.exp.default)
    with module.graph.inserting_after(node):
        again = module.graph.call_function(aten.relu.default, (node,))
    node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)


def test_an_inserted_op_never_takes_the_name_of_another(program: Program) -> None:
    after = apply_function(program, second_relu, name="p")
    assert site_of(after, "body/relu.0").node == "relu"
    assert site_of(after, "body/relu.1").op == "relu"


def two_more_relus(module: GraphModule) -> None:
    second_relu(module)
    second_relu(module)


def test_inserted_ops_are_numbered(program: Program) -> None:
    after = apply_function(program, two_more_relus, name="p")
    nodes = [site_of(after, f"body/relu.{number}").node for number in range(3)]
    assert nodes[0] == "relu"
    assert len(set(nodes)) == 3


def replace_relu(module: GraphModule) -> None:
    node = find(module, aten.relu.default)
    with module.graph.inserting_after(node):
        new = module.graph.call_function(aten.clamp.default, (node.args[0], 0.0))
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)


def test_a_node_that_takes_the_place_of_another_takes_its_sites(program: Program) -> None:
    after = apply_function(program, replace_relu, name="p")
    site = site_of(after, "body/relu.0")
    assert (site.node, site.op) == ("clamp_default", "clamp")
    assert site.source == site_of(program, "body/relu.0").source
    assert "clamp_default" in site.aliases
    assert "relu" not in site.aliases
    assert after.sites.get("body/clamp.0") is None
    assert torch.equal(result(after), result(program))
    # Back-ends take their own names and source lines from these.
    for key in ("nn_module_stack", "stack_trace"):
        assert after.node(site.node).meta[key] == program.node("relu").meta[key]


def rewrite_chain(module: GraphModule) -> None:
    """relu, mul by 2 -> clamp, add to itself."""
    relu, mul = find(module, aten.relu.default), find(module, aten.mul.Tensor)
    with module.graph.inserting_after(mul):
        clamp = module.graph.call_function(aten.clamp.default, (relu.args[0], 0.0))
    with module.graph.inserting_after(clamp):
        add = module.graph.call_function(aten.add.Tensor, (clamp, clamp))
    mul.replace_all_uses_with(add)
    module.graph.erase_node(mul)
    module.graph.erase_node(relu)


def test_a_chain_that_is_rewritten_keeps_all_its_sites(program: Program) -> None:
    """The second of them feeds a consumer that survived, the first only the second."""
    after = apply_function(program, rewrite_chain, name="p")
    ops = {site.name: site.op for site in after.sites if site.name.startswith("body/")}
    assert ops == {"body/relu.0": "clamp", "body/mul.0": "add", "body/exp.0": "exp"}
    assert torch.equal(result(after), result(program))


def replace_last(module: GraphModule) -> None:
    node = find(module, aten.exp.default)
    with module.graph.inserting_after(node):
        new = module.graph.call_function(aten.exp2.default, (node.args[0],))
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)


def test_a_replaced_result_is_still_the_result(program: Program) -> None:
    after = apply_function(program, replace_last, name="p")
    assert after.output_nodes == {"0": "sin", "1": "exp2_default"}
    assert site_of(after, "body").node == site_of(after, "body/exp.0").node == "exp2_default"
    assert torch.equal(run_program(after, {"x": X})["1"], (hidden(program).relu() * 2).exp2())


def remove_relu(module: GraphModule) -> None:
    node = find(module, aten.relu.default)
    node.replace_all_uses_with(node.args[0])
    module.graph.erase_node(node)


def test_the_site_of_a_removed_op_is_gone(program: Program) -> None:
    after = apply_function(program, remove_relu, name="p")
    assert after.sites.get("body/relu.0") is None
    assert {s.name for s in program.sites} - {s.name for s in after.sites} == {"body/relu.0"}
    assert torch.equal(result(after), (hidden(program) * 2).exp().sin())


def fuse_linear_relu(module: GraphModule) -> None:
    relu = find(module, aten.relu.default)
    linear = relu.args[0]
    assert isinstance(linear, Node)
    x, weight, bias = linear.args
    with module.graph.inserting_after(relu):
        # Stands for a fused kernel: one op in the place of two.
        new = module.graph.call_function(aten._addmm_activation.default, (bias, x, weight))
    with module.graph.inserting_before(new):
        turned = module.graph.call_function(aten.t.default, (weight,))
    new.args = (bias, x, turned)
    relu.replace_all_uses_with(new)
    module.graph.erase_node(relu)
    module.graph.erase_node(linear)


def test_two_ops_fused_into_one(program: Program) -> None:
    after = apply_function(program, fuse_linear_relu, name="p")
    site = site_of(after, "body/relu.0")
    assert site.op == "_addmm_activation"
    assert after.sites.get("body.fc/linear.0") is None
    assert after.sites.get("body.fc") is None  # its value exists no more
    torch.testing.assert_close(result(after), result(program))


def another_module(module: GraphModule) -> GraphModule:
    import copy

    graph = copy.deepcopy(module.graph)
    graph.find_nodes(op="call_function", target=aten.relu.default)[0].target = aten.neg.default
    return GraphModule(module, graph)


def test_a_pass_may_return_another_graph_module(program: Program) -> None:
    after = apply_function(program, another_module, name="p")
    assert site_of(after, "body/relu.0").op == "neg"
    assert torch.equal(result(after), ((-hidden(program)) * 2).exp().sin())


# -- refusals ----------------------------------------------------------------------------------------------------------


def raises(module: GraphModule) -> None:
    raise RuntimeError("no such luck")


def drops_an_output(module: GraphModule) -> None:
    output = module.graph.output_node()
    output.args = (output.args[0][:1],)


def output_becomes_a_number(module: GraphModule) -> None:
    output = module.graph.output_node()
    output.args = ((output.args[0][0], 3.0),)


def renames_an_input(module: GraphModule) -> None:
    next(n for n in module.graph.nodes if n.name == "x")._rename("y")


def adds_an_input(module: GraphModule) -> None:
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        module.graph.placeholder("extra")


def uses_before_definition(module: GraphModule) -> None:
    find(module, aten.relu.default).args = (find(module, aten.exp.default),)


def wrong_shape(module: GraphModule) -> None:
    node = find(module, aten.relu.default)
    node.target, node.args = aten.mm.default, (node.args[0], node.args[0])


def calls_a_module(module: GraphModule) -> None:
    module.add_module("extra", nn.ReLU())
    node = find(module, aten.relu.default)
    with module.graph.inserting_after(node):
        new = module.graph.call_module("extra", (node,))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, r"pass p failed\n.*RuntimeError: no such luck"),
        (drops_an_output, r"pass p changed the number of outputs\n.*1\n.*2"),
        (output_becomes_a_number, r"pass p changed the kind of an output\n.*3.0"),
        (renames_an_input, r"pass p changed the inputs"),
        (adds_an_input, r"pass p changed the inputs"),
        (uses_before_definition, r"pass p failed"),
        (wrong_shape, r"pass p left a graph that is not valid"),
        (calls_a_module, r"pass p left a graph that is not valid"),
    ],
)
def test_a_pass_that_breaks_the_program(
    program: Program, function: Callable[[GraphModule], None], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        apply_function(program, function, name="p")
    assert torch.equal(result(program), (hidden(program).relu() * 2).exp().sin())


def test_passes_are_found_in_files(program: Program, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def soften(module):\n"
        "    for node in module.graph.find_nodes(op='call_function', target=torch.ops.aten.relu.default):\n"
        "        node.target = torch.ops.aten.sigmoid.default\n"
    )
    after = apply_pass(program, f"{tmp_path / 'mine.py'}:soften")
    assert site_of(after, "body/relu.0").op == "sigmoid"
    with pytest.raises(UnknownNameError, match=r"'sotfen'[\s\S]*nearest: soften"):
        apply_pass(program, f"{tmp_path / 'mine.py'}:sotfen")
    with pytest.raises(UsageError, match=r"no such file"):
        apply_pass(program, f"{tmp_path / 'yours.py'}:soften")


def test_caches_and_results_keep_apart_when_a_pass_parts_them() -> None:
    class Writes(nn.Module):
        def forward(self, state: torch.Tensor) -> torch.Tensor:
            state.add_(1)
            return state

    def part(module: GraphModule) -> None:
        output = module.graph.output_node()
        written, returned = output.args[0]
        assert written is returned
        with module.graph.inserting_before(output):
            other = module.graph.call_function(aten.neg.default, (returned,))
        output.args = ((written, other),)

    program = export_module(Writes(), {"state": X.clone()})
    assert operator.eq(*program.output_nodes.values())
    after = run_program(apply_function(program, part, name="p"), {"state": X})
    assert torch.equal(after["state"], X + 1)
    assert torch.equal(after["output"], -(X + 1))


def test_a_pass_may_return_what_passes_of_torch_return(program: Program) -> None:
    def negate(module: GraphModule) -> PassResult:
        changed = GraphModule(module, torch.fx.Graph())
        changed.graph = copied_graph(module.graph)
        node = next(n for n in changed.graph.nodes if n.op == "call_function")
        node.target = torch.ops.aten.neg.default
        node.args = node.args[:1]
        return PassResult(changed, True)

    after = apply_function(program, negate, name="negate")
    assert sum(node.target is torch.ops.aten.neg.default for node in after.graph.nodes) == 1


def test_a_pass_that_returns_something_else_is_not_taken_for_one_that_did_its_work(program: Program) -> None:
    with pytest.raises(UsageError, match=r"(?s)pass wrong returned something else than a graph.*int.*GraphModule"):
        apply_function(program, lambda module: 3, name="wrong")


def test_inputs_may_be_called_like_builtins_of_python() -> None:
    class Model(nn.Module):
        def forward(self, input: torch.Tensor, max: torch.Tensor) -> torch.Tensor:
            return (input + 1) * max

    inputs = {"input": torch.ones(2, 3), "max": torch.full((2, 3), 2.0)}
    program = export_module(Model(), inputs)
    changed = apply_function(program, lambda module: None, name="nothing")
    added = add_outputs(changed, [node.name for node in changed.graph.nodes if node.op == "call_function"])
    for each in (changed, added):
        placeholders = [node.name for node in each.graph.find_nodes(op="placeholder")]
        assert placeholders == ["input", "max"] == [port.node for port in each.inputs]
    assert torch.equal(run_program(added, inputs)["output"], torch.full((2, 3), 4.0))
