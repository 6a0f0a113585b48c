"""Masks that hide with other numbers are no mistake, in a port and in an engine of it; one that hides less is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glassengine.capture.observers import run_program
from glassengine.diagnose import check
from glassengine.engine.build.build import build_program
from glassengine.judge.cases import Case, StepInputs
from glassengine.judge.exclusions.masked import HiddenRows, valid_mask
from glassengine.judge.exclusions.perturbation import Followed, Source
from glassengine.numerics.mask_values import is_mask
from glassengine.program import export_program, load_inputs, load_model
from glassengine.program.export.export import export_module
from glassengine.sites import Site

LARGEST = torch.finfo(torch.float32).min


class Attention(nn.Module):
    """Scores with a mask that is made of the numbers of tokens, its own way."""

    def __init__(self, hidden: float, *, seen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.out = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(9, 5)
        self.hidden, self.seen = hidden, seen

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        place = torch.arange(9)
        later = place[None, :] > place[:, None] + self.seen
        mask = torch.zeros(9, 9).masked_fill(later, self.hidden) + (1 - real)[:, None, :] * max(self.hidden, LARGEST)
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return self.out(torch.softmax(scores + mask, -1))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("inputs") / "inputs.pt"
    real = torch.ones(2, 9)
    real[1, 5:] = 0
    torch.save({"x": torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1)), "real": real}, path)
    return str(path)


@pytest.mark.parametrize("hidden", [-1e4, -1e9, float("-inf"), LARGEST])
def test_any_number_that_hides_is_as_good(hidden: float, inputs: str) -> None:
    result = check(Attention(LARGEST).eval(), candidate=Attention(hidden).eval(), inputs=inputs)
    assert result.ok and result.verdict in ("identical", "rounding"), result.not_ok_because


def test_so_it_is_in_an_engine(inputs: str, tmp_path: Path) -> None:
    port = load_model(Attention(-1e9).eval())
    build_program(export_program(port, inputs=load_inputs(inputs)), tmp_path / "engine", backend="eager")
    result = check(Attention(LARGEST).eval(), candidate=tmp_path / "engine", inputs=inputs)
    assert result.ok and result.verdict in ("identical", "rounding"), result.not_ok_because


def test_a_mask_that_hides_less_is_named(inputs: str) -> None:
    result = check(Attention(LARGEST).eval(), candidate=Attention(-1e9, seen=1).eval(), inputs=inputs)
    assert not result.ok and result.first_divergence is not None
    assert result.first_divergence.site in ("./masked_fill.0", "./add.0", "./add.1")


def test_a_number_that_hides_nothing_is_wrong(inputs: str) -> None:
    result = check(Attention(LARGEST).eval(), candidate=Attention(-1.0).eval(), inputs=inputs)
    assert not result.ok


@pytest.mark.parametrize("hidden", [-1e4, -1e30, float("-inf"), LARGEST])
def test_f44_a_baseline_that_writes_numbers_takes_any_other_as_well(hidden: float, inputs: str) -> None:
    result = check(Attention(-1e9).eval(), candidate=Attention(hidden).eval(), inputs=inputs)
    assert result.ok and result.verdict in ("identical", "rounding"), result.not_ok_because
    assert not check(Attention(-1e9).eval(), candidate=Attention(hidden, seen=1).eval(), inputs=inputs).ok


class Half(nn.Module):
    """Scores in float16, masked there or in float32 before they are rounded."""

    def __init__(self, *, wide: bool, seen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.out = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(9, 5)
        self.wide, self.seen = wide, seen

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        hidden = torch.ones(9, 9, dtype=torch.bool).triu(1 + self.seen)
        if self.wide:
            scores = torch.where(hidden, torch.finfo(torch.float32).min, scores.float())
        else:
            scores = torch.where(hidden, torch.finfo(torch.float16).min, scores).float()
        return self.out(torch.softmax(scores, -1).half())


@pytest.mark.parametrize("seen", [0, 1])
def test_f44_a_mask_in_registers_of_float32_hides_as_one_of_float16(seen: int, tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1)).half()}, tmp_path / "x.pt")
    other = Half(wide=True, seen=seen).half().eval()
    result = check(Half(wide=False).half().eval(), candidate=other, inputs=str(tmp_path / "x.pt"))
    assert result.ok is (seen == 0), result.not_ok_because


class Large(nn.Module):
    """Scores that are themselves as small as what hides: their size is what is compared."""

    def __init__(self, *, shift: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.out, self.shift = nn.Linear(12, 9), nn.Linear(9, 5), shift

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) * 4000 - 20000 * self.query.bias.abs().sum()
        return self.out(torch.softmax(scores + self.shift * torch.arange(9.0), -1))


def test_scores_are_no_mask_for_being_small(tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    assert check(Large().eval(), candidate=Large().eval(), inputs=str(tmp_path / "x.pt")).ok
    assert not check(Large().eval(), candidate=Large(shift=500.0).eval(), inputs=str(tmp_path / "x.pt")).ok


HIDDEN = torch.finfo(torch.float32).min


def left_out(source: Source, module: nn.Module, **inputs: torch.Tensor) -> dict[str, Any]:
    """Return the elements that do not count by the op of their node."""
    program = export_module(module, inputs)
    known = {program.node(port.node): (inputs[port.name],) * 2 for port in program.inputs}
    followed = Followed(source)
    masks: dict[str, torch.Tensor | None] = {}

    def observe(node: torch.fx.Node, value: Any) -> None:
        known[node] = (value, value)
        followed.visit(node, known)
        if isinstance(value, torch.Tensor):
            masks[node.name] = followed.excluded(node, known)

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
    found = left_out(HiddenRows(), Shares(), scores=torch.randn(1, 3, 4), mask=mask)
    assert found["softmax.0"].any(-1).tolist() == [[True, False, False]]
    parts = [mask for name, mask in found.items() if name.startswith("getitem")]
    assert len(parts) == 2 and all(part.any(-1).tolist() == [[True, False, False]] for part in parts)
    # All that is there of it hangs on the row.
    assert "mean.0" not in found
    assert left_out(HiddenRows(), Shares(), scores=torch.randn(1, 3, 4), mask=mask[:, 1:2].expand(1, 3, 4)) == {}


class RowAttention(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask) * 2


@pytest.mark.parametrize("of_bools", [True, False])
def test_rows_of_the_kernel(of_bools: bool) -> None:
    seen = torch.tensor([[False, False], [True, False]])
    mask = seen if of_bools else torch.where(seen, 0.0, HIDDEN)
    found = left_out(HiddenRows(), RowAttention(), x=torch.randn(1, 2, 4), mask=mask)
    assert [found[name].any(-1).tolist() for name in ("scaled_dot_product_attention.0", "mul.0")] == [
        [[True, False]]
    ] * 2


PADDED = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, by_einsum=False, scale=0.6, hidden=torch.finfo(torch.float32).min):
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


@pytest.fixture
def padded_inputs() -> StepInputs:
    """Two rows of three tokens, the first padded by one on the left, and a cache of four slots."""
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    return StepInputs.first(Case("", 2, input_ids=torch.ones(2, 3, dtype=torch.long), attention_mask=mask))


def scores(dtype: torch.dtype) -> Site:
    shape = ("batch", 1, "sequence", "cache")
    axes = {"batch": 0, "sequence": 2, "cache": 3}
    name = str(dtype).removeprefix("torch.")
    return Site("a.0", "op", "a", "a", dtype=name, shape=shape, axes=axes, source=None, fingerprint="")


def test_scores_of_padding_do_not_count(padded_inputs: StepInputs) -> None:
    found = valid_mask(scores(torch.float32), torch.zeros(2, 1, 3, 4), padded_inputs)
    assert found is not None and found.shape == (2, 1, 3, 4)
    assert found[0, 0].tolist() == [[False] * 4, *[[False, True, True, False]] * 2]


def test_a_mask_counts_where_it_hides_padding(padded_inputs: StepInputs) -> None:
    found = valid_mask(scores(torch.bool), torch.zeros(2, 1, 3, 4, dtype=torch.bool), padded_inputs)
    assert found is not None
    assert found.expand(2, 1, 3, 4)[0, 0].tolist() == [[False] * 4, *[[True] * 4] * 2]


@pytest.mark.parametrize("hidden", [float("-inf"), torch.finfo(torch.float32).min, -1e9, -1e4])
def test_so_does_a_mask_that_is_added(padded_inputs: StepInputs, hidden: float) -> None:
    """A port that forgets the padding has zeros there."""
    mask = torch.zeros(2, 1, 3, 4)
    mask[0, 0, :, 0] = hidden
    found = valid_mask(scores(torch.float32), mask, padded_inputs)
    assert found is not None
    assert found.expand(2, 1, 3, 4)[0, 0].tolist() == [[False] * 4, *[[True] * 4] * 2]


def test_masked_scores_are_no_mask() -> None:
    masked = torch.tensor([[0.5, -1e9], [0.0, -1e9]])
    assert not is_mask(masked) and not is_mask(torch.zeros(2, 2)) and not is_mask(torch.full((2, 2), -0.5))
    assert is_mask(masked.clamp(max=0)) and is_mask(torch.tensor([[0.0, -1e4]], dtype=torch.bfloat16))
