"""The mistakes that are tried, the most credible first: what the candidate's program shows, then common mistakes,
then anything that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from glassengine.judge.hypotheses.mistakes.arguments import (
    another_op,
    as_theirs,
    one_for_several,
    same_op,
    usual,
    whole,
)
from glassengine.judge.hypotheses.mistakes.coarser import coarser
from glassengine.judge.hypotheses.mistakes.derivatives import derivatives
from glassengine.judge.hypotheses.mistakes.fused import fused
from glassengine.judge.hypotheses.mistakes.layouts import neighbors, permuted_operands, reshaped, unturned
from glassengine.judge.hypotheses.mistakes.losses import losses, relabeled
from glassengine.judge.hypotheses.mistakes.masks import of_attention
from glassengine.judge.hypotheses.mistakes.more import done_more
from glassengine.judge.hypotheses.mistakes.norms import variances
from glassengine.judge.hypotheses.mistakes.operands import altered, another, another_inside, exchanged, left_out
from glassengine.judge.hypotheses.mistakes.operations import activations, other_ops
from glassengine.judge.hypotheses.mistakes.packed import packed
from glassengine.judge.hypotheses.mistakes.parts import cut_off, dropped, parts, zeroed
from glassengine.judge.hypotheses.mistakes.seen import counted, seen_pairs
from glassengine.judge.hypotheses.mistakes.solved import bases, solved, stretched
from glassengine.judge.hypotheses.mistakes.steps import steps
from glassengine.judge.hypotheses.mistakes.weights_read import another_layer, another_module, every_weight, weights
from glassengine.judge.hypotheses.mistakes.wholes import (
    another_tensor,
    done_twice,
    in_its_own_dtype,
    rearranged,
    scaled,
)
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question

Family = Callable[[Question], Iterator[Hypothesis]]

FAMILIES: tuple[tuple[float, Family], ...] = (
    (1.0, same_op),
    (1.0, weights),
    (1.0, packed),
    (0.98, as_theirs),
    (0.97, of_attention),
    (0.97, bases),
    (0.97, stretched),
    (0.97, losses),
    (0.97, relabeled),
    (0.97, derivatives),
    (0.96, steps),
    (0.96, exchanged),
    (0.96, left_out),
    (0.96, activations),
    (0.95, other_ops),
    (0.95, variances),
    (0.95, usual),
    (0.95, another_op),
    (0.95, one_for_several),
    (0.94, neighbors),
    (0.94, unturned),
    (0.94, reshaped),
    (0.94, fused),
    (0.93, whole),
    (0.93, another_layer),
    (0.93, another_module),
    (0.93, every_weight),
    (0.93, another),
    (0.93, another_inside),
    (0.92, another_tensor),
    (0.92, altered),
    (0.92, done_twice),
    (0.92, in_its_own_dtype),
    (0.92, coarser),
    (0.92, cut_off),
    (0.92, zeroed),
    (0.92, dropped),
    (0.91, done_more),
    (0.91, permuted_operands),
    (0.9, solved),
    (0.85, rearranged),
    (0.82, parts),
    (0.81, seen_pairs),
    (0.81, counted),
    (0.8, scaled),
)
"""Score and family. Each hint was tried and reproduces the candidate's result; the score only ranks."""
