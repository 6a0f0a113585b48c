"""Programs of plain modules: names, dynamic dimensions, nested inputs and results, state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.capture.observers import observing, run_program
from glassengine.errors import UsageError
from glassengine.program.export.export import export_module, export_specialized
from glassengine.program.representation.program import Program
from glassengine.program.representation.signature import named_inputs
from glassengine.program.user_code.tracing import SPECIALIZED, WITH_VALUES

X = torch.linspace(-2, 2, 8).reshape(2, 4)


def seen_by_hooks(module: nn.Module, inputs: dict[str, Any], program: Program) -> dict[str, torch.Tensor]:
    seen: dict[str, torch.Tensor] = {}

    def keep(site: str, tensor: torch.Tensor) -> None:
        assert site not in seen, site
        seen[site] = tensor.detach().clone()

    with torch.no_grad(), observing(module, keep, called_as=program.called_as):
        module(**inputs)
    return seen


def values_of(program: Program, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    named = named_inputs(inputs)
    values = {port.node: named[port.name] for port in program.inputs} | program.weights()
    run_program(program, named, lambda node, value: values.setdefault(node.name, value))
    return values


def assert_sites_equal_hooks(module: nn.Module, inputs: dict[str, Any]) -> Program:
    """Every module output and tap has a site, with the value that hooks see, and there are no others."""
    program = export_module(module.eval(), inputs)
    seen, values = seen_by_hooks(module, inputs, program), values_of(program, inputs)
    outputs = [s for s in program.sites if s.kind == "tap" or (s.kind == "module" and ":in" not in s.name)]
    assert {site.name for site in outputs} == set(seen)
    for site in outputs:
        assert torch.equal(values[site.node], seen[site.name]), site.name
    return program


# -- paths and calls ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(glass.tap("start", x)).tanh()


class Aliases(nn.Module):
    """One module under two names, called three times; slices of a list that overlap; a list with repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Block()
        self.b = self.a
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.again = nn.ModuleList([self.layers[0]] * 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(self.b(self.a(x)))
        for layer in self.layers[1:]:
            x = layer(x)
        for layer in self.layers[::2]:
            x = layer(x)
        for layer in self.again:
            x = layer(x)
        return self.layers[-1](x)


def test_aliases_slices_and_repeated_calls() -> None:
    torch.manual_seed(0)
    program = assert_sites_equal_hooks(Aliases(), {"x": X})
    calls = [s.name for s in program.sites if s.kind == "module" and s.name.split("@")[0].count(".") < 2]
    calls = [name for name in calls if ":in" not in name and ".fc" not in name and name != "."]
    assert calls == [
        *("a", "b", "a@1"),
        *("layers.1", "layers.2", "layers.3"),
        *("layers.0", "layers.2@1"),
        *("again.0", "again.1"),
        "layers.3@1",
    ]
    assert {"a@1.start", "a.fc@1/linear.0", "b/tanh.0", "layers.2@1.start"} <= {s.name for s in program.sites}


class Sliced(nn.Module):
    """Loops over slices of a container; torch traces them in another way where some module is shared."""

    def __init__(self, container: Any, *, shared: bool) -> None:
        super().__init__()
        self.layers = container(nn.Linear(4, 4) for _ in range(6))
        if shared:
            self.last = self.layers[5]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers[1:][::2][:-1], *self.layers[-2:]):
            x = layer(x)
        return x


def sequential(modules: Iterable[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*modules)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("container", [nn.ModuleList, sequential])
def test_slices_lead_to_the_real_layers(container: Any, shared: bool) -> None:
    """`[1:][::2][:-1]` of six are 1 and 3."""
    program = assert_sites_equal_hooks(Sliced(container, shared=shared), {"x": X})
    linear = [site.name for site in program.sites if site.kind == "op" and site.op == "linear"]
    assert linear == [f"layers.{index}/linear.0" for index in (1, 3, 4, 5)]


class CalledSlice(Sliced):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.layers[2:4](x))


@pytest.mark.parametrize("shared", [False, True])
def test_a_slice_that_is_called_is_no_call_of_its_container(shared: bool) -> None:
    program = assert_sites_equal_hooks(CalledSlice(sequential, shared=shared), {"x": X})
    names = {site.name for site in program.sites}
    assert {"layers", "layers.2", "layers.2@1"} <= names
    assert not [name for name in names if name.startswith("layers@") or "slice" in name]


# -- nested containers -------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def forward(self, pair: Any, options: dict[str, Any]) -> dict[str, Any]:
        left, right = pair
        scaled = left * options["scale"]["by"]
        return {"sum": scaled + right, "parts": [scaled, (right.exp(), None)], "same": (scaled, scaled), "number": 3}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, options: dict[str, Any], pair: Any, flag: bool = False) -> Any:
        result = self.inner(pair=pair, options=options)
        if flag:
            result["sum"] = -result["sum"]
        return result["sum"], {"rest": result["parts"], "none": None, "pair": pair}


def test_nested_inputs_and_outputs() -> None:
    # The order differs from that of the signature, and one input is no tensor.
    inputs = {"pair": [X, X + 1], "flag": True, "options": {"scale": {"by": torch.tensor(2.0)}}}
    program = assert_sites_equal_hooks(Nested(), inputs)
    assert [port.name for port in program.inputs] == ["pair[0]", "pair[1]", "options.scale.by"]
    names = {site.name for site in program.sites}
    assert {"inner:in.pair[0]", "inner:in.options.scale.by", "inner:out.parts[1][0]", ".:in.pair[1]"} <= names
    results = run_program(program, named_inputs(inputs))
    expected = Nested()(**inputs)
    assert torch.equal(results["0"], expected[0])
    assert set(results) == {"0", "1.rest.0", "1.rest.1.0", "1.pair.0", "1.pair.1"}
    assert torch.equal(results["1.rest.1.0"], expected[1]["rest"][1][0])
    assert results["1.pair.1"] is inputs["pair"][1]


class SameTwice(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        y = x.sin()
        return {"first": y, "second": y, "input": x}


def test_one_tensor_returned_twice_and_an_input_returned() -> None:
    program = assert_sites_equal_hooks(SameTwice(), {"x": X})
    results = run_program(program, {"x": X})
    assert list(results) == ["first", "second", "input"]
    assert torch.equal(results["first"], X.sin())
    assert torch.equal(results["second"], X.sin())
    assert torch.equal(results["input"], X)


class WeightOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(3))
        self.drop, self.norm = nn.Dropout(0.9), nn.BatchNorm1d(4)
        self.norm.running_mean.add_(0.5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.drop(x)), self.table


def test_dropout_batch_norm_and_a_parameter_as_result() -> None:
    program = assert_sites_equal_hooks(WeightOut(), {"x": X})
    assert torch.equal(run_program(program, {"x": X})["1"], torch.ones(3))


class Positional(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor, *, c: torch.Tensor) -> torch.Tensor:
        return a - 2 * b + 3 * c


def test_positional_parameters_given_by_keyword_in_another_order() -> None:
    inputs = {"c": X + 2, "b": X + 1, "a": X}
    program = export_module(Positional(), inputs)
    assert [port.name for port in program.inputs] == ["c", "b", "a"]
    for given in (inputs, dict(reversed(inputs.items()))):
        assert torch.equal(run_program(program, given)["output"], Positional()(**inputs))
    with pytest.raises(UsageError, match=r"inputs are missing\n.*\n.*b"):
        run_program(program, {"a": X, "c": X})


# -- dynamic dimensions ------------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, table: torch.Tensor, times: int = 1) -> torch.Tensor:
        return (x @ table).softmax(-1) * times


def step(batch: int, width: int = 5, **more: Any) -> dict[str, Any]:
    return {"x": torch.randn(batch, 3, 4), "table": torch.randn(4, width), **more}


def test_exactly_the_differing_dimensions_are_dynamic() -> None:
    # The first step alone could not be traced: a size of 1 would become a constant.
    program = export_module(TwoInputs(), [step(1), step(2), step(6)])
    x, table = program.inputs
    assert [isinstance(size, int) for size in x.shape] == [False, True, True]
    assert table.shape == (4, 5)
    for batch in (1, 2, 6, 9):
        inputs = step(batch)
        torch.testing.assert_close(run_program(program, inputs)["output"], TwoInputs()(**inputs))
    both = export_module(TwoInputs(), [step(2, 5), step(3, 7)])
    assert [[isinstance(size, int) for size in port.shape] for port in both.inputs] == [
        [False, True, True],
        [True, False],
    ]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], r"no inputs"),
        ([step(2), {"x": torch.randn(2, 3, 4)}], r"different keys or nesting"),
        ([step(2, times=1), step(3, times=2)], r"'times'\] differs between steps[\s\S]*1, 2"),
        ([step(2), {**step(3), "x": torch.randn(3, 4)}], r"'x'\] is of different kinds[\s\S]*2 dimensions"),
        ([step(2), {**step(3), "x": torch.randn(3, 3, 4).double()}], r"'x'\] is of different kinds[\s\S]*float64"),
        ([step(1), step(0)], r"no step of --inputs can be traced with"),
    ],
)
def test_steps_that_do_not_fit_together(steps: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        export_module(TwoInputs(), steps)


# -- state and what cannot be traced -----------------------------------------------------------------------------------


class Writes(nn.Module):
    def forward(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state * 2


def test_an_input_that_is_written_comes_back_as_a_result() -> None:
    program = export_module(Writes(), {"state": X.clone(), "x": X})
    state = torch.ones_like(X)
    results = run_program(program, {"state": state, "x": X})
    assert torch.equal(state, torch.ones_like(X))
    assert torch.equal(results["state"], 1 + X)
    assert torch.equal(results["output"], 2 * (1 + X))
    assert program.caches == {"state": "state"}


class WritesSameName(nn.Module):
    def forward(self, state: torch.Tensor) -> dict[str, torch.Tensor]:
        state.add_(1)
        return {"state": state * 2}


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return x + self.count


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


@pytest.mark.parametrize(
    ("kind", "inputs", "message"),
    [
        (WritesSameName, {"state": X}, r"name of a result\n.*state"),
        (Counts, {"x": X}, r"Counts changes its own buffers[\s\S]*count"),
        (Branches, {"x": X}, r"torch.export cannot trace Branches"),
    ],
)
def test_models_that_cannot_be_exported_are_refused(
    kind: Callable[[], nn.Module], inputs: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        export_module(kind(), {name: tensor.clone() for name, tensor in inputs.items()})


class TakesAnything(nn.Module):
    """A forward whose arguments go through `**kwargs`, tensors and plain values."""

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return x * kwargs["scale"] + (1 if kwargs["shifted"] else 0)


@pytest.mark.parametrize("batches", [(2,), (2, 3)])
def test_arguments_that_go_through_kwargs(batches: tuple[int, ...]) -> None:
    module = TakesAnything()
    steps = [{"x": torch.rand(n, 4), "scale": torch.rand(n, 1), "shifted": True} for n in batches]
    program = export_module(module, steps)
    assert [port.name for port in program.inputs] == ["x", "scale"]
    assert program.metadata["fixed_inputs"] == {"shifted": True}
    found = run_program(program, {"x": steps[-1]["x"], "scale": steps[-1]["scale"]})
    assert torch.equal(found["output"], module(**steps[-1]))
    assert "forward" not in vars(module)


def test_a_batch_of_one_is_allowed_where_it_was_tried_and_right() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x @ y

    def steps(*sizes: int) -> list[dict[str, torch.Tensor]]:
        return [{"x": torch.rand(n, 4), "y": torch.rand(4, 5)} for n in sizes]

    assert list(export_module(Model(), steps(3, 1)).metadata["smallest"].values()) == [1]
    assert "smallest" not in export_module(Model(), steps(3, 2)).metadata


def test_a_batch_of_one_is_not_allowed_where_the_module_treats_it_otherwise() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] == 1 else x * 3

    assert "smallest" not in export_module(Model(), [{"x": torch.rand(n, 4)} for n in (3, 1)]).metadata


def test_a_program_takes_contiguous_inputs_whatever_the_strides_of_its_example() -> None:
    """Code compiled for other strides would read beyond the end of a contiguous input."""
    steps = [{"x": torch.randn(16, size).t()[:, ::2], "pair": (torch.randn(3, size).t(), 2)} for size in (2, 3)]

    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, pair: tuple[torch.Tensor, int]) -> torch.Tensor:
            return x.sum(1, keepdim=True) + pair[0] * pair[1]

    program = export_module(Sum(), steps)
    values = [node.meta["val"] for node in program.graph.find_nodes(op="placeholder")]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    assert len(tensors) == 2 and all(tensor.is_contiguous() for tensor in tensors)


def test_products_of_two_dtypes_are_refused_before_anything_is_built() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).half().eval()
    with pytest.raises(UsageError, match="two dtypes at") as raised:
        export_module(model, {"input": torch.randn(2, 8)})
    assert "float32 by float16" in str(raised.value) and "input is float32" in str(raised.value)
    assert "--dtype float32" in str(raised.value)
    assert export_module(model, {"input": torch.randn(2, 8).half()}).output_nodes


class Doubtful(nn.Module):
    """Takes the branch that its own parameters say."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((64,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((self.weight == 3.0).all()):
            return x * self.weight
        raise ValueError("another weight")


def test_a_branch_on_parameters_is_taken_by_their_values() -> None:
    program = export_specialized(Doubtful().eval(), {"x": torch.randn(2, 64)})
    assert program.metadata[SPECIALIZED] == WITH_VALUES
