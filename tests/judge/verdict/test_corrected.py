"""The line as it should read: one literal or one name in it is another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from glassengine.judge.verdict.corrected import corrected, line_of_number, with_lines
from glassengine.program.export.export import export_module
from glassengine.results import Altered, Divergence, Hint


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
    ("number", "proven", "wanted"),
    [
        (0.125, True, "scores = scores / 8.0"),
        (0.125, False, None),
        (0.25, True, None),  # nowhere
        (-1, True, None),  # a whole number is an axis as well
    ],
)
def test_the_line_of_a_region_is_that_of_the_number(number: float, proven: bool, wanted: str | None) -> None:
    program = export_module(Attention(), {name: torch.randn(1, 2, 3, 4) for name in "qkv"})
    ports = {port.node for port in program.inputs}
    end = next(node for node in reversed(program.graph.nodes) if node.op == "call_function").name
    change = Altered(argument="scale", baseline=0.5, candidate=number)
    hints = (Hint("scale", "scale", 1.0, proven=proven, change=change),)
    found = Divergence(None, 0, "sdpa", "sdpa", end, None, "wrong", 9.0, None, None, None, hints)
    line = line_of_number(program, {**{name: name for name in ports}, "sdpa": end}, found)
    assert (line is None) if wanted is None else (line is not None and line.endswith(wanted))
    assert line_of_number(None, {"sdpa": end}, found) is None
