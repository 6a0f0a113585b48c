"""The canonical form of a captured graph: what changes its hash, and what must not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine.executable.graph import (
    CapturedGraph,
    Execution,
    InputSpec,
    attach,
    detach,
    input_spec,
    mutated_placeholders,
    observers,
)
from glassengine.executable.run.executable import Executable


def graph_of(function, *inputs: torch.Tensor) -> CapturedGraph:
    module = torch.fx.experimental.proxy_tensor.make_fx(function)(*inputs)
    specs = tuple(input_spec(value, f"x{index}", "input") for index, value in enumerate(inputs))
    return CapturedGraph(module, specs, ("y",), "inference")


def affine(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.add(x, x, alpha=2)


X = torch.ones(2, 3)


def test_names_of_nodes_and_inputs_do_not_count() -> None:
    first, second = graph_of(affine, X), graph_of(affine, X)
    for node in second.module.graph.nodes:
        if node.op == "call_function":
            node.name = "something_else"
    renamed = CapturedGraph(
        second.module, (InputSpec("other", "parameter", "float32", (2, 3), (3, 1), "cpu"),), (), "forward"
    )
    assert first.lines == renamed.lines
    assert first.hash == renamed.hash


@pytest.mark.parametrize(
    "other",
    [
        graph_of(lambda x: torch.ops.aten.add(x, x, alpha=3), X),
        graph_of(lambda x: torch.ops.aten.sub(x, x, alpha=2), X),
        graph_of(affine, X.double()),
        graph_of(affine, torch.ones(2, 4)),
        graph_of(affine, torch.ones(3, 2).t()),
        graph_of(lambda x: affine(x) + torch.tensor([1.0, 2.0, 3.0]), X),
    ],
    ids=["literal", "op", "dtype", "shape", "stride", "constant"],
)
def test_settings_of_compiled_code_enter_the_key(other: CapturedGraph) -> None:
    assert graph_of(affine, X).hash != other.hash


def test_constants_count_by_value() -> None:
    def plus(value: float) -> str:
        held = torch.full((3,), value)
        return graph_of(lambda x: x + held, X).hash

    assert plus(1.0) == plus(1.0)
    assert plus(1.0) != plus(1.5)


def test_symbols_are_named_in_order_of_appearance() -> None:
    module = torch.fx.symbolic_trace(lambda n, x: (x,))
    sizes = [("s77", ("s77", "s12")), ("s5", ("s5", "2*s9"))]
    texts = [
        CapturedGraph(
            module,
            (InputSpec("n", "size", "int", symbol=n), InputSpec("x", "input", "float32", shape, (1, 1), "cpu")),
            ("y",),
            "inference",
        ).lines
        for n, shape in sizes
    ]
    assert texts[0][:2] == ("%0 = input int $s0", "%1 = input float32[$s0, $s1] stride (1, 1) cpu")
    assert texts[1][1] == "%1 = input float32[$s0, 2*$s1] stride (1, 1) cpu"


def test_written_inputs_are_found() -> None:
    graph = graph_of(lambda x, y: (x.add_(y), y.mul(2))[1], X.clone(), X)
    assert [node.name for node in mutated_placeholders(graph.module.graph)] == ["x_1"]


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def test_an_engine_reads_its_graph_when_asked(tmp_path: Path) -> None:
    engine = glass.build(Scaled(), tmp_path / "engine", inputs={"x": X}, backend="eager")
    assert callable(engine.executable.graph)
    (noted,) = [one for one in glass.metrics.compilations() if one.name == engine.executable.name][-1:]
    graph = engine.executable.captured()
    assert graph is not None and graph is engine.executable.captured()
    assert [(spec.name, spec.kind) for spec in graph.inputs] == [
        ("linear.weight", "parameter"),
        ("linear.bias", "parameter"),
        ("scale", "buffer"),
        ("x", "input"),
    ]
    assert graph.output_names == ("output",)
    assert (noted.cause.kind, noted.graph_hash) == ("build", graph.hash)
    values = [graph.weights.get(spec.name, X) for spec in graph.inputs]
    (result,) = graph.module(*values)
    assert torch.equal(result, engine(x=X)["output"])


class Watcher:
    def __init__(self) -> None:
        self.seen: list[tuple[str, int, list[str], list[str]]] = []

    def note(self, what: str, execution: Execution) -> None:
        self.seen.append((what, execution.number, list(execution.inputs), list(execution.outputs)))

    def before(self, execution: Execution) -> None:
        self.note("before", execution)

    def after(self, execution: Execution) -> None:
        self.note("after", execution)

    def failed(self, execution: Execution, error: BaseException) -> None:
        self.note(f"failed {error}", execution)


@pytest.fixture
def watcher() -> Iterator[Watcher]:
    watcher = Watcher()
    attach(watcher)
    yield watcher
    detach(watcher)
    assert not observers()


def add(arguments: list[Any]) -> list[Any]:
    total = arguments[0] + arguments[1]
    arguments.clear()
    return [total, None]


def test_inputs_and_outputs_are_seen_by_name_though_the_list_is_emptied(watcher: Watcher) -> None:
    executable = Executable("sum", add, ("a", "b"), ("total", "none"))
    for _ in range(2):
        arguments = [torch.ones(2), torch.ones(2)]
        assert torch.equal(executable.run(arguments)[0], torch.full((2,), 2.0)) and arguments == []
    names = ["a", "b"]
    assert watcher.seen == [
        (what, number, names, ["total", "none"] if what == "after" else [])
        for number in (0, 1)
        for what in ("before", "after")
    ]


def test_an_error_of_the_users_graph_is_raised_as_it_is_with_a_note(watcher: Watcher) -> None:
    executable = Executable("sum", add, ("a", "b"), ("total", "none"))
    with pytest.raises(RuntimeError, match="must match") as caught:
        executable.run([torch.ones(2), torch.ones(3)])
    assert caught.value.__notes__ == ["in executable 'sum', execution 0"]
    assert [what.split()[0] for what, *_ in watcher.seen] == ["before", "failed"]
    assert executable.num_executions == 0


def test_errors_of_an_observer_reach_the_caller(watcher: Watcher) -> None:
    class Stop(Watcher):
        def after(self, execution: Execution) -> None:
            raise FloatingPointError("not a number")

    stop = Stop()
    attach(stop)
    try:
        with pytest.raises(FloatingPointError):
            Executable("sum", add, ("a", "b"), ("total", "none")).run([torch.ones(2), torch.ones(2)])
    finally:
        detach(stop)


def test_an_error_of_one_observer_does_not_block_the_others(watcher: Watcher) -> None:
    class Refusing(Watcher):
        def after(self, execution: Execution) -> None:
            raise ValueError("after")

    class Interrupted(Watcher):
        def before(self, execution: Execution) -> None:
            raise KeyboardInterrupt

    executable = Executable("sum", add, ("a", "b"), ("total", "none"))
    for refusing, error, expected in (
        (Refusing(), ValueError, ["before", "after"]),
        (Interrupted(), KeyboardInterrupt, ["before", "failed "]),
    ):
        attach(refusing)
        try:
            with pytest.raises(error):
                executable.run([torch.ones(2), torch.ones(2)])
        finally:
            detach(refusing)
        assert [what for what, *_ in watcher.seen] == expected
        watcher.seen.clear()
