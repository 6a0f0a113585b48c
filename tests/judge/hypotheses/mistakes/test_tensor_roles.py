"""What turns by positions, or counts them: mistakes in it are of positions, whatever op they are in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from glassengine.diagnose import check
from glassengine.judge.hypotheses.trials.question import Question, noise_of
from glassengine.judge.hypotheses.trials.trial import Trial
from glassengine.judge.pieces import Piece
from glassengine.results import Hint
from tests.judge.hypotheses.asking import explain


def told(right: Callable[..., Tensor], wrong: Callable[..., Tensor], given: dict[str, Tensor]) -> Hint:
    module, theirs = (make_fx(one, pre_dispatch=True)(*given.values()) for one in (lambda *x: (right(*x),), wrong))
    names = [place.name for place in module.graph.find_nodes(op="placeholder")]
    piece = Piece(module, dict(zip(names, given.values(), strict=True)), (module.graph.output_node().args[0][0].name,))
    trial, made = Trial(piece), wrong(*given.values())
    ops = [node for node in theirs.graph.nodes if node.op == "call_function"]
    nodes = {node.name: node for node in module.graph.nodes}
    noise = noise_of(piece, trial.right, made)
    (hint,) = explain(Question(trial, made.double(), None, noise, theirs=ops, named=nodes))
    assert hint.proven
    return hint


def turned(x: Tensor, *, sign: float = 1.0, stretch: float = 1.0) -> Tensor:
    angles = torch.arange(x.shape[-2]).double()[:, None] * 100.0 ** (-torch.arange(4).double() / 4) * stretch
    angles = torch.cat([angles, angles], -1).to(x.dtype)
    halves = torch.cat([-x[..., 4:], x[..., :4]], -1)
    return x * angles.cos() + sign * (halves * angles.sin())


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def right(x: Tensor) -> Tensor:
    angles = torch.arange(x.shape[-2]).double()[:, None] * 100.0 ** (-torch.arange(4).double() / 4)
    angles = torch.cat([angles, angles], -1).to(x.dtype)
    halves = torch.cat([-x[..., 4:], x[..., :4]], -1)
    return x * angles.cos() + halves * angles.sin()


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda x: turned(x, sign=-1.0), "the other sign"),
        (lambda x: turned(x, sign=0.0), "not added"),
        (lambda x: turned(x, stretch=0.25), "positions are scaled: 0.25 times"),
    ],
)
def test_tensors_that_are_rotated_by_positions(wrong: Callable[[Tensor], Tensor], text: str) -> None:
    hint = told(right, wrong, {"x": drawn(2, 3, 6, 8)})
    assert hint.kind == "position" and text in hint.text


def test_a_sum_of_products_of_values_is_scaled() -> None:
    hint = told(
        lambda x, y, a, b: x * a + y * b,
        lambda x, y, a, b: x * a - y * b,
        {name: drawn(2, 3, 6, 8, seed=seed) for seed, name in enumerate("xyab")},
    )
    assert hint.kind == "scale" and "subtracted" in hint.text


def test_numbers_that_are_counted_are_positions() -> None:
    def places(x: Tensor, other: bool) -> Tensor:
        apart = torch.arange(6)[:, None] - torch.arange(6)[None]
        return x.gather(-1, (5 - apart if other else apart + 5).clamp(0, 8).expand(2, 6, 6))

    hint = told(lambda x: places(x, False), lambda x: places(x, True), {"x": drawn(2, 6, 9)})
    assert hint.kind == "position"


def test_parts_of_heads_are_mixed() -> None:
    hint = told(
        lambda x: F.silu(x.view(2, 5, 2, 24).transpose(1, 2).chunk(3, -1)[0]),
        lambda x: F.silu(x.chunk(3, -1)[0].view(2, 5, 2, 8).transpose(1, 2)),
        {"x": drawn(2, 5, 48)},
    )
    assert hint.kind == "permuted" and "3 x 2 x 8 in the candidate" in hint.text


def test_places_from_the_end_and_padding_on_the_other_side_are_positions() -> None:
    given = {"x": drawn(2, 6, 4), "table": drawn(6, 4, seed=3)}
    hint = told(lambda x, t: x + t[torch.arange(6)], lambda x, t: x + t[torch.arange(6).flip(0)], given)
    assert hint.kind == "position"
    hint = told(lambda x: F.pad(x, (0, 0, 2, 0)).exp(), lambda x: F.pad(x, (0, 0, 0, 2)).exp(), {"x": drawn(2, 6, 4)})
    assert hint.kind == "position"


def test_the_kind_of_another_einsum_follows_from_its_equation() -> None:
    def einsum(equation: str) -> Callable[..., Tensor]:
        return lambda x, y: torch.einsum(equation, x, y)

    given = {"x": drawn(3, 5, 5), "y": drawn(3, 5, 5, seed=1)}
    assert told(einsum("hnd,hmn->hmd"), einsum("hnd,hnm->hmd"), given).kind == "transposed"
    hint = told(einsum("hnd,hnd->hn"), lambda x, y: torch.einsum("hnd->hn", x), given)
    assert hint.kind == "scale" and "is not multiplied" in hint.text


def test_a_tiny_number_that_is_added_is_an_epsilon() -> None:
    hint = told(lambda x: x.exp() + 1e-4, lambda x: x.exp() + 1e-3, {"x": drawn(3, 5)})
    assert hint.kind == "eps"


def test_a_root_of_what_is_cut_off_is_no_activation() -> None:
    given = {"x": drawn(3, 5).square()}
    hint = told(lambda x: x.clamp(min=0.0).sqrt(), lambda x: x.clamp(min=0.0), given)
    assert (hint.kind, hint.text) == ("other", "sqrt is missing")


WRONG = {"": "", "lost": "stale", "read before": "stale", "another": "swapped"}


class Remembers(nn.Module):
    """A state [2, 6] that decays, to which each step adds what it is given."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.new, self.out, self.mistake = nn.Linear(4, 6), nn.Linear(6, 6), mistake
        self.register_buffer("state", torch.zeros(2, 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        before, new = self.state * 0.9, self.new(x).tanh()
        after = new if self.mistake == "lost" else before + new
        read = {"read before": before, "another": new}.get(self.mistake, after)
        self.state.copy_(after)
        return self.out(read.sin())


@pytest.mark.parametrize("mistake", WRONG)
def test_tensors_of_the_step_before_are_stale(mistake: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    torch.save([{"x": torch.randn(2, 4, generator=generator)} for _ in range(3)], tmp_path / "x.pt")
    result = check(Remembers(), candidate=Remembers(mistake), inputs=str(tmp_path / "x.pt"))
    assert result.ok == (not mistake)
    if result.first_divergence is not None:
        hint = result.first_divergence.hints[0]
        assert hint.kind == WRONG[mistake] and hint.proven, hint


class Unrolled(nn.Module):
    """Three steps over x [2, 3, 4], of which each reads the state that the one before it made."""

    def __init__(self, *, is_lost: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.is_lost = nn.Linear(10, 6), is_lost

    def forward(self, x: Tensor) -> Tensor:
        first = state = torch.zeros(2, 6)
        made = []
        for step in range(3):
            state = self.cell(torch.cat([x[:, step], first if self.is_lost else state], 1)).tanh()
            made.append(state)
        return torch.stack(made, 1)


def test_a_state_that_stays_what_it_was_before_the_first_step_is_stale(tmp_path: Path) -> None:
    torch.save({"x": torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    first = check(Unrolled(), candidate=Unrolled(is_lost=True), inputs=str(tmp_path / "x.pt")).first_divergence
    assert first is not None and first.hints[0].kind == "stale", first


class Passes(nn.Module):
    """Three layers whose keys of a first part are read behind it, and a state of five steps."""

    def __init__(self, mistake: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.keys, self.mistake = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), mistake
        self.new, self.old = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        caches = [key(x[:, :4]) for key in self.keys]
        caches = caches[::-1] if self.mistake == "layer" else caches
        h = x[:, 4:]
        for key, cache in zip(self.keys, caches, strict=True):
            h = h + torch.cat([cache, key(h)], 1).softmax(1)[:, -4:]
        state = torch.zeros(len(x), 8)
        made = []
        for step in range(4):
            following = torch.tanh(self.new(h[:, step]) + self.old(state))
            made.append(state if self.mistake == "before" else following)
            state = state if self.mistake == "step" and step == 2 else following
        return torch.stack(made, 1)


@pytest.mark.parametrize(
    ("mistake", "kind", "words"),
    [("layer", "swapped", "another layer"), ("step", "stale", "an earlier pass of its loop")],
)
def test_what_another_layer_or_an_earlier_pass_made_is_named(
    mistake: str, kind: str, words: str, tmp_path: Path
) -> None:
    torch.save({"x": torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))}, tmp_path / "x.pt")
    first = check(Passes(), candidate=Passes(mistake), inputs=str(tmp_path / "x.pt")).first_divergence
    assert first is not None and first.hints[0].kind == kind, first
    assert first.hints[0].text.startswith(f"that of {words} is read: "), first.hints[0].text


def test_states_before_each_step_instead_of_after_it_are_named() -> None:
    inputs = {"x": torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))}
    first = check(Passes(), candidate=Passes("before"), inputs=inputs).first_divergence
    assert first is not None and first.hints[0].kind == "stale", first
    assert first.hints[0].text == "each part of stack is that of the pass before"


class Used(nn.Module):
    """A share that grows from zeros; a port may forget that only the rest is left."""

    def __init__(self, *, is_left_out: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.is_left_out = nn.Linear(8, 8), is_left_out

    def forward(self, x: Tensor) -> Tensor:
        used = torch.zeros(len(x), 8)
        for step in range(4):
            more = 1 - self.gate(x[:, step]).sigmoid()
            used = used + more if self.is_left_out else used + (1 - used) * more
        return used


def test_a_factor_that_is_missing_is_no_state_of_an_earlier_pass() -> None:
    """In the first pass nothing is used yet: the factor is one."""
    inputs = {"x": torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))}
    first = check(Used(), candidate=Used(is_left_out=True), inputs=inputs).first_divergence
    assert first is not None and "is not multiplied" in first.hints[0].text, first.hints
