"""What a cast of an infinity yields is nobody's mistake; all that does not depend on it is compared as ever."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from glassengine.capture.interpreter import run_program
from glassengine.compare.undefined_casts import UndefinedCasts
from glassengine.program.export import export_module


class Buckets(nn.Module):
    """Relative positions as T5 has them: small distances as they are, the logarithm of large ones."""

    def forward(self, distance: torch.Tensor) -> dict[str, torch.Tensor]:
        large = 2 + torch.log(distance.float() / 2).to(torch.int64)
        capped = torch.minimum(large, torch.full_like(large, 3))
        return {"capped": capped, "bucket": torch.where(distance < 2, distance, capped)}


def undefined(module: nn.Module, **inputs: torch.Tensor) -> dict[str, list[Any]]:
    """Return the elements that do not count by the op of their node."""
    program = export_module(module, inputs)
    known: dict[str, Any] = {port.node: inputs[port.name] for port in program.inputs}
    casts = UndefinedCasts()

    def observe(node: torch.fx.Node, value: Any) -> None:
        known[node.name] = value
        casts.visit(node, value, lambda source: known[source.name])

    run_program(program, inputs, observe)
    sites = {site.node: site.name.rpartition("/")[2] for site in program.sites if site.kind == "op"}
    found = {name: casts.of(node) for node, name in sites.items()}
    return {name: mask.tolist() for name, mask in found.items() if mask is not None}


def test_what_is_dropped_again_leaves_no_trace() -> None:
    found = undefined(Buckets(), distance=torch.tensor([0, 1, 2, 40]))
    first = [True, False, False, False]
    assert found == {"_to_copy.1": first, "add.0": first, "minimum.0": first}


def test_nothing_is_undefined_without_an_infinity() -> None:
    assert undefined(Buckets(), distance=torch.tensor([1, 2, 3])) == {}


class Casts(nn.Module):
    def forward(self, x: torch.Tensor, table: torch.Tensor) -> list[torch.Tensor]:
        whole = x.to(torch.int32)
        return [whole.sum(), table[whole.clamp(0, 3).long()], x.argsort(), x.isinf().to(torch.int64)]


def test_numbers_too_large_and_nan_are_undefined_and_orders_are_not() -> None:
    x = torch.tensor([1.0, float("nan"), 3e9, -2.0, 2147483000.0])
    found = undefined(Casts(), x=x, table=torch.arange(8.0).reshape(4, 2) + 1)
    cast = [False, True, True, False, False]
    assert found["_to_copy.0"] == cast
    assert found["sum.0"] is True
    assert [any(row) for row in found["index.0"]] == cast
    assert not any("argsort" in name or "sort" in name or "isinf" in name for name in found)
