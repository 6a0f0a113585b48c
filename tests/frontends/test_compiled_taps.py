"""Taps within compiled code: the right values under the right sites, whoever listens and whenever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import glassengine as glass
from glassengine import environment
from glassengine.executable.graph.execution import Execution, attach, detach
from glassengine.taps import tap_sink

X = torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        glass.tap("before", self.calls)
        self.calls.add_(1)
        return glass.tap("inter", self.linear(x).relu()) * 2


class Model(torch.nn.Module):
    def __init__(self, kind: type[Layer] = Layer, order: tuple[int, ...] = (0, 1, 0)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([kind(), kind()])
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = self.layers[index](x)
        return glass.tap("end", x.exp())


SITES = {f"layers.{path}.{tap}" for path in ("0", "1", "0@1") for tap in ("before", "inter")} | {"end"}


def recorded(model: torch.nn.Module, directory: Path, *, all_sites: bool = False) -> dict[str, torch.Tensor]:
    """Record one call; return what was tapped, by site, or all that was recorded."""
    with glass.record(model, directory):
        model(X)
    recording = glass.Recording.open(directory)
    return {site: recording.tensor(site) for site in recording.sites() if all_sites or site in SITES}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("mode", ["compile", "eager_debug"])
def test_a_recording_has_the_taps_of_the_model(tmp_path: Path, mode: str, grad: bool) -> None:
    compiled = torch.compile(Model(), backend="glass", options={"backend": "eager", "mode": mode})
    with torch.set_grad_enabled(grad):
        expected = recorded(Model(), tmp_path / "expected")
        actual = recorded(compiled, tmp_path / "actual")
    assert expected.keys() == actual.keys() == SITES
    for site, value in expected.items():
        assert torch.equal(actual[site], value), site
    assert [actual[f"layers.{path}.before"].item() for path in ("0", "0@1")] == [0, 1]


class Broken(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return glass.tap("after", x.sin())


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "module.compile"])
def test_sites_are_right_where_graph_breaks_part_the_layers(tmp_path: Path, in_place: bool) -> None:
    expected, model = Model(Broken, (0, 1)), Model(Broken, (0, 1))
    options = {"backend": "glass", "options": {"backend": "eager"}}
    if in_place:
        model.compile(**options)
    with torch.no_grad():
        actual = recorded(model if in_place else torch.compile(model, **options), tmp_path / "actual", all_sites=True)
        wanted = recorded(expected, tmp_path / "expected", all_sites=True)
    taps = {site for site in wanted if site.rpartition(".")[2] in ("before", "inter", "after", "end")}
    assert len(taps) == 7 and taps <= actual.keys()
    for site in taps:
        assert torch.equal(actual[site], wanted[site]), site


def test_sites_of_a_data_parallel_model(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store")), rank=0, world_size=1
    )
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(Model(Broken, (0, 1)), forward_sync_buffers=False)
        compiled = torch.compile(parallel, backend="glass", options={"backend": "eager"})
        with torch.no_grad():
            actual = recorded(compiled, tmp_path / "actual", all_sites=True)
        assert {"layers.0.inter", "layers.1.inter", "layers.0.after", "end"} <= actual.keys()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(environment.cxx_compiler() is None, reason="needs a C++ compiler")
def test_inductor_has_them_too(tmp_path: Path) -> None:
    compiled = torch.compile(Model(), backend="glass", options={"backend": "inductor"})
    with torch.no_grad():
        expected = recorded(Model(), tmp_path / "expected")
        actual = recorded(compiled, tmp_path / "actual")
    assert actual.keys() == SITES
    for site, value in expected.items():
        torch.testing.assert_close(actual[site], value)


def test_listening_compiles_nothing_and_changes_nothing(tmp_path: Path) -> None:
    model = Model()
    compiled = torch.compile(model, backend="glass", options={"backend": "eager"})
    first = compiled(X)
    num_compiled = len(glass.metrics.compilations())
    heard: list[str] = []
    with tap_sink(lambda name, value: heard.append(name)):
        second = compiled(X)
    assert set(heard) == SITES
    assert torch.equal(first, second)
    compiled(X)
    assert len(heard) == len(SITES) and len(glass.metrics.compilations()) == num_compiled


ENCLOSED = {
    "vmap": lambda x: torch.vmap(lambda row: glass.tap("inner", row * 2))(x),
    "grad": lambda x: torch.func.grad(lambda y: glass.tap("inner", y * 2).sum())(x),
    "cond": lambda x: torch.cond(x.sum() > 9, lambda y: glass.tap("inner", y.sin()), lambda y: y.cos(), (x,)),
}


@pytest.mark.parametrize("name", ENCLOSED)
def test_what_is_enclosed_is_said_and_computed_all_the_same(name: str, caplog: pytest.LogCaptureFixture) -> None:
    function = ENCLOSED[name]
    heard: list[str] = []
    expected = function(X)
    with tap_sink(lambda tap, value: heard.append(tap)):
        actual = torch.compile(function, backend="glass", options={"backend": "eager"})(X)
    assert torch.equal(actual, expected) and heard == []
    assert "tap 'inner' is not seen: it is within a transformation or a branch" in caplog.text


def test_a_tensor_that_consists_of_others_is_said_and_computed_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    x = TwoTensor(X, -X)
    compiled = torch.compile(lambda x: glass.tap("pair", x * 2) + 1, backend="glass", options={"backend": "eager"})
    y = compiled(x)
    assert torch.equal(y.a, X * 2 + 1) and torch.equal(y.b, -X * 2 + 1)
    assert "tap 'pair' is not seen: it is a TwoTensor" in caplog.text


def test_taps_within_a_checkpoint_are_heard_once() -> None:
    linear = torch.nn.Linear(3, 3)

    def function(x: torch.Tensor) -> torch.Tensor:
        inner = lambda y: glass.tap("inner", linear(y).relu()) * 2  # noqa: E731
        return checkpoint(inner, x, use_reentrant=False)

    heard: list[torch.Tensor] = []
    with tap_sink(lambda tap, value: heard.append(value)):
        torch.compile(function, backend="glass", options={"backend": "eager"})(X).sum().backward()
    (value,) = heard
    assert torch.equal(value, linear(X).relu())
    gradient, linear.weight.grad = linear.weight.grad, None
    function(X).sum().backward()
    assert torch.equal(linear.weight.grad, gradient)


def test_gradients_are_those_of_the_model() -> None:
    plain, model = Model(), Model()
    plain(X).sum().backward()
    torch.compile(model, backend="glass", options={"backend": "eager"})(X).sum().backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter.grad, model.get_parameter(name).grad)


class Seen:
    def __init__(self) -> None:
        self.executions: list[Execution] = []

    def before(self, execution: Execution) -> None: ...

    def after(self, execution: Execution) -> None:
        self.executions.append(execution)

    def failed(self, execution: Execution, error: Exception) -> None: ...


def test_no_executable_contains_a_mark_and_taps_are_among_its_outputs() -> None:
    seen = Seen()
    attach(seen)
    try:
        torch.compile(Model(), backend="glass", options={"backend": "eager"})(X).sum().backward()
    finally:
        detach(seen)
    forward, backward = seen.executions
    for execution in (forward, backward):
        graph = execution.executable.captured()
        assert graph is not None and "glass.mark" not in "\n".join(graph.lines)
    assert {name for name in forward.outputs if name.startswith("tap(")} == {f"tap({site})" for site in SITES}
    assert not any(name.startswith("tap(") for name in backward.outputs)


def test_other_back_ends_see_nothing_of_it() -> None:
    graphs: list[str] = []

    def other(module: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(str(module.graph))
        return module.forward

    torch.compile(Model(), backend="glass", options={"backend": "eager"})(X)
    torch._dynamo.reset()
    torch.compile(Model(), backend=other)(X)
    assert graphs and "mark" not in graphs[0]
