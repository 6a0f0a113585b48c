"""What is said of a mistake beside its words: whether it is proven, what was changed, what is left; two at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from glassengine.judge.graphs.cut import Piece
from glassengine.judge.hypotheses.explain import explain
from glassengine.judge.hypotheses.trials.question import Question, noise_of
from glassengine.judge.hypotheses.trials.trial import Trial
from glassengine.results import Hint


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


def test_what_is_moved_says_along_which_axis() -> None:
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
    assert {"bias of layer_norm is missing", "silu here, gelu in the candidate"} <= {
        part.removeprefix("the ").partition(":")[0] for part in hint.text.split("; and ")
    }
    assert hint.change is not None and len(hint.change.ops) == 2


def test_nothing_is_said_of_what_no_mistake_makes() -> None:
    tensors = [drawn(2, 7, 8), drawn(2, 7, 8, seed=1)]
    assert explained(torch.add, lambda x, y: x + y + drawn(2, 7, 8, seed=9), tensors) == []
