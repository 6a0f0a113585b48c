"""What is said of a mistake beside its words: whether it is proven, what was changed, what is left; two at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from glassengine.judge.hypotheses.trials.question import Question, noise_of
from glassengine.judge.hypotheses.trials.trial import Trial
from glassengine.judge.pieces import Piece
from glassengine.results import Hint
from tests.judge.hypotheses.asking import explain


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def explained(
    right: Callable[..., Tensor], wrong: Callable[..., Tensor], tensors: list[Tensor], weights: int = 0
) -> list[Hint]:
    """Return the hints of a wrong function; the last `weights` tensors are weights."""
    module = make_fx(lambda *given: (right(*given),), pre_dispatch=True)(*tensors)
    places = module.graph.find_nodes(op="placeholder")
    names = [place.name for place in places]
    end = module.graph.output_node().all_input_nodes[0].name
    piece = Piece(module, dict(zip(names, tensors, strict=True)), (end,))
    trial = Trial(piece)
    made = wrong(*tensors)
    held = frozenset(names[len(names) - weights :])
    return explain(Question(trial, made.double(), None, noise_of(piece, trial.right, made), weights=held))


def test_a_proof_has_its_change_and_leaves_nothing() -> None:
    q, k, v = (drawn(2, 4, 6, 16, seed=seed) for seed in range(3))
    (hint,) = explained(
        F.scaled_dot_product_attention,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=1 / 16),
        [q, k, v],
    )
    assert (hint.kind, hint.evidence, hint.proven) == ("scale", "tried", True)
    assert hint.change is not None and hint.unexplained is not None and hint.unexplained < 1e-3
    assert (hint.change.argument, hint.change.candidate, hint.change.origin) == ("scale", 1 / 16, "1 / 16")
    assert hint.text.endswith("(1 / 16)")


def test_a_hint_names_the_axis_of_a_shift() -> None:
    (hint,) = explained(torch.add, lambda x, y: x + y.roll(1, 1), [drawn(2, 7, 8), drawn(2, 7, 8, seed=1)])
    assert hint.kind == "position" and hint.proven and hint.change is not None
    assert (hint.change.axis, hint.change.candidate, len(hint.change.operands)) == (1, 1, 1)


def test_two_mistakes_at_once_are_named_together() -> None:
    tensors = [drawn(3, 5, 32), drawn(32, seed=1) + 1, drawn(32, seed=2)]

    def right(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return F.silu(F.layer_norm(x, (32,), gain, bias))

    def wrong(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(F.layer_norm(x, (32,), gain))

    (hint,) = explained(right, wrong, tensors, weights=2)
    assert hint.proven and "; and " in hint.text
    assert {"bias of layer_norm is missing", "silu in the baseline, gelu in the candidate"} <= {
        part.removeprefix("the ").partition(":")[0] for part in hint.text.split("; and ")
    }
    assert hint.change is not None and len(hint.change.ops) == 2


def test_nothing_is_said_of_what_no_mistake_makes() -> None:
    tensors = [drawn(2, 7, 8), drawn(2, 7, 8, seed=1)]
    assert explained(torch.add, lambda x, y: x + y + drawn(2, 7, 8, seed=9), tensors) == []


@pytest.mark.parametrize(("size", "num_tried", "is_needed"), [(1.0, 100, True), (0.06, 100, False), (0.06, 1, True)])
def test_two_mistakes_need_more_than_the_rounding_of_half_precision(
    size: float, num_tried: int, is_needed: bool
) -> None:
    """What a second change removes is told from rounding, and from what one of so many pairs does by chance."""
    x, error = drawn(4, 64).bfloat16(), drawn(4, 64, seed=1).bfloat16()
    module = make_fx(lambda x: (x * 1.5,))(x)
    piece = Piece(module, {"x_1": x}, (module.graph.output_node().all_input_nodes[0].name,))
    trial = Trial(piece)
    made = (x.double() * 1.5 + size * error.double()).bfloat16()
    question = Question(trial, made.double(), None, noise_of(piece, trial.right, made))
    both, alone = x.double() * 1.5 + size * error.double(), x.double() * 1.5
    assert question.needs_both(both, (alone, None), num_tried) is is_needed
    assert not question.needs_both(both, (both, alone), 1)  # one of them is enough


def test_a_mask_that_is_moved_is_a_mask() -> None:
    q, k, v = (drawn(2, 4, 6, 16, seed=seed) for seed in range(3))
    mask = drawn(2, 1, 6, 6, seed=3) > 0
    mask[..., 0] = True

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask)

    (hint,) = explained(
        attention, lambda q, k, v, mask: attention(q, k, v, mask.roll(1, -1)), [q, k, v, mask | mask.roll(-1, -1)]
    )
    assert hint.proven and hint.kind == "mask" and "moved by" in hint.text


def test_the_first_value_that_was_never_written_is_named() -> None:
    q, k, v = (drawn(2, 4, 6, 16, seed=seed) for seed in range(3))

    def wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, F.pad(v[:, :, 1:], (0, 0, 1, 0)))

    (hint,) = explained(F.scaled_dot_product_attention, wrong, [q, k, v])
    assert hint.proven and "the first of axis 2" in hint.text and "is zero" in hint.text


def test_the_sign_of_positions_is_a_position() -> None:
    def right(bands: Tensor) -> Tensor:
        return ((torch.arange(6)[:, None] * 1.0) * bands).sin()

    (hint,) = explained(right, lambda bands: ((torch.arange(6)[:, None] * -1.0) * bands).sin(), [drawn(8)], weights=1)
    assert hint.proven and (hint.kind, hint.change and hint.change.candidate) == ("position", -1.0), hint
    (hint,) = explained(lambda x: (x * 1.0).sin(), lambda x: (x * -1.0).sin(), [drawn(5, 8)])
    assert hint.proven and hint.kind == "scale"


def test_a_rotation_the_other_way_is_a_position() -> None:
    def turned(x: Tensor, sign: float) -> Tensor:
        sines = (torch.arange(6)[:, None] * torch.arange(1.0, 5.0)).sin() * sign
        return x * sines.exp() + sines

    (hint,) = explained(lambda x: turned(x, 1.0), lambda x: turned(x, -1.0), [drawn(6, 4)])
    assert hint.proven and hint.kind == "position", hint
    (hint,) = explained(lambda x: turned(x, 1.0), lambda x: turned(x, 2.0), [drawn(6, 4)])
    assert hint.proven and hint.kind == "scale", hint


def test_what_was_normed_in_place_of_what_was_not() -> None:
    x, gain = drawn(3, 5, 32), drawn(32, seed=1) + 2

    def right(x: Tensor, gain: Tensor) -> Tensor:
        y = x.tanh() * 1.5
        return y + F.layer_norm(y, (32,), gain).sin()

    def wrong(x: Tensor, gain: Tensor) -> Tensor:
        y = F.layer_norm(x.tanh() * 1.5, (32,), gain)
        return y + y.sin()

    (hint,) = explained(right, wrong, [x, gain], weights=1)
    assert hint.proven and hint.kind == "swapped" and "instead of" in hint.text
