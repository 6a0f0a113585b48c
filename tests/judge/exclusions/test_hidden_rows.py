"""Rows of attention that see no key are nobody's mistake, and hide none in the rows that do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from glassengine.capture.observers.interpreter import run_program
from glassengine.diagnose import check
from glassengine.judge.exclusions.hidden_rows import HiddenRows
from glassengine.judge.exclusions.other_values import Followed
from glassengine.program.export.export import export_module

HIDDEN = torch.finfo(torch.float32).min


def left_out(module: nn.Module, **inputs: torch.Tensor) -> dict[str, Any]:
    """Return the elements that do not count by the op of their node."""
    program = export_module(module, inputs)
    known = {program.node(port.node): (inputs[port.name],) * 2 for port in program.inputs}
    rows = Followed(HiddenRows())
    masks: dict[str, torch.Tensor | None] = {}

    def observe(node: torch.fx.Node, value: Any) -> None:
        known[node] = (value, value)
        rows.visit(node, known)
        if isinstance(value, torch.Tensor):
            masks[node.name] = rows.of(node, known)

    run_program(program, inputs, observe)
    sites = {site.node: site.name.rpartition("/")[2] for site in program.sites if site.kind == "op"}
    found = {name: masks.get(node) for node, name in sites.items()}
    return {name: mask for name, mask in found.items() if mask is not None}


class Shares(nn.Module):
    """Scores [B, S, T] and what is to be added to them; the results are split, which an op of several results does."""

    def forward(self, scores: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
        shares = (scores + mask).softmax(-1)
        return [*shares.split(2, -1), shares.mean((0, 1, 2))]


def test_a_row_without_a_key_is_followed_and_no_other() -> None:
    mask = torch.zeros(1, 3, 4)
    mask[0, 0] = HIDDEN
    mask[0, 1, :2] = HIDDEN
    found = left_out(Shares(), scores=torch.randn(1, 3, 4), mask=mask)
    assert found["softmax.0"].any(-1).tolist() == [[True, False, False]]
    parts = [mask for name, mask in found.items() if name.startswith("getitem")]
    assert len(parts) == 2 and all(part.any(-1).tolist() == [[True, False, False]] for part in parts)
    # All that is there of it hangs on the row.
    assert "mean.0" not in found
    assert left_out(Shares(), scores=torch.randn(1, 3, 4), mask=mask[:, 1:2].expand(1, 3, 4)) == {}


class Attention(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask) * 2


@pytest.mark.parametrize("of_bools", [True, False])
def test_rows_of_the_kernel(of_bools: bool) -> None:
    seen = torch.tensor([[False, False], [True, False]])
    mask = seen if of_bools else torch.where(seen, 0.0, HIDDEN)
    found = left_out(Attention(), x=torch.randn(1, 2, 4), mask=mask)
    assert [found[name].any(-1).tolist() for name in ("scaled_dot_product_attention.0", "mul.0")] == [
        [[True, False]]
    ] * 2


PADDED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, by_einsum=False, scale=0.5, hidden=torch.finfo(torch.float32).min):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.qkv = nn.Parameter(torch.randn(8, 24, generator=g))
        self.out = nn.Parameter(torch.randn(8, 8, generator=g))
        self.by_einsum, self.scale, self.hidden = by_einsum, scale, hidden

    def forward(self, x, attention_mask):
        size = x.shape[1]
        seen = torch.ones(size, size, dtype=torch.bool).tril() & attention_mask[:, None].bool()
        for _ in range(2):
            q, k, v = (x @ self.qkv).chunk(3, -1)
            if self.by_einsum:
                scores = torch.einsum("bsd,btd->bst", q * self.scale, k).masked_fill(~seen, self.hidden)
                mixed = torch.einsum("bst,btd->bsd", scores.softmax(-1), v)
            else:
                mask = torch.zeros(seen.shape).masked_fill(~seen, self.hidden)
                mixed = (q @ k.transpose(1, 2) * self.scale + mask).softmax(-1) @ v
            x = x + mixed @ self.out
        return x

def baseline():
    return Model()
def right():
    return Model(by_einsum=True, hidden=-1e9)
def wrong():
    return Model(by_einsum=True, scale=0.7)
def inputs():
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    return {"x": torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(2)), "attention_mask": mask}
"""


def test_noise_of_padding_hides_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "padded.py"
    file.write_text(PADDED)
    right = check(f"{file}:baseline", candidate=f"{file}:right", inputs=f"{file}:inputs")
    assert right.ok
    listed = {item.site for item in right.skipped if item.reason.startswith("in part: fully masked attention rows")}
    assert any("softmax" in site for site in listed) and not any("chunk" in site for site in listed), listed
    found = check(f"{file}:baseline", candidate=f"{file}:wrong", inputs=f"{file}:inputs")
    assert not found.ok and found.first_divergence is not None
