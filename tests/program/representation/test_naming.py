"""Fingerprints say how a tensor is computed and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from glassengine.program.export.export import export_module
from glassengine.program.representation.naming import fingerprints
from glassengine.program.representation.program import Program

aten = torch.ops.aten
X = torch.linspace(-2, 2, 8).reshape(2, 4)
Body = Callable[[torch.fx.Graph, torch.fx.Node, torch.fx.Node], torch.fx.Node]


def fingerprint(body: Body, names: dict[str, str], placeholders: tuple[str, str] = ("p", "q")) -> str:
    """Return the fingerprint of what `body` makes of two placeholders."""
    graph = torch.fx.Graph()
    first, second = (graph.placeholder(name) for name in placeholders)
    node = body(graph, first, second)
    return fingerprints(graph, names)[node]


NAMES = {"p": "fc.weight", "q": "x"}


def total(op: object, arguments: str = "ab", dim: int = 1, **keywords: object) -> Body:
    """Return a body that sums `op` of its placeholders ("ab": first and second) over `dim`."""

    def body(graph: torch.fx.Graph, a: torch.fx.Node, b: torch.fx.Node) -> torch.fx.Node:
        inner = graph.call_function(op, tuple({"a": a, "b": b}[letter] for letter in arguments))
        return graph.call_function(aten.sum.dim_IntList, (inner, [dim]), keywords)

    return body


product = total(aten.mul.Tensor)


def test_names_of_nodes_do_not_matter() -> None:
    def other_numbers(graph: torch.fx.Graph, a: torch.fx.Node, b: torch.fx.Node) -> torch.fx.Node:
        graph.call_function(aten.mul.Tensor, (b, b))
        return product(graph, a, b)

    expected = fingerprint(product, NAMES)
    assert fingerprint(other_numbers, NAMES) == expected
    assert fingerprint(product, {"arg0_1": "fc.weight", "arg1_1": "x"}, ("arg0_1", "arg1_1")) == expected


def test_names_of_parameters_and_inputs_matter() -> None:
    assert fingerprint(product, {"p": "other.weight", "q": "x"}) != fingerprint(product, NAMES)
    assert fingerprint(product, {"p": "x", "q": "fc.weight"}) != fingerprint(product, NAMES)


@pytest.mark.parametrize(
    "body",
    [
        total(aten.mul.Tensor, dim=0),
        total(aten.mul.Tensor, dtype=torch.float64),
        total(aten.mul.Tensor, "aa"),
        total(aten.mul.Tensor, "ba"),
        total(aten.add.Tensor),
    ],
    ids=["literal", "keyword", "input", "order", "op of an input"],
)
def test_what_is_computed_matters(body: Body) -> None:
    assert fingerprint(body, NAMES) != fingerprint(product, NAMES)


def test_where_it_is_computed_does_not_matter() -> None:
    def made_on(device: str) -> Body:
        where = {"dtype": torch.int64, "device": torch.device(device), "pin_memory": False}
        return lambda graph, a, b: graph.call_function(aten.arange.start, (0, 4), where)

    assert fingerprint(made_on("cpu"), NAMES) == fingerprint(made_on("cuda:0"), NAMES)


def exported_fingerprints(program: Program) -> dict[str, str]:
    return {site.name: site.fingerprint for site in program.sites}


class Branches(nn.Module):
    """Two parallel layers; `extra` computes something more before them, which moves the numbers of all nodes."""

    def __init__(self, *, extra: bool) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.extra:
            x.tanh().sin()
        return self.left(x) - self.right(x)


def test_sites_of_two_exports() -> None:
    plain, more = (exported_fingerprints(export_module(Branches(extra=extra), {"x": X})) for extra in (False, True))
    assert plain.items() <= more.items()
    assert plain["left/linear.0"] != plain["right/linear.0"]


class Checked(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


def test_line_of_op_is_below_a_wrapper_without_source() -> None:
    made: dict[str, Callable[..., torch.Tensor]] = {"wrapped": Checked.forward}
    exec(compile("def forward(self, x):\n    return wrapped(self, x)", "<made>", "exec"), made)
    module = type("Wrapped", (Checked,), {"forward": made["forward"]})()
    (site,) = [site for site in export_module(module, {"x": X}).sites if site.kind == "op"]
    assert (site.source or "").endswith("return x.sin()")
    assert "test_naming.py:" in (site.source or "")
