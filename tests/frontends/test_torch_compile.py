"""The back-end "glass" of torch.compile: registration, options, values, names of inputs and outputs."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import glassengine as glass
from glassengine import environment
from glassengine.executable.graph.execution import Execution, attach, detach
from glassengine.testing import models
from tests import children

EAGER = {"backend": "eager"}


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


class Seen:
    """Keeps what runs."""

    def __init__(self) -> None:
        self.executions: list[Execution] = []

    def before(self, execution: Execution) -> None:
        self.executions.append(execution)

    def after(self, execution: Execution) -> None: ...

    def failed(self, execution: Execution, error: Exception) -> None: ...


@pytest.fixture
def seen() -> Iterator[Seen]:
    seen = Seen()
    attach(seen)
    yield seen
    detach(seen)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.scale = torch.nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        return torch.softmax(self.norm(self.linear(x)), -1) * self.scale * times


def compiled(model: torch.nn.Module, **options: str) -> torch.nn.Module:
    return torch.compile(model, backend="glass", options={**EAGER, **options})


def test_registered_by_name_without_an_import_and_explained_by_variable() -> None:
    call = f"torch.compile(lambda x: x + 1, backend='glass', options={EAGER})(torch.ones(2))"
    done = children.run(
        [sys.executable, "-c", f"import torch\nprint({call})"],
        imports=children.COMPILING,
        env={**os.environ, "GLASS_EXPLAIN": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "tensor([2., 2.])\n"
    assert done.stderr.count("because it is called for the first time") == 1


def test_inference_is_bitwise(seen: Seen) -> None:
    model = Block().eval()
    x = torch.randn(5, 3)
    with torch.no_grad():
        assert torch.equal(compiled(model)(x), model(x))
    (execution,) = seen.executions
    assert re.fullmatch(r"Block/inference-0\.0(\.\d+)?", execution.executable.name)
    assert execution.inputs["x"] is x
    assert execution.inputs["linear.weight"] is model.linear.weight


def test_training_is_bitwise_and_inputs_have_the_users_names(seen: Seen) -> None:
    torch.manual_seed(0)
    expected, actual = Block(), Block()
    actual.load_state_dict(expected.state_dict())
    x = torch.randn(5, 3)
    expected(x).square().sum().backward()
    compiled(actual)(x).square().sum().backward()
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter.grad, actual.get_parameter(name).grad)
    assert torch.equal(expected.norm.running_mean, actual.norm.running_mean)
    forward, backward = (execution.executable.captured() for execution in seen.executions)
    assert forward is not None and backward is not None
    assert (forward.kind, backward.kind) == ("forward", "backward")
    kinds = {spec.name: (spec.kind, spec.requires_grad, spec.is_mutated) for spec in forward.inputs}
    assert kinds["x"] == ("input", False, False)
    assert kinds["linear.weight"] == kinds["scale"] == ("parameter", True, False)
    assert kinds["norm.running_mean"] == ("buffer", False, True)
    assert forward.output_names[0] == "output[0]"
    saved = [name for name in forward.output_names if name.startswith("saved(")]
    assert saved
    assert {"grad(linear.weight)", "grad(linear.bias)", "grad(scale)"} <= set(backward.output_names)
    assert "tangent(output[0])" in {spec.name for spec in backward.inputs}
    (addmm,) = [node for node in forward.nodes if str(node.target) == "aten.addmm.default"]
    assert forward.describe(addmm).startswith("linear, ") and "self.norm(self.linear(x))" in forward.describe(addmm)


def test_names_begin_with_the_variable_where_modules_hang_on_several(seen: Seen) -> None:
    first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)

    @torch.compile(backend="glass", options=EAGER)
    def both(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return second(first(given["x"]))

    with torch.no_grad():
        both({"x": torch.ones(1, 3)})
    (execution,) = seen.executions
    assert set(execution.inputs) == {"first.weight", "first.bias", "second.weight", "second.bias", "given['x']"}
    assert execution.executable.name.startswith("both/inference-")


def test_dynamic_shapes_have_symbols(seen: Seen) -> None:
    model = compiled(Block().eval())
    with torch.no_grad():
        for rows in (4, 5, 6):
            x = torch.randn(rows, 3)
            torch._dynamo.mark_dynamic(x, 0)
            model(x)
    (executable,) = {execution.executable for execution in seen.executions}
    (size,) = [spec for spec in executable.captured().inputs if spec.kind == "size"]
    (x,) = [spec for spec in executable.captured().inputs if spec.name == "x"]
    assert size.dtype == "int" and x.shape == (size.symbol, 3)
    assert [execution.inputs[size.name] for execution in seen.executions] == [4, 5, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"back_end": "eager"}, r"unknown option of torch.compile 'back_end'\n.*nearest: backend"),
        ({"backend": "inductr"}, r"unknown back-end 'inductr'\n.*inductor"),
        ({"mode": "eager-debug"}, r"unknown mode 'eager-debug'\n.*eager_debug"),
        ({"backend": "onnxruntime"}, r"'onnxruntime' builds engines .*\n.*eager"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, str], message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(lambda x: x + 1, backend="glass", options=options)(torch.ones(2))


def train(model: torch.nn.Module, call: Callable[..., Any], steps: int) -> tuple[list[float], int]:
    """Train a language model with AdamW; return losses, and how many graphs were compiled after the second step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    losses, late = [], 0
    for step in range(steps):
        ids = torch.randint(0, 64, (2, 16), generator=generator)
        before = glass.metrics.current().counters.get("UncachedCompile", 0)
        loss = call(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        glass.compat.mark_step()
        losses.append(loss.item())
        late += (step > 1) * (glass.metrics.current().counters.get("UncachedCompile", 0) - before)
    return losses, late


@pytest.fixture(scope="module")
def eager_losses() -> list[float]:
    model = models.llama()
    return train(model, model, 20)[0]


@pytest.mark.parametrize("mode", ["compile", pytest.param("eager_debug", marks=pytest.mark.slow)])
def test_a_llama_trains_bitwise_as_eager_and_compiles_nothing_after_step_two(
    eager_losses: list[float], mode: str
) -> None:
    model = models.llama()
    losses, late = train(model, compiled(model, mode=mode), 20)
    assert losses == eager_losses
    assert late == 0


@pytest.mark.slow
def test_a_llama_trains_within_rounding_under_inductor(eager_losses: list[float]) -> None:
    model = models.llama()
    losses, late = train(model, compiled(model, backend="inductor"), 20)
    assert losses == pytest.approx(eager_losses, rel=1e-5)
    assert late == 0


class Appending(torch.nn.Module):
    """Saves for its backward what Inductor lays out otherwise than ATen: a concatenation with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x).view(2, 5, 2, 3).transpose(1, 2)
        kept = torch.cat([torch.tensor([]), heads], dim=-2)
        return (kept @ kept.transpose(-1, -2)).softmax(-1)


@pytest.mark.slow
@pytest.mark.skipif(environment.cxx_compiler() is None, reason="needs a C++ compiler")
def test_forward_and_backward_of_inductor_agree_on_strides() -> None:
    torch.manual_seed(0)
    model, x = Appending(), torch.randn(2, 5, 4)
    expected = model(x)
    expected.square().sum().backward()
    gradient = model.linear.weight.grad.clone()
    model.zero_grad()
    actual = compiled(model, backend="inductor")(x)
    actual.square().sum().backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(model.linear.weight.grad, gradient)


class Counting(torch.nn.Module):
    """Divides by a counter that it writes to; a backward graph that reads the counter anew would find it changed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.5).add_(x.detach().mean(0))
        self.count.add_(1)
        return (self.linear(x) + self.mean / self.count.view(1)).square().mean()


def _gradients(call: Callable[..., torch.Tensor], model: torch.nn.Module) -> list[torch.Tensor]:
    found = []
    for _ in range(2):
        model.zero_grad()
        call(torch.linspace(-1, 1, 12).reshape(3, 4)).backward()
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return found


def test_backward_graphs_do_not_read_what_was_written_since() -> None:
    torch.manual_seed(0)
    model = Counting()
    twin = copy.deepcopy(model)
    expected = _gradients(model, model)
    actual = _gradients(compiled(twin), twin)
    assert all(map(torch.equal, actual, expected))
    assert torch.equal(twin.mean, model.mean)
