"""What ops read: parts in the other order, a table that is not added, a product of a transposed weight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from glassengine.diagnose import check
from glassengine.judge.hypotheses.explain import differences
from glassengine.judge.hypotheses.mistakes.layouts import merges
from glassengine.judge.hypotheses.trials.question import Question, noise_of
from glassengine.judge.hypotheses.trials.trial import Trial, real_parts
from glassengine.judge.pieces import Piece
from glassengine.results import Hint
from tests.judge.hypotheses.asking import explain


def asked(right: Callable[..., Tensor], wrong: Callable[..., Tensor], given: dict[str, Tensor]) -> Question:
    """Return the question of a wrong function; what is named table or weight is a weight, of the model as well."""
    module = make_fx(lambda *tensors: (right(*tensors),), pre_dispatch=True)(*given.values())
    theirs = make_fx(lambda *tensors: (wrong(*tensors),), pre_dispatch=True)(*given.values())
    places = module.graph.find_nodes(op="placeholder")
    names = dict(zip((place.name for place in places), given, strict=True))
    held = frozenset(node for node, name in names.items() if name in ("table", "weight"))
    end = module.graph.output_node().all_input_nodes[0].name
    piece = Piece(module, dict(zip(names, given.values(), strict=True)), (end,))
    trial = Trial(piece)
    made = wrong(*given.values())
    ops = [node for node in theirs.graph.nodes if node.op == "call_function"]
    nodes = {node.name: node for node in module.graph.nodes}
    noise = noise_of(piece, trial.right, real_parts(made))
    return Question(trial, real_parts(made).double(), None, noise, names, held, theirs=ops, named=nodes)


def told(right: Callable[..., Tensor], wrong: Callable[..., Tensor], given: dict[str, Tensor]) -> Hint:
    (hint,) = explain(asked(right, wrong, given))
    assert hint.proven
    return hint


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_parts_of_other_sizes_are_put_together_in_the_other_order() -> None:
    given = {"first": drawn(2, 1, 8), "rest": drawn(2, 6, 8, seed=1)}
    hint = told(lambda a, b: torch.cat([a, b], 1), lambda a, b: torch.cat([b, a], 1), given)
    assert (hint.kind, hint.text) == ("swapped", "parts 0 and 1 of cat are exchanged")


@pytest.mark.parametrize("fill", [-1e9, -1e12])
def test_scores_are_told_apart_beside_hidden_ones(fill: float) -> None:
    given = {"scores": drawn(2, 2, 6, 6), "hidden": (torch.arange(6) > 4).expand(2, 2, 6, 6).contiguous()}
    hint = told(lambda s, m: s.masked_fill(m, fill), lambda s, m: s.mT.masked_fill(m, fill), given)
    assert (hint.kind, hint.text) == ("transposed", "axes 2 and 3 of scores are transposed")


def test_the_first_and_the_last_of_three_parts_are_exchanged() -> None:
    given = {"a": drawn(2, 4), "b": drawn(2, 4, seed=1), "c": drawn(2, 8, seed=2)}
    hint = told(lambda *parts: torch.cat(parts, 1), lambda *parts: torch.cat(parts[::-1], 1), given)
    assert (hint.kind, hint.text) == ("swapped", "parts 0 and 2 of cat are exchanged")


def test_or_instead_of_and_is_no_condition_that_is_missing() -> None:
    """Where one condition holds everywhere, nothing is hidden, as if the mask were not read."""
    given = {"x": drawn(4, 6), "a": drawn(4, 6, seed=1) > 0, "b": torch.ones(4, 6, dtype=torch.bool)}
    hint = told(
        lambda x, a, b: x.masked_fill(~(a & b), 0.0),
        lambda x, a, b: x.masked_fill(~(a | b), 0.0),
        given,
    )
    assert "and" in hint.text and "or" in hint.text.split("in the baseline")[-1], hint


@pytest.mark.parametrize("is_stored", [True, False])
def test_rows_of_a_table_that_are_not_added_are_a_bias(is_stored: bool) -> None:
    """Whatever comes in is added to as many rows as there are: only what is stored is a bias."""
    given = {"x": drawn(1, 6, 8), "table" if is_stored else "y": drawn(10, 8, seed=1)}
    hint = told(lambda x, table: x + table[None, :6], lambda x, table: x + 0 * table[None, :6], given)
    assert hint.kind == ("bias missing" if is_stored else "other") and hint.text.endswith("is not added")


def test_a_product_of_another_name_is_one_of_a_transposed_weight() -> None:
    given = {"x": drawn(3, 8), "weight": drawn(8, 8, seed=1)}
    assert told(F.linear, torch.matmul, given).kind == "transposed"


def test_few_bits_show_which_activation_is_nearer() -> None:
    """Nothing proves it, and the candidate's program has it."""

    def right(x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)

    given = {"x": drawn(4, 64).bfloat16()}
    (hint,) = differences(asked(right, F.gelu, given))
    assert (hint.kind, hint.proven, hint.text) == (
        "activation",
        False,
        "quick_gelu in the baseline, gelu in the candidate",
    )
    assert not differences(asked(right, right, given))


def test_positions_that_each_step_counts_from_zero() -> None:
    """All zeros in a step of one token: that is no clamp, and no factor."""
    given = {"positions": torch.tensor([[5]]), "bands": 0.5 ** torch.arange(8)}
    hint = told(lambda p, b: p[..., None] * b, lambda p, b: (p - p[:, :1])[..., None] * b, given)
    assert (hint.kind, hint.text) == (
        "position",
        "positions begins at 0 in the candidate, at 5 in the baseline: each step counts from 0",
    )
    question = asked(lambda x: x.exp(), torch.zeros_like, {"x": drawn(4, 8)})
    assert not explain(dataclasses.replace(question, theirs=(), their_values=()))


def test_a_mistake_in_what_hides_is_one_of_the_mask_whatever_its_op_is() -> None:
    def hidden(moved: int) -> Callable[..., Tensor]:
        def seen(scores: Tensor, places: Tensor) -> Tensor:
            return scores.masked_fill(places[None] > places[:, None] + moved, float("-inf"))

        return seen

    given = {"scores": drawn(6, 6), "places": torch.arange(6)}

    def scored(moved: int) -> Callable[..., Tensor]:
        return lambda scores, places: hidden(moved)(scores, places).softmax(-1)

    module = make_fx(scored(0), pre_dispatch=True)(*given.values())
    (choice,) = [node for node in module.graph.nodes if "masked_fill" in node.name]
    question = asked(hidden(0), hidden(1), given)
    named = {choice.name: choice, question.trial.end.name: choice}
    (hint,) = explain(dataclasses.replace(question, named=named))
    assert hint.kind == "mask" and hint.text.startswith("a position sees the next one"), hint


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    half = torch.cat([-x[..., 4:], x[..., :4]], -1)
    return x * turns.cos() + half * turns.sin()


@pytest.mark.parametrize("times", [0, 2])
def test_a_rotation_that_is_left_out_or_done_twice_is_one_of_positions(times: int) -> None:
    given = {"x": drawn(2, 5, 8), "turns": torch.arange(5.0)[:, None] * 0.5 ** torch.arange(8)}

    def wrong(x: Tensor, turns: Tensor) -> Tensor:
        return rotated(rotated(x, turns), turns) if times else x + 0

    hint = told(rotated, wrong, given)
    assert hint.kind == "position" and ("done twice" if times else "a rotation by positions is left out") in hint.text


def test_heads_that_are_not_transposed_before_they_are_put_together_are_mixed() -> None:
    given = {"x": drawn(2, 4, 5, 8)}
    hint = told(lambda x: x.transpose(1, 2).reshape(2, 5, 32), lambda x: x.reshape(2, 5, 32), given)
    assert hint.kind == "transposed" and hint.text == "transpose is missing: x is read as it is"


def test_a_permute_that_is_a_reshape_is_missing() -> None:
    given = {"x": drawn(4, 6, 8)}
    hint = told(lambda x: x.permute(0, 2, 1), lambda x: x.reshape(4, 8, 6), given)
    assert hint.kind == "transposed" and hint.text == "permute is missing: x is read as it is"


class Causal(nn.Module):
    """Hides by a condition that it turns over twice."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        seen = ~torch.ones(6, 6, dtype=torch.bool).triu(self.by)
        hidden = ~F.pad(seen, (1, 0), value=True)
        return x.masked_fill(hidden, float("-inf")).softmax(-1)


def test_a_condition_that_is_turned_over_twice_hides_what_is_true() -> None:
    found = check(Causal(1), candidate=Causal(2), inputs={"x": drawn(6, 7)}).first_divergence
    assert found is not None and found.hints[0].kind == "mask"
    assert found.hints[0].text.startswith("a position sees the next one; diagonal of triu"), found.hints


def test_zeros_of_a_mask_are_no_dropout() -> None:
    """What is hidden is the same in every row; chance hides others."""
    given = {"x": drawn(4, 16)}
    alike = (torch.arange(16) % 4 > 0).float()
    hint = told(lambda x: x * 1.0, lambda x: x * 1.5 * alike, given)
    assert hint.kind == "scale" and "a mask" in hint.text
    torch.manual_seed(0)
    hint = told(lambda x: x * 1.0, lambda x: F.dropout(x * 1.0, 1 / 3), given)
    assert hint.kind == "other" and "dropout" in hint.text


def test_a_description_that_no_op_of_the_candidate_bears_out_is_not_certain() -> None:
    chosen = (drawn(4, 16, seed=5) > -0.7).float()
    (hint,) = explain(asked(lambda x: x * 1.0, lambda x: x * 1.5 * chosen, {"x": drawn(4, 16)}))
    assert (hint.kind, "dropout" in hint.text, hint.proven) == ("other", True, False)


def test_what_is_computed_in_half_rounds_what_it_reads_and_makes() -> None:
    given = {"x": 3 * drawn(8, 64)}
    hint = told(lambda x: x.softmax(-1), lambda x: x.half().softmax(-1).float(), given)
    assert (hint.kind, "computed in float16" in hint.text) == ("dtype", True)


def test_groups_of_heads_in_turn_are_interleaved() -> None:
    def spread(x: Tensor) -> Tensor:
        return x[:, :, None].expand(2, 2, 2, 5, 8).clone().view(2, 4, 5, 8)

    hint = told(spread, lambda x: x.repeat(1, 2, 1, 1), {"x": drawn(2, 2, 5, 8)})
    assert hint.kind == "permuted", hint


def test_a_number_that_only_decides_what_is_seen_is_one_of_the_mask() -> None:
    def attention(more: int) -> Callable[..., Tensor]:
        def made(scores: Tensor, places: Tensor) -> Tensor:
            seen = places[None] <= places[:, None] + more
            return torch.where(seen, scores, -1e9).softmax(-1)

        return made

    hint = told(attention(0), attention(1), {"scores": drawn(6, 6), "places": torch.arange(6)})
    assert hint.kind == "mask" and hint.text.endswith("; other positions are seen"), hint


def test_axes_that_a_copy_joins_are_heads() -> None:
    def spread(x: Tensor) -> Tensor:
        return x.clone().view(2, 4, 5, 8)

    module = make_fx(spread, pre_dispatch=True)(drawn(2, 2, 2, 5, 8))
    (place,) = module.graph.find_nodes(op="placeholder")
    question = dataclasses.replace(asked(torch.neg, torch.neg, {"x": drawn(2, 2)}), named={place.name: place})
    assert merges(question, place, drawn(2, 2, 2, 5, 8), 1, 2)
    assert not merges(question, place, drawn(2, 2, 2, 5, 8), 0, 1)


LEFT_OUT = {
    "flags": ("mask", "is not multiplied"),
    "choice": ("mask", "is taken everywhere"),
    "choice of values": ("other", "is taken everywhere"),
    "order": ("permuted", "index is missing"),
    "moved": ("position", "roll is missing"),
    "factor": ("scale", "is not multiplied"),
    "shares": ("activation", "log_softmax is missing"),
}


class Whole(nn.Module):
    """x [2, 6, 6] and what of it is seen [2, 6]: each step may be left out."""

    def __init__(self, left_out: str = "") -> None:
        super().__init__()
        self.left_out = left_out
        self.gain = nn.Parameter(torch.linspace(0.5, 2.0, 6))
        self.register_buffer("order", torch.tensor([3, 1, 5, 0, 2, 4]))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = x.sin() if self.left_out == "flags" else x.sin() * seen.unsqueeze(-1).to(x.dtype)
        shown = (x + 0.5 * x.roll(1, 1)).exp() + 1.0
        x = shown if self.left_out == "choice" else torch.where(seen.unsqueeze(-1), shown, 0.25)
        x = x.cos() + 0.1 * x
        small = x.square() - 0.5
        x = small if self.left_out == "choice of values" else torch.where(small > 0.0, small, -0.3 * x.exp())
        x = x if self.left_out == "order" else x[:, self.order]
        x = x.tanh() + x
        x = x if self.left_out == "moved" else x.roll(1, 1)
        x = x.cos() + 1 if self.left_out == "factor" else x.cos() * self.gain + 1
        return x if self.left_out == "shares" else x.log_softmax(-1)


@pytest.mark.parametrize("left_out", ["", *LEFT_OUT])
def test_the_kind_of_what_is_left_out_follows_from_what_it_does(left_out: str, tmp_path: Path) -> None:
    seen = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]], dtype=torch.bool)
    x = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(1))
    torch.save({"x": x, "seen": seen}, tmp_path / "x.pt")
    result = check(Whole().eval(), candidate=Whole(left_out).eval(), inputs=str(tmp_path / "x.pt"))
    assert result.ok == (not left_out)
    if result.first_divergence is not None:
        hint = result.first_divergence.hints[0]
        kind, text = LEFT_OUT[left_out]
        assert hint.kind == kind and text in hint.text, hint


def test_complex_tensors_have_mistakes_as_well() -> None:
    hint = told(lambda x: torch.fft.fft(x), lambda x: torch.fft.fft(x, norm="ortho"), {"x": drawn(3, 8)})
    assert hint.text == "norm of fft_fft: default in the baseline, ortho in the candidate"
    hint = told(lambda x: torch.fft.fft(x)[:, 2:5], lambda x: torch.fft.fft(x)[:, 3:6], {"x": drawn(3, 8)})
    assert hint.text.startswith("start of slice: 2 in the baseline, 3 in the candidate; end of slice")
    assert hint.change is not None and hint.change.argument is None  # no line is corrected by half of it


def test_a_state_that_is_not_mixed_in_is_none_that_was_moved() -> None:
    given = {"old": drawn(2, 5, 4), "new": drawn(2, 1, 4, seed=1), "gate": drawn(2, 1, 4, seed=2).sigmoid()}
    hint = told(lambda old, new, gate: old[:, -1:].lerp(new, gate), lambda old, new, gate: new * gate, given)
    assert "zeros stand in its place" in hint.text


def test_what_is_subtracted_from_is_not_said_to_be_subtracted() -> None:
    hint = told(lambda a, b: a - b, lambda a, b: -b, {"a": drawn(3, 8), "b": drawn(3, 8, seed=1)})
    assert hint.text == "it is not subtracted from a"


def test_graphs_that_are_all_one_are_not_positions_one_too_small() -> None:
    given = {"x": drawn(6, 1), "of": torch.tensor([0, 0, 0, 1, 1, 1])}

    def shares(x: Tensor, of: Tensor) -> Tensor:
        return x / torch.zeros(2, 1).index_add(0, of, x)[of]

    assert not any("too small" in hint.text for hint in explain(asked(shares, lambda x, of: x / x.sum(), given)))


def test_a_weight_that_both_sides_read_is_not_said_to_be_turned_around() -> None:
    class Ranked(nn.Module):
        def __init__(self, *, flips: bool) -> None:
            super().__init__()
            self.enter, self.leave, self.flips = nn.Linear(8, 8), nn.Linear(8, 3), flips

        def forward(self, x: Tensor) -> Tensor:
            ranked = self.enter(x).sort(-1).values
            result: Tensor = self.leave(ranked.flip(-1) if self.flips else ranked)
            return result

    torch.manual_seed(0)
    right, wrong = Ranked(flips=False).eval(), Ranked(flips=True).eval()
    wrong.load_state_dict(right.state_dict())
    found = check(right, candidate=wrong, inputs={"x": torch.randn(5, 8)}).first_divergence
    assert found is not None and "turned around" in found.hints[0].text and "weight" not in found.hints[0].text


class Halved(nn.Module):
    """Divides a part of a tensor in its place, or does not."""

    def __init__(self, is_divided: bool) -> None:
        super().__init__()
        self.divisor = 4.0 if is_divided else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        if self.divisor is not None:
            x[:, 2:] /= self.divisor
        return x.exp()


def test_what_is_done_to_a_part_in_its_place_is_called_missing() -> None:
    first = check(Halved(True), candidate=Halved(False), inputs={"x": torch.randn(4, 6)}).first_divergence
    assert first is not None and first.hints[0].text == "the division by 4 is missing", first


def test_a_condition_that_is_not_multiplied_is_a_mask() -> None:
    given = {"x": drawn(2, 6, 8), "seen": torch.arange(6)[:, None] < torch.tensor([4, 6])[:, None, None]}
    hint = told(lambda x, seen: (x * seen).cumsum(1), lambda x, seen: x.cumsum(1), given)
    assert (hint.kind, hint.text) == ("mask", "the mask is not multiplied: seen")


def test_two_places_that_are_exchanged_are_turned_around() -> None:
    hint = told(lambda x: x[..., None].sin(), lambda x: x.flip(-1)[..., None].sin(), {"x": drawn(6, 2)})
    assert "moved" not in hint.text, hint


class Stacked(nn.Module):
    """Puts parts together, whose axes it exchanges."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([part.sin().view(2, 3, 4).permute(0, 2, 1).contiguous() for part in (a, b)], -1)


class StackedAsTheyAre(nn.Module):
    """The same without that."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([part.sin().view(2, 4, 3) for part in (a, b)], -1)


def test_one_mistake_in_what_several_tensors_go_through_is_told_of_all() -> None:
    given = {"a": drawn(6, 4), "b": drawn(6, 4, seed=1)}
    first = check(Stacked(), candidate=StackedAsTheyAre(), inputs=given).first_divergence
    assert first is not None and first.hints[0].proven, first
    assert first.hints[0].text.endswith("is read as it is, in 2 places"), first
