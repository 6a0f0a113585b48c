"""The line as it should read: one literal or one name in it is another."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from glassengine.diagnose import check
from glassengine.judge.verdict.corrections import (
    corrected,
    exchanged,
    transposed,
    value_named,
    with_argument,
    with_bias,
    with_configuration,
    with_lines,
)
from glassengine.judge.verdict.source_lines import RegionEnds
from glassengine.program.export.export import export_module
from glassengine.report.findings import next_step
from glassengine.results import Altered, Comparison, Divergence, Hint
from tests.report.made_results import comparison


@pytest.mark.parametrize(
    ("line", "argument", "here", "there", "wanted"),
    [
        ("x = self.norm(x, eps=1e-3)", "eps", 1e-6, 1e-3, "x = self.norm(x, eps=1e-06)"),
        ("a = F.softmax(scores, 2) * 2.5", "factor", 0.5, 2.5, "a = F.softmax(scores, 2) * 0.5"),
        ("y = x.roll(-1, 1)", "shifts", 2, -1, "y = x.roll(2, 1)"),
        ("y = sdpa(q, k, v, is_causal=False)", "is_causal", True, False, "y = sdpa(q, k, v, is_causal=True)"),
        ("y = F.gelu(self.gelu_in(x))", "activation", "silu", "gelu", "y = F.silu(self.gelu_in(x))"),
        ("y = F.gelu(x, approximate='none')", "approximate", "tanh", "none", "y = F.gelu(x, approximate='tanh')"),
        ("y = x * 0.5 + z * 0.5", "factor", 1.0, 0.5, None),  # which of the two is not known
        ("y = x * self.scale", "factor", 1.0, 0.5, None),  # no literal
        ("y = F.gelu(x)", "activation", "gelu (tanh)", "gelu", None),  # no name
        ("y = torch.where(a, b, 0.5", "other", 0.25, 0.5, "y = torch.where(a, b, 0.25"),  # the line of several
        ("y = x.view(2, 3)", "size", [3, 2], [2, 3], None),
        # F75: a whole number that is a size or an index is no factor.
        ("k = w.view(KV, H // KV, 1, D)", "factor", 1.5, 1.0, None),
        ("y = x[1]", "factor", 0.5, 1.0, None),
        ("out = (p @ v).transpose(1, 2).reshape(b, n, -1)", "shift", 0, -1, None),
        ("y = torch.roll(x.view(2, -1), -1, 1)", "shift", 0, -1, "y = torch.roll(x.view(2, -1), 0, 1)"),
        ("y = x * 2", "factor", 0.5, 2.0, "y = x * 0.5"),
        # A number of which an index is calculated is none itself.
        ("score += self.transitions[tags[i], tags[i - 1]]", "index", 0, 1, None),
        ("y = x[:, 1]", "index", 0, 1, "y = x[:, 0]"),
        ("y = x.unbind(1)[0]", "b", 1, 0, "y = x.unbind(1)[1]"),
        ("y = x[t - s] if t > 0 else x", "b", 1, 0, None),
    ],
)
def test_a_line_is_corrected_where_its_place_is_clear(
    line: str, argument: str, here: Any, there: Any, wanted: str | None
) -> None:
    assert corrected(line, Altered(argument=argument, baseline=here, candidate=there)) == wanted


SDPA = "scaled_dot_product_attention"


@pytest.mark.parametrize(
    ("line", "change", "wanted"),
    [
        (f"y = F.{SDPA}(q, v, k)", Altered((f"a/{SDPA}.0",), exchanged=(1, 2)), f"y = F.{SDPA}(q, k, v)"),
        (
            "y = torch.sub(f(x, 1), z[0], alpha=2)",
            Altered(("sub.0",), exchanged=(0, 1)),
            "y = torch.sub(z[0], f(x, 1), alpha=2)",
        ),
        ("y = x.sub(z, 1)", Altered(("sub.0",), exchanged=(0, 1)), None),  # a method: its operands are elsewhere
        ("y = F.gelu(a, b) + F.gelu(c, d)", Altered(("gelu.0",), exchanged=(0, 1)), None),
        (f"y = F.{SDPA}(*heads)", Altered((f"{SDPA}.0",), exchanged=(1, 2)), None),
        (f"y = F.{SDPA}(q, v,", Altered((f"{SDPA}.0",), exchanged=(1, 2)), None),  # goes on below
        (
            f"y = F.{SDPA}(q, k, v)",
            Altered((f"{SDPA}.0",), argument="is_causal", baseline=True, candidate=False),
            f"y = F.{SDPA}(q, k, v, is_causal=True)",
        ),
        (
            "return self.down(F.gelu(x))",
            Altered(("gelu.0",), argument="approximate", baseline="tanh", candidate="none"),
            "return self.down(F.gelu(x, approximate='tanh'))",
        ),
        (f"y = F.{SDPA}(q, k, v, **more)", Altered((SDPA,), (), "is_causal", True, False), None),
        ("y = F.gelu(x)", Altered(("gelu.0",), (), "approximate", "tanh", "other"), None),  # not its default
        ("s = s / 8.0", Altered(("mul.0",), (), "factor", 0.25, 0.125), "s = s / 4.0"),
        ("s = s / 8.0 / 8.0", Altered(("mul.0",), (), "factor", 0.25, 0.125), None),
        ("s = s * 8.0", Altered(("mul.0",), (), "factor", 0.25, 0.125), None),
        ("y = x.permute(0, 3, 1, 2)", Altered(("permute.0",), (), "dims", [0, 2, 1, 3], [0, 3, 1, 2]), (
            "y = x.permute(0, 2, 1, 3)")),
        ("y = x.view(1, 0, 3, 1, 2)", Altered(("permute.0",), (), "dims", [0, 2, 1, 3], [0, 3, 1, 2]), None),
    ],
)  # fmt: skip
def test_a_call_is_corrected_where_it_is_the_only_one(line: str, change: Altered, wanted: str | None) -> None:
    assert corrected(line, change) == wanted


def test_only_what_is_proven_has_a_line() -> None:
    change = Altered(argument="eps", baseline=1e-6, candidate=1e-3)
    hints = tuple(Hint("eps", "eps", 1.0, proven=proven, change=change) for proven in (True, False))
    source = "ports/net.py:12: x = norm(x, 1e-3)"
    found = Divergence(None, 0, "norm", None, "norm", None, "wrong", 9.0, None, None, None, hints)
    assert [hint.line for hint in with_lines(found).hints] == [None, None]  # no line of the candidate is known
    found = Divergence(
        None, 0, "norm", None, "norm", None, "wrong", 9.0, None, None, None, hints, candidate_source=source
    )
    assert [hint.line for hint in with_lines(found).hints] == ["x = norm(x, 1e-06)", None]


class Attention(nn.Module):
    """Four lines, which are one op of a baseline."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-2, -1)
        scores = scores / 8.0
        shares = scores.softmax(-1)
        return shares @ v


@pytest.mark.parametrize(
    ("number", "wanted"),
    [
        (0.125, "scores = scores / 8.0"),
        (0.25, None),  # nowhere
        (-1, None),  # a whole number is an axis as well
    ],
)
def test_the_line_of_a_region_is_that_of_the_number(number: float, wanted: str | None) -> None:
    program = export_module(Attention(), {name: torch.randn(1, 2, 3, 4) for name in "qkv"})
    ports = {port.node for port in program.inputs}
    end = next(node for node in reversed(program.graph.nodes) if node.op == "call_function").name
    change = Altered(argument="scale", baseline=0.5, candidate=number)
    hints = (Hint("scale", "scale", 1.0, proven=True, change=change),)
    found = Divergence(None, 0, "sdpa", "sdpa", end, None, "wrong", 9.0, None, None, None, hints)
    counterparts = {**{name: name for name in ports}, "sdpa": end}
    line = RegionEnds(program, program, counterparts, found).line_of_number()
    assert (line is None) if wanted is None else (line is not None and line.endswith(wanted))


def test_columns_are_those_of_whole_arguments() -> None:
    line = 'y = torch.sub(a["(,"], b[1:2], alpha=2)  # sub(a, b)'
    assert exchanged(line, "sub", (1, 0)) == 'y = torch.sub(b[1:2], a["(,"], alpha=2)  # sub(a, b)'
    assert exchanged("y = torch.cat((b, a[..., :1]), -1)", "cat", (0, 1)) == "y = torch.cat((a[..., :1], b), -1)"
    assert exchanged("y = torch.cat([*b, a], -1)", "cat", (0, 1)) is None


@pytest.mark.parametrize(
    "line", ["y = net.sub(a, b)", "y = sub(a, b)", "y = torch.sub(a, other=b)", "größe = F.sub(a, b)"]
)
def test_what_is_not_a_function_of_torch_is_left_alone(line: str) -> None:
    assert exchanged(line, "sub", (0, 1)) is None


@pytest.mark.parametrize(
    ("line", "name", "default", "value", "wanted"),
    [
        ("y = F.silu(F.layer_norm(x, (8,)))", "eps", 1e-5, 1e-6, "y = F.silu(F.layer_norm(x, (8,), eps=1e-06))"),
        ("y = F.layer_norm(x, (8,), w, b, 1e-3)", "eps", 1e-3, 1e-6, None),  # given by its place
        ("y = F.layer_norm(x, (8,))", "eps", 1e-3, 1e-6, None),  # another default: it is not this call
        ("y = F.layer_norm(x, (8,))", "epsilon", 1e-5, 1e-6, None),
        ("y = self.layer_norm(x)", "eps", 1e-5, 1e-6, None),
    ],
)
def test_an_argument_is_added_where_the_default_of_the_function_was_wrong(
    line: str, name: str, default: float, value: float, wanted: str | None
) -> None:
    assert with_argument(line, "layer_norm", name, default, value) == wanted


@pytest.mark.parametrize(
    ("line", "bias", "wanted"),
    [
        ("y = F.linear(x, self.out.weight)", "out.bias", "y = F.linear(x, self.out.weight, self.out.bias)"),
        ("y = F.linear(x[0], w.out.weight) + 1", "h.0.out.bias", "y = F.linear(x[0], w.out.weight, w.out.bias) + 1"),
        ("y = F.linear(x, self.out.weight, None)", "out.bias", None),
        ("y = F.linear(x, self.out.weight, bias=b)", "out.bias", None),
        ("y = F.linear(x, self.out.weight)", "up.bias", None),
        ("y = F.linear(x, weight)", "out.bias", None),
        ("y = F.linear(x, self.out.weight)", "bias", None),
        ("y = F.linear(F.linear(x, self.up.weight), self.out.weight)", "out.bias", None),
    ],
)
def test_a_bias_is_added_where_that_of_the_same_module_is_meant(line: str, bias: str, wanted: str | None) -> None:
    assert with_bias(line, "linear", bias) == wanted


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("y = x @ self.out.weight + self.out.bias", "y = x @ self.out.weight.T + self.out.bias"),
        ("y = F.linear(x, self.out.weight.T)", "y = F.linear(x, self.out.weight)"),
        ("y = F.linear(x, self.out.weight.t(), b)", "y = F.linear(x, self.out.weight, b)"),
        ("y = x @ self.out.weight[:8]", None),
        ("y = x @ self.out.weight.transpose(0, 1)", None),
        ("y = x @ self.out.weight @ self.out.weight", None),
        ("y = x @ self.timeout.weight", None),
        ("y = x @ weight", None),
        ("y = (x @ self.out.weight", None),
    ],
)
def test_a_weight_is_transposed_or_not_any_more(line: str, wanted: str | None) -> None:
    assert transposed(line, "out.weight") == wanted


CONFIG = {
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "head_dim": 64,
    "rope_parameters.rope_theta": 1e4,
    "rope_theta": 1e4,
    "scale_a": 3.0,
    "scale_b": 3.0,
    "hidden_act": "silu",
    "initializer_factor": 1.0,
}


@pytest.mark.parametrize(
    ("number", "kind", "wanted"),
    [
        (1e-6, "eps", "rms_norm_eps"),
        (1e-5, "eps", None),
        (0.02, "scale", None),
        (0.125, "scale", "head_dim"),
        (64, "scale", None),
        (10000.0, "position", "rope_parameters.rope_theta"),
        (3.0, "scale", None),
        (1.0, "scale", None),  # F75: what weights were drawn with is read by no program
        ("silu", "activation", "hidden_act"),
        ("gelu", "activation", None),
    ],
)
def test_a_value_of_that_kind_is_named(number: object, kind: str, wanted: str | None) -> None:
    assert value_named(number, kind, CONFIG) == wanted


def _with(hint: Hint) -> Comparison:
    made = comparison()
    first = made.first_divergence
    assert first is not None
    return dataclasses.replace(made, first_divergence=dataclasses.replace(first, hints=(hint,)))


def test_the_sentence_has_it() -> None:
    hint = Hint(
        "eps", "eps: 1e-06 in the baseline, 1e-05", 1.0, change=Altered(argument="eps", baseline=1e-6, candidate=1e-5)
    )
    module = SimpleNamespace(config=SimpleNamespace(rms_norm_eps=1e-6, use_cache=True, layers=[1]))
    first = with_configuration(_with(hint), module).first_divergence
    assert first is not None and first.hints[0].change is not None
    assert first.hints[0].text.endswith("; the reference has config.rms_norm_eps = 1e-06")
    assert first.hints[0].change.configured == "rms_norm_eps"
    assert with_configuration(_with(hint), object()) == _with(hint)


class Scores(nn.Module):
    """A layer that both sides have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(-2, -1) * 0.5
        return scores.softmax(-1) @ x


class Unscaled(nn.Module):
    """The same without its factor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ x.transpose(-2, -1)
        return scores.softmax(-1) @ x


def test_the_line_of_a_wrong_layer_is_found_beside_a_right_one() -> None:
    wrong = nn.Sequential(Scores(), Unscaled(), Scores())
    given = {"input": torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))}
    found = check(nn.Sequential(Scores(), Scores(), Scores()), candidate=wrong, inputs=given)
    first = found.first_divergence
    assert first is not None and "0.5 is missing" in first.hints[0].text, first
    assert (first.candidate_source or "").endswith("scores = x @ x.transpose(-2, -1)")


def turn(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x.sin() * scale


class Turned(nn.Module):
    """Calls a function of both sides."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        inverse = scale.exp()
        return turn(x, inverse) + turn(x * 2, scale)


class TurnedAlike(nn.Module):
    """Gives another tensor to it."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        inverse = scale.exp()
        return turn(x, inverse) + turn(x * 2, inverse)


def test_the_line_that_calls_with_another_tensor_is_named() -> None:
    """What reads it is a line of both sides."""
    inputs = {"x": torch.randn(4, 8), "scale": torch.randn(4, 8)}
    found = check(Turned(), candidate=TurnedAlike(), inputs=inputs)
    first = found.first_divergence
    assert first is not None and first.hints[0].proven, first
    assert (first.candidate_source or "").endswith("return turn(x, inverse) + turn(x * 2, inverse)"), first


class Summed(nn.Module):
    """Adds a tensor, and reads the sum in a line of both sides."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        x = x + y.exp()
        return x @ y.exp()


class NotSummed(nn.Module):
    """The same without the sum."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        return x @ y.exp()


def test_a_line_that_the_candidate_lacks_is_quoted() -> None:
    inputs = {"x": torch.randn(8, 8), "y": torch.randn(8, 8)}
    found = check(Summed(), candidate=NotSummed(), inputs=inputs)
    assert found.first_divergence is not None and "exp.0 is not added to sin.0" in found.first_divergence.hints[0].text
    assert "does: x = x + y.exp(), then" in next_step(found, ["check"])


class Placed(nn.Module):
    """Looks up rows, which a line before it chooses."""

    def forward(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        chosen = torch.where(order < 3, order, order[:, :1])
        return x.gather(1, chosen).tanh()


class PlacedElsewhere(nn.Module):
    """The same of other rows."""

    def forward(self, x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        chosen = torch.where(order < 3, order, 0)
        return x.gather(1, chosen).tanh()


def test_the_line_of_the_baseline_is_that_which_the_candidate_has_otherwise() -> None:
    inputs = {"x": torch.randn(4, 6), "order": torch.randint(1, 6, (4, 5))}
    first = check(Placed(), candidate=PlacedElsewhere(), inputs=inputs).first_divergence
    assert first is not None and (first.candidate_source or "").endswith("torch.where(order < 3, order, 0)"), first
    assert (first.source or "").endswith("torch.where(order < 3, order, order[:, :1])"), first


class Ordered(nn.Module):
    """Multiplies, then adds."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        return (x * scale + shift).tanh()


class AddedFirst(nn.Module):
    """Adds, then multiplies."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        return ((x + shift) * scale).tanh()


def test_an_op_that_is_done_later_is_not_called_missing() -> None:
    inputs = {name: torch.randn(4, 8) for name in ("x", "scale", "shift")}
    first = check(Ordered(), candidate=AddedFirst(), inputs=inputs).first_divergence
    assert first is not None and first.hints[0].text.startswith("mul with input scale is done after add, not before it")
    assert (first.candidate_source or "").endswith("return ((x + shift) * scale).tanh()")


class Gated(nn.Module):
    """Applies a gate after a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x).sigmoid()
        return torch.tanh(x + gate * self.down(state))


class GatedBefore(Gated):
    """Applies it before; with a state of zeros its product looks as if it were left out."""

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x).sigmoid()
        return torch.tanh(x + self.down(gate * state))


def test_an_op_that_is_done_earlier_is_not_called_missing() -> None:
    baseline, candidate = Gated(), GatedBefore()
    candidate.load_state_dict(baseline.state_dict())
    first = check(
        baseline, candidate=candidate, inputs={"x": torch.randn(4, 8), "state": torch.zeros(4, 8)}
    ).first_divergence
    assert first is not None and first.hints[0].text == "mul with sigmoid.0 is done before linear, not after it"


class Scored(nn.Module):
    """Scores of two layers, scaled at the end by a power of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor(2.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.left(x) @ self.right(x).mT * self.scale.exp()).tanh()


class ScoredBefore(Scored):
    """Scales one side before the product, which makes the same, and leaves out the power, which does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.scale * self.left(x)) @ self.right(x).mT).tanh()


def test_an_op_that_is_missing_is_named_beside_one_that_is_done_earlier() -> None:
    baseline, candidate = Scored(), ScoredBefore()
    candidate.load_state_dict(baseline.state_dict())
    first = check(baseline, candidate=candidate, inputs={"x": torch.randn(4, 8) / 8}).first_divergence
    assert first is not None and first.hints[0].text == "exp is missing", first


class Parted(nn.Module):
    """Takes a tensor apart and reads both parts in a line of both sides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale, shift = x.sin().chunk(2, -1)
        return torch.addcmul(shift, x[:, :4], scale)


class PartedOtherwise(nn.Module):
    """Gives the parts the names of each other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift, scale = x.sin().chunk(2, -1)
        return torch.addcmul(shift, x[:, :4], scale)


def test_the_line_that_makes_what_is_exchanged_is_named_below_a_line_of_both_sides() -> None:
    first = check(Parted(), candidate=PartedOtherwise(), inputs={"x": torch.randn(6, 8)}).first_divergence
    assert first is not None and "are exchanged" in first.hints[0].text, first
    assert (first.candidate_source or "").endswith("shift, scale = x.sin().chunk(2, -1)"), first


class Weighted(nn.Module):
    """Multiplies by one tensor, then by another."""

    def forward(self, x: torch.Tensor, r: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        x = x * r
        x = x.tanh()
        x = x * s
        return x.abs()


class WeightedOtherwise(nn.Module):
    """The two in exchange."""

    def forward(self, x: torch.Tensor, r: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        x = x * s
        x = x.tanh()
        x = x * r
        return x.abs()


def test_a_line_that_stands_elsewhere_in_the_baseline_is_named_where_it_is_wrong() -> None:
    inputs = {name: torch.randn(4, 8) for name in ("x", "r", "s")}
    first = check(Weighted(), candidate=WeightedOtherwise(), inputs=inputs).first_divergence
    assert first is not None and (first.candidate_source or "").endswith("x = x * s"), first


class Activated(nn.Module):
    """An activation before or after a sum."""

    def __init__(self, is_before: bool) -> None:
        super().__init__()
        self.layer, self.is_before = nn.Linear(8, 8), is_before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.layer(x)
        return nn.functional.gelu(made) + x if self.is_before else nn.functional.gelu(made + x)


def test_an_activation_that_is_done_later_is_not_called_missing() -> None:
    right, wrong = Activated(is_before=True), Activated(is_before=False)
    wrong.load_state_dict(right.state_dict())
    first = check(right, candidate=wrong, inputs={"x": torch.randn(4, 8)}).first_divergence
    assert first is not None and first.hints[0].text == "gelu is done after add, not before it"


class Scale(nn.Module):
    """A product with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class InOrder(nn.Module):
    """A module that is called before a sum, or after it."""

    def __init__(self, *, is_scaled_first: bool) -> None:
        super().__init__()
        self.scale, self.is_scaled_first = Scale(), is_scaled_first

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        if self.is_scaled_first:
            x = self.scale(x)
            x = x + shift
        else:
            x = x + shift
            x = self.scale(x)
        return x.tanh()


def test_a_module_that_is_called_later_is_named_where_it_is_called() -> None:
    right, wrong = InOrder(is_scaled_first=True), InOrder(is_scaled_first=False)
    wrong.load_state_dict(right.state_dict())
    inputs = {name: torch.randn(4, 8) for name in ("x", "shift")}
    first = check(right, candidate=wrong, inputs=inputs).first_divergence
    assert first is not None and first.hints[0].text.startswith("mul with scale.weight is done after add")
    lines = [line for line in (first.source, first.candidate_source) if line and line.endswith("x = self.scale(x)")]
    assert len(set(lines)) == 2, first


class LastOfEach(nn.Module):
    """Takes the last valid place of each row, or the last place of all."""

    def __init__(self, is_of_row: bool) -> None:
        super().__init__()
        self.take = self.of_row if is_of_row else self.of_all

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.take(x.tanh(), lengths).exp()

    def of_row(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x[torch.arange(len(x)), :, lengths - 1]

    def of_all(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x[:, :, -1]


def test_both_lines_are_quoted_where_no_mistake_is_proven() -> None:
    inputs = {"x": torch.randn(3, 4, 6), "lengths": torch.tensor([2, 6, 4])}
    result = check(LastOfEach(True), candidate=LastOfEach(False), inputs=inputs)
    both = "the baseline has `return x[torch.arange(len(x)), :, lengths - 1]`, the candidate `return x[:, :, -1]`"
    assert str(result.not_ok_because).endswith(f"the first wrong op is ./index.0: {both}")
    first = result.first_divergence
    assert first is not None and first.hints[0].text == "the baseline has sub, index, the candidate select"


class Dilated(nn.Module):
    """A convolution that looks back, padded for its dilation."""

    def __init__(self, dilation: int) -> None:
        super().__init__()
        self.layer, self.dilation = nn.Conv1d(4, 4, 3, dilation=dilation), dilation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(nn.functional.pad(x, (2 * self.dilation, 0))).tanh()


def test_a_padding_that_goes_with_a_dilation_is_one_mistake() -> None:
    right, wrong = Dilated(2), Dilated(1)
    wrong.load_state_dict(right.state_dict())
    first = check(right, candidate=wrong, inputs={"x": torch.randn(2, 4, 9)}).first_divergence
    assert first is not None and first.hints[0].proven and first.hints[0].kind == "other"
    assert "pad of pad: [4, 0] in the baseline, [2, 0] in the candidate; dilation" in first.hints[0].text


class Stepped(nn.Module):
    """A recurrence of complex numbers, which are not judged, in `torch.vmap`, and a module in it."""

    def __init__(self, is_centered: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Centered(is_centered)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(self.inner)(x).sin()


class Centered(nn.Module):
    """Takes the mean away, or does not."""

    def __init__(self, is_centered: bool) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.prepare = self.centered if is_centered else self.kept

    def centered(self, x: torch.Tensor) -> torch.Tensor:
        return self.turn * (x - x.mean())

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        return self.turn * (x + x.mean())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.prepare(x.to(torch.complex64))
        return (z * z).real


def test_the_one_line_that_differs_in_a_region_is_named() -> None:
    first = check(Stepped(True), candidate=Stepped(False), inputs={"x": torch.randn(3, 8)}).first_divergence
    assert first is not None and first.site.startswith("inner/"), first
    assert (first.candidate_source or "").endswith("return self.turn * (x + x.mean())"), first
    assert (first.source or "").endswith("return self.turn * (x - x.mean())"), first


def negated(x: torch.Tensor) -> torch.Tensor:
    return -nn.functional.softplus(-x)


class BothSides(nn.Module):
    """Calls a function of both sides with a number and its opposite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        return negated(x) + negated(-x)


class OneSide(nn.Module):
    """Calls it with the number twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        return negated(x) + negated(x)


class Linked(nn.Module):
    """Two views of one tensor, of which one is read."""

    def forward(self, x: torch.Tensor, links: torch.Tensor) -> torch.Tensor:
        x = x.sigmoid()
        rows, columns = x.unsqueeze(3), x.unsqueeze(2)
        new = rows * x.flip(2).unsqueeze(2)
        return (1 - rows - columns) * links.tanh() + new


class LinkedOtherwise(nn.Module):
    """The other one is read."""

    def forward(self, x: torch.Tensor, links: torch.Tensor) -> torch.Tensor:
        x = x.sigmoid()
        rows, columns = x.unsqueeze(3), x.unsqueeze(2)
        new = columns * x.flip(2).unsqueeze(2)
        return (1 - rows - columns) * links.tanh() + new


class Written(nn.Module):
    """Parts of a tensor that are written one after the other, then read in a line of both sides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = []
        for part in x.sin().chunk(3, 1):
            part = part.clone()
            part[..., 2:4] = part[..., :2] + part[..., 2:4]
            made.append(part)
        all_parts = torch.cat(made, 1)
        all_parts[..., 1::2] = all_parts[..., 1::2].clamp_(0, 1)
        return all_parts


class WrittenOtherwise(nn.Module):
    """The same with a subtraction."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = []
        for part in x.sin().chunk(3, 1):
            part = part.clone()
            part[..., 2:4] = part[..., :2] - part[..., 2:4]
            made.append(part)
        all_parts = torch.cat(made, 1)
        all_parts[..., 1::2] = all_parts[..., 1::2].clamp_(0, 1)
        return all_parts


class Seen(nn.Module):
    """A mask that is made in one line and read in a line of both sides."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        seen = torch.einsum("ij,biq,bjp->bqp", 1 - torch.triu(torch.ones(6, 6)), x.sin(), x.sin())
        return torch.gather(seen, 2, places)


class SeenOtherwise(nn.Module):
    """The mask of the other side."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        seen = torch.einsum("ij,biq,bjp->bqp", 1 - torch.tril(torch.ones(6, 6)), x.sin(), x.sin())
        return torch.gather(seen, 2, places)


class Upper(nn.Module):
    """A product with one half of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, generator=torch.Generator().manual_seed(3)))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,bj->bi", self.weight.triu(), x)


class Lower(Upper):
    """A product with the other half."""

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("ij,bj->bi", self.weight.tril(), x)


class UpperFirst(nn.Module):
    """Two products, by methods of one name."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = Lower(), Upper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lower.turned(self.upper.turned(x.tanh())).sin()


class LowerFirst(UpperFirst):
    """The same in the other order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.upper.turned(self.lower.turned(x.tanh())).sin()


@pytest.mark.parametrize(
    ("both", "shapes", "wanted", "words"),
    [
        ((BothSides(), OneSide()), {"x": (4, 8)}, "return negated(x) + negated(x)", "neg is missing"),
        (
            (Linked(), LinkedOtherwise()),
            {"x": (3, 1, 5), "links": (3, 1, 5, 5)},
            "new = columns * x.flip(2).unsqueeze(2)",
            "unsqueeze(2) of sigmoid.0 instead of unsqueeze(3)",
        ),
        (
            (Written(), WrittenOtherwise()),
            {"x": (2, 6, 5)},
            "part[..., 2:4] = part[..., :2] - part[..., 2:4]",
            "3 x add in the baseline, 3 x sub in the candidate",
        ),
        (
            (Seen(), SeenOtherwise()),
            {"x": (2, 6, 6), "places": (2, 6, 3)},
            'seen = torch.einsum("ij,biq,bjp->bqp", 1 - torch.tril(torch.ones(6, 6)), x.sin(), x.sin())',
            "axes 1 and 2 of einsum.0 are transposed",
        ),
        (
            (UpperFirst(), LowerFirst()),
            {"x": (4, 5)},
            "return self.upper.turned(self.lower.turned(x.tanh())).sin()",
            "einsum with triu.0 is done after einsum, not before it",
        ),
    ],
)
def test_a_line_of_both_sides_is_not_what_to_change(
    both: tuple[nn.Module, nn.Module], shapes: dict[str, tuple[int, ...]], wanted: str, words: str
) -> None:
    draw = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    if "places" in inputs:
        inputs["places"] = inputs["places"].argsort(-1)
    first = check(both[0], candidate=both[1], inputs=inputs).first_divergence
    assert first is not None and first.hints[0].proven and first.hints[0].text == words, first
    assert (first.candidate_source or "").endswith(wanted), first.candidate_source


class Flattened(nn.Module):
    """Puts axes together, beside another tensor."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        flat = x.tanh().reshape(2, -1)
        return torch.cat([flat, y], -1).sin()


class FlattenedTurned(nn.Module):
    """Puts them together in the other order."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        flat = x.tanh().transpose(1, 2).reshape(2, -1)
        return torch.cat([flat, y], -1).sin()


def test_the_line_of_a_view_is_named_not_that_of_what_reads_it() -> None:
    inputs = {"x": torch.randn(2, 4, 6), "y": torch.randn(2, 3)}
    first = check(Flattened(), candidate=FlattenedTurned(), inputs=inputs).first_divergence
    assert first is not None and "axes are put together as 6 x 4" in first.hints[0].text
    assert (first.candidate_source or "").endswith("flat = x.tanh().transpose(1, 2).reshape(2, -1)")


class Attending(nn.Module):
    """Queries, keys and values of one product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.to_qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        scores = torch.einsum("bid,bjd->bij", q, k) * 8**-0.5
        return scores.softmax(-1) @ v


class AttendingOtherwise(Attending):
    """Takes keys for queries."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        k, q, v = self.to_qkv(x).chunk(3, dim=-1)
        scores = torch.einsum("bid,bjd->bij", q, k) * 8**-0.5
        return scores.softmax(-1) @ v


def test_queries_and_keys_that_are_exchanged_are_not_called_transposed() -> None:
    first = check(Attending(), candidate=AttendingOtherwise(), inputs={"x": torch.randn(2, 5, 8)}).first_divergence
    assert first is not None and first.hints[0].proven, first
    assert first.hints[0].text == "part 0 of to_qkv/linear.0 and part 1 of to_qkv/linear.0 are exchanged"
    assert (first.candidate_source or "").endswith("k, q, v = self.to_qkv(x).chunk(3, dim=-1)")


def written_gelu(x: torch.Tensor) -> torch.Tensor:
    """A gelu of several ops."""
    return x * 0.5 * (1.0 + torch.erf(x / 2**0.5))


class Blocks(nn.Module):
    """Linear layers, each with a norm and an activation, in one order or the other."""

    def __init__(self, norm: Any, act: Any, *, is_normed_first: bool, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(number))
        self.norms = nn.ModuleList(norm(8) for _ in range(number))
        self.act, self.is_normed_first = act, is_normed_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = layer(x)
            if self.is_normed_first:
                x = norm(x)
            x = self.act(x)
            if not self.is_normed_first:
                x = norm(x)
        return x


@pytest.mark.parametrize(
    ("norm", "act", "is_normed_first", "number", "wanted"),
    [
        (nn.BatchNorm1d, nn.functional.relu, True, 2, "relu is done to layers.0/linear.0, not to norms.0/batch_norm"),
        (nn.LayerNorm, written_gelu, False, 1, "gelu is done after layer_norm, not before it"),
    ],
)
def test_an_activation_on_the_other_side_of_a_norm_is_called_so(
    norm: Any, act: Any, is_normed_first: bool, number: int, wanted: str
) -> None:
    torch.manual_seed(0)
    right = Blocks(norm, act, is_normed_first=is_normed_first, number=number).eval()
    wrong = Blocks(norm, act, is_normed_first=not is_normed_first, number=number).eval()
    for parameter in right.norms.parameters():
        nn.init.uniform_(parameter, -0.5, 2.0)
    wrong.load_state_dict(right.state_dict())
    first = check(right, candidate=wrong, inputs={"x": torch.randn(6, 8)}).first_divergence
    assert first is not None and first.hints[0].text == wanted, first


class Perceptron(nn.Module):
    """An activation after each of its first layers."""

    def __init__(self, num_activations: int) -> None:
        super().__init__()
        self.layers, self.num_activations = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), num_activations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number < self.num_activations:
                x = nn.functional.gelu(x)
        return x.reshape(-1, 2, 4)


def test_the_line_of_an_op_that_is_done_once_more_is_named_though_both_sides_have_it() -> None:
    right, wrong = Perceptron(1), Perceptron(2)
    wrong.load_state_dict(right.state_dict())
    found = check(right, candidate=wrong, inputs={"x": torch.randn(6, 8)})
    first = found.first_divergence
    assert first is not None and first.hints[0].text == "gelu of view.0 in the candidate, none in the baseline", first
    assert (first.candidate_source or "").endswith("x = nn.functional.gelu(x)"), first
    assert "reshape" not in next_step(found, ["check"])


class Trimmed(nn.Module):
    """Leaves out the last row, then the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        x = x[:-1]
        x = x.tanh()
        x = x[1:]
        return x.exp()


class TrimmedTwice(nn.Module):
    """Leaves out the last row each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        x = x[:-1]
        x = x.tanh()
        x = x[:-1]
        return x.exp()


def test_the_line_of_an_op_with_another_number_is_named_though_both_sides_have_it() -> None:
    first = check(Trimmed(), candidate=TrimmedTwice(), inputs={"x": torch.randn(6, 8)}).first_divergence
    assert first is not None and "start of slice: 1 in the baseline" in first.hints[0].text, first
    assert (first.candidate_source or "").endswith("x = x[:-1]"), first


class NormedLate(nn.Module):
    """A batch norm before an activation that has weights, or after it."""

    def __init__(self, *, is_late: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.act, self.down = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.PReLU(8), nn.Linear(8, 8)
        nn.init.normal_(self.norm.running_mean)  # type: ignore[arg-type]
        self.is_late = is_late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        x = self.norm(self.act(x)) if self.is_late else self.act(self.norm(x))
        return self.down(x)


def test_a_norm_on_the_other_side_of_an_activation_is_called_so() -> None:
    models = [NormedLate(is_late=is_late).eval() for is_late in (False, True)]
    first = check(models[0], candidate=models[1], inputs={"x": torch.randn(3, 8)}).first_divergence
    assert first is not None and first.hints[0].proven, first
    assert first.hints[0].text == "batch_norm is done after prelu, not before it"


class Called(nn.Module):
    """An activation in a function that a method calls, or a method of a method."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act = nn.Linear(8, 8), act

    def made(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.up(x)) * 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.made(x)


class CalledAgain(Called):
    """The same, with one function between."""

    def step(self, number: torch.Tensor) -> torch.Tensor:
        return Called.made(self, x=number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(number=x + 0)


def test_a_caller_that_one_side_has_besides_is_not_what_to_change() -> None:
    models = Called(nn.GELU()).eval(), CalledAgain(nn.SiLU()).eval()
    first = check(models[0], candidate=models[1], inputs={"x": torch.randn(3, 8)}).first_divergence
    assert first is not None and first.hints[0].text == "gelu in the baseline, silu in the candidate"
    assert first.candidate_source is not None and first.candidate_source.endswith("return self.act(self.up(x)) * 0.5")


class Normed(nn.Module):
    """Three equal layers."""

    def __init__(self, without: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.products = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norms = nn.ModuleList(nn.Identity() if place == without else nn.LayerNorm(8) for place in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for product, norm in zip(self.products, self.norms, strict=True):
            x = x + product(norm(x)).tanh()
        return x


def test_a_module_that_does_nothing_is_named_by_the_line_that_other_layers_run() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    first = check(Normed(), candidate=Normed(without=1), inputs={"x": x}).first_divergence
    assert first is not None and first.hints[0].text == "layer_norm is missing", first
    assert first.candidate_source is not None and first.candidate_source == first.source
