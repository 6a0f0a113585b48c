"""An op that the candidate has and the baseline does not: done to one tensor of the piece, and to nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.graphs.between import passes_on
from glassengine.judge.hypotheses.mistakes.meanings import BENDING
from glassengine.judge.hypotheses.trials.hypothesis import Hypothesis
from glassengine.judge.hypotheses.trials.question import Question
from glassengine.judge.hypotheses.trials.trial import Call, Edit
from glassengine.numerics.float64 import retarget
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results import Kind


def done_more(question: Question) -> Iterator[Hypothesis]:
    """Yield: an op that reads one tensor, and that only the candidate has, is done to a tensor as well."""
    trial = question.trial
    own = {node.target for node in trial.ops}
    for theirs in question.theirs:
        # A number that is multiplied or added is one of scale, or of what is lost, which are asked elsewhere.
        is_number = traits_of(theirs).kind in ("factor", "term")
        if theirs.target in own or is_number or passes_on(theirs) or len(theirs.all_input_nodes) != 1:
            continue
        kind: Kind = "activation" if traits_of(theirs).kind in BENDING else "other"
        for node in reversed([*trial.inputs, *trial.ops]):
            value = trial.values[node]
            is_given = node.op == "placeholder" and node.name in question.weights
            if isinstance(value, torch.Tensor) and value.is_floating_point() and not is_given:
                text = f"{op_name(theirs)} of {question.label(node)} in the candidate, none here"
                yield Hypothesis(kind, text, {node: _done(theirs)})


def _done(theirs: Node) -> Edit:
    leaves, spec = pytree.tree_flatten((theirs.args, dict(theirs.kwargs)))

    target: Any = theirs.target

    def edit(call: Call) -> Any:
        args, kwargs = pytree.tree_unflatten([call.value if isinstance(one, Node) else one for one in leaves], spec)
        return target(*pytree.tree_map(retarget, args), **pytree.tree_map(retarget, kwargs))

    return edit
