"""Taps: identity, every way of writing them, and gone from the program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import glassengine as glass
from glassengine.capture.observers import named_network_outputs, observing, run_program
from glassengine.errors import UsageError
from glassengine.program.export.export import export_module
from glassengine.program.representation.program import Program
from glassengine.sites import HasSites
from glassengine.taps import tap_sink

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Plain(nn.Module):
    """Subclasses say where the tap is; without one this is what they compute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.proj = nn.Linear(4, 8), nn.Linear(8, 4)

    def mark(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.mark(self.fc(x).relu()))


class Used(Plain):
    def mark(self, x: torch.Tensor) -> torch.Tensor:
        return glass.tap("inter", x)


class Unused(Plain):
    def mark(self, x: torch.Tensor) -> torch.Tensor:
        glass.tap("inter", x)
        return x


class Mixin(glass.compat.NetworkOutputs, Plain):
    def mark(self, x: torch.Tensor) -> torch.Tensor:
        self.register_network_output("inter", x)
        return x


class Assigned(Plain):
    register_network_output = glass.compat.register_network_output

    def mark(self, x: torch.Tensor) -> torch.Tensor:
        self.register_network_output("inter", x)
        return x


class Checkpointed(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda v: self.proj(glass.tap("inter", self.fc(v).relu())), x, use_reentrant=False)


def ops(program: Program) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


def observed(program: Program, name: str, x: torch.Tensor) -> torch.Tensor:
    """Return the program's own value of a tap."""
    values = {"x": x}
    run_program(program, {"x": x}, lambda node, value: values.setdefault(node.name, value))
    (site,) = program.sites.match(name)
    return values[site.node]


@pytest.mark.parametrize("kind", [Used, Unused, Mixin, Assigned, Checkpointed])
def test_every_way_of_writing_a_tap(kind: Callable[[], Plain]) -> None:
    module = kind().eval()
    inter = module.fc(X).relu()
    assert {name: value.tolist() for name, value in named_network_outputs(module, X)} == {"inter": inter.tolist()}
    program = export_module(module, {"x": X})
    assert [site.name for site in program.sites if site.kind == "tap"] == ["inter"]
    assert torch.equal(observed(program, "inter", X), inter)
    # The program is that of the model without taps, op for op.
    assert ops(program) == ops(export_module(Plain().eval(), {"x": X}))
    assert torch.equal(run_program(program, {"x": X})["output"], module(X))


def test_a_tap_returns_its_argument_itself() -> None:
    x = torch.ones(2)
    assert glass.tap("a", x) is x
    seen = []
    with tap_sink(lambda name, tensor: seen.append((name, tensor))):
        assert glass.tap("a", x) is x
        assert glass.compat.register_network_output(None, "b", x) is x
        assert glass.compat.NetworkOutputs().register_network_output("c", x) is x
    assert glass.tap("d", x) is x
    assert [(name, tensor is x) for name, tensor in seen] == [("a", True), ("b", True), ("c", True)]


class ChangedLater(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(x)
        glass.tap("before", hidden)
        hidden.add_(1)
        glass.tap("after", hidden)
        return self.proj(hidden)


def test_a_tap_keeps_the_value_from_before_an_in_place_op() -> None:
    module = ChangedLater().eval()
    before = module.fc(X)
    eager = dict(named_network_outputs(module, X))
    program = export_module(module, {"x": X})
    for values in (eager, {name: observed(program, name, X) for name in ("before", "after")}):
        assert torch.equal(values["before"], before)
        assert torch.equal(values["after"], before + 1)


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Used()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(glass.tap("start", self.block(x)))


def test_a_second_call_of_a_module_has_a_call_index() -> None:
    module = CalledTwice().eval()
    expected = ["block.inter", "start", "block@1.inter"]
    eager = dict(named_network_outputs(module, X))
    assert list(eager) == expected
    program = export_module(module, {"x": X})
    assert [name for name, _ in named_network_outputs(program)] == expected
    for name in expected:
        assert torch.equal(observed(program, name, X), eager[name]), name
    # A second forward starts counting anew.
    seen: list[str] = []
    with observing(module, lambda site, tensor: seen.append(site)):
        module(X)
        module(X)
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


class TwiceInOneCall(Plain):
    def mark(self, x: torch.Tensor) -> torch.Tensor:
        return glass.tap("inter", glass.tap("inter", x) + 1)


class LikeASubmodule(Plain):
    def mark(self, x: torch.Tensor) -> torch.Tensor:
        return glass.tap("fc", x)


class BadName(Plain):
    def mark(self, x: torch.Tensor) -> torch.Tensor:
        return glass.tap("my tap", x)


class NoTensor(Plain):
    def mark(self, x: torch.Tensor) -> torch.Tensor:
        return glass.tap("pair", (x, x))[0]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (TwiceInOneCall, r"used twice[\s\S]*inter"),
        (LikeASubmodule, r"'fc' has the name of a submodule"),
        (BadName, r"Python identifier\n.*'my tap'"),
        (NoTensor, r"'pair' was not given a tensor\n.*tuple"),
    ],
)
def test_a_wrong_tap_is_an_error_everywhere(kind: Callable[[], Plain], message: str) -> None:
    module = kind().eval()
    module(X)  # nothing listens
    with pytest.raises(UsageError, match=message):
        named_network_outputs(module, X)
    with pytest.raises(UsageError, match=message):
        export_module(module, {"x": X})
    with pytest.raises(UsageError, match=message), observing(module, lambda site, tensor: None):
        module(X)


def test_activations_computed_again_in_a_backward_are_not_observed() -> None:
    module = CalledTwice()
    seen: list[str] = []
    with observing(module, lambda site, tensor: seen.append(site)):
        checkpoint(module, X.clone().requires_grad_(), use_reentrant=False)
        forward = list(seen)
        seen.clear()
        block = Checkpointed()
    with observing(block, lambda site, tensor: seen.append(site)):
        result = block(X.clone().requires_grad_())
        once = list(seen)
        result.sum().backward()
    assert forward.count("block.inter") == 1
    assert seen == once


def test_the_users_own_export_and_compile_see_nothing() -> None:
    module, plain = Used().eval(), Plain().eval()
    for strict in (False, True):
        exported = torch.export.export(module, (X,), strict=strict)
        assert not [node for node in exported.graph.nodes if "glass" in str(node.target)]
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), plain(X))


class MLP(nn.Module):
    """The document's example, its layers translated and nothing else."""

    register_network_output = glass.compat.register_network_output

    def __init__(self, hidden_size: int, ffn_hidden_size: int, bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(hidden_size, ffn_hidden_size, bias=bias)
        self.proj = nn.Linear(ffn_hidden_size, hidden_size, bias=bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inter = self.fc(hidden_states)
        inter = nn.functional.relu(inter)
        # Here, we want to print the tensor value after relu
        self.register_network_output("inter", inter)
        return self.proj(inter)


def test_the_example_of_the_document() -> None:
    model, x = MLP(4, 16).eval(), torch.randn(3, 4)
    outputs = {}
    for k, v in glass.compat.named_network_outputs(model, x):
        outputs[k] = v
    assert outputs.keys() == {"inter"}
    assert torch.equal(outputs["inter"], model.fc(x).relu())
    program = export_module(model, {"hidden_states": x})
    assert [(name, site.shape) for name, site in glass.compat.named_network_outputs(program)] == [("inter", (3, 16))]


class Anything:
    """Is no module and has no sites."""


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (Anything(), r"got: Anything\n.*expected: a module, a program or an engine"),
        (torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), r"torch.export leaves no taps"),
    ],
)
def test_a_model_without_taps_is_refused_with_a_hint(target: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        glass.compat.named_network_outputs(target)


def test_f39_taps_of_modules_programs_engines_and_exports() -> None:
    module = Mixin().eval()
    (found,) = module.named_network_outputs(X)
    assert found[0] == "inter" and torch.equal(found[1], module.fc(X).relu())
    program = export_module(module, {"x": X})
    assert [name for name, _ in program.named_network_outputs()] == ["inter"]
    with_sites = HasSites()
    with_sites.sites = program.sites  # as an engine has them
    assert [name for name, _ in named_network_outputs(with_sites)] == ["inter"]


def test_u8_taps_without_arguments_are_those_of_inputs_that_are_made_up() -> None:
    for module in (Mixin().eval(), MLP(4, 16).eval()):
        (found,) = named_network_outputs(module)
        assert found[0] == "inter" and found[1].shape[-1] == module.fc.out_features
    with pytest.raises(UsageError, match="taps are those of a module or a program"):
        named_network_outputs(torch.export.export(Mixin().eval(), (X,)))  # not a result in place of the tap
