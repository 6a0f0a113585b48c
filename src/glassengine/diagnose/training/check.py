"""`glass.check_training`: where two training runs part company: which step, and there forward, backward or update.

The candidate is trained as it is; every step is judged from its own parameters, so that no error is passed on from
the step before:

    forward, backward   the baseline's step (see `gradient_graph`) is replayed op by op on the candidate's values, and
                        what the candidate's own run made (a compiled one, say) is judged at loss and gradients
    update              the baseline's optimizer is given the candidate's parameters, gradients and memory, in float64
                        (the prediction), in their own dtype and with rounded inputs (the floor)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from glassengine.diagnose.training.findings import TrainingFindings
from glassengine.diagnose.training.gradient_graph import (
    GRADIENT,
    LOSS,
    Loss,
    gradient_program,
    is_backward,
    state_of,
    step_inputs,
)
from glassengine.diagnose.training.gradient_mistakes import explained
from glassengine.diagnose.training.run import (
    OptimizerFactory,
    StepTaken,
    batches_of,
    loss_of,
    module_of,
    optimizer_of,
    train,
)
from glassengine.diagnose.training.updates import judge_updates
from glassengine.errors import IncomparableError
from glassengine.judge.cases import Case, Given
from glassengine.judge.graphs.by_name import SitePair, pair_sites
from glassengine.judge.pairing.by_value import pair_programs
from glassengine.judge.pairing.weights import compare_weights
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.program import ProgramSide
from glassengine.judge.sides.protocol import Guarantee, Observed, Place, Side, float_nodes
from glassengine.judge.verdict.conclude import as_written
from glassengine.judge.verdict.run import run_cases
from glassengine.judge.verdict.score import Score
from glassengine.program.representation.program import Program
from glassengine.results import FLAGGED, Comparison, Divergence, Hint, Pair, Policy, Skipped
from glassengine.sites import Site


def check_training(
    baseline: str | Path | nn.Module,
    candidate: str | Path | nn.Module | None = None,
    *,
    inputs: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    optimizer: str | OptimizerFactory | None = None,
    candidate_optimizer: str | OptimizerFactory | None = None,
    loss: str | Loss | None = None,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    fail_on: Literal["suspicious", "wrong"] = "wrong",
    min_coverage: float = 0.9,
) -> Comparison:
    """Judge a training run against a baseline and name the first step, phase and op where they part company.

    Neither module is changed. Costs about seven training steps of the baseline for each step, some of them in float64,
    and memory for parameters, gradients and the optimizer's memory of each step, several times over.

    Args:
        baseline: To trust; parameters of the same names as the candidate's, and the same values. A module in the mode
            in which it is trained, or what `check` takes, which is trained in training mode.
        candidate: Another implementation, or a compiled module (`torch.compile`); None for a copy of the baseline,
            which judges `candidate_optimizer` alone.
        inputs: Keyword arguments, one dict per step: `file.py:factory`, a tensor file, or the dicts themselves.
        optimizer: Makes the baseline's optimizer from its module: an optimizer, or (optimizer, scheduler); a function,
            or `file.py:function`. None takes AdamW.
        candidate_optimizer: Makes the candidate's; None for `optimizer`.
        loss: Gives the scalar loss from what a module returns: a function, or `file.py:function`; None takes `.loss`,
            `["loss"]`, or a scalar itself.
        dtype: As for `check`, of models that are loaded by name.
        attn_implementation: As for `check`.
        trust_remote_code: As for `check`.
        revision: As for `check`.
        fail_on: The mildest verdict that makes the result not ok.
        min_coverage: Least share of the float-valued ops of forward and backward that must have been judged.

    Raises:
        UsageError: A step cannot be traced, or an argument is invalid.
        IncomparableError: The two sides have different parameters, or other values of them.
    """
    batches, measure, made_by = batches_of(inputs), loss_of(loss), optimizer_of(optimizer)
    options = {
        "dtype": dtype,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
    }
    trusted = module_of(baseline, **options)
    other = module_of(candidate, **options) if candidate is not None else trusted
    _require_one_model(trusted, _plain(other))
    # A compiled module shares the parameters of the one it was made from: these are put back.
    kept = copy.deepcopy(state_of(_plain(other)))
    trained = other if _plain(other) is not other else copy.deepcopy(other)
    try:
        steps = train(trained, batches, measure, optimizer_of(candidate_optimizer) if candidate_optimizer else made_by)
    finally:
        with torch.no_grad():
            for name, tensor in state_of(_plain(other)).items():
                tensor.copy_(kept[name])
        if trained is other:
            _plain(other).zero_grad(set_to_none=True)
    found = TrainingFindings()
    for number, (step, batch) in enumerate(zip(steps, batches, strict=True)):
        _judge_gradients(found, number, trusted, _plain(other), step, batch, measure)
    judge_updates(found, trusted, steps, made_by)
    _list_statistics(found, steps)
    names = [
        type(_plain(module)).__name__ if isinstance(target, nn.Module | None) else str(target)
        for target, module in ((baseline, trusted), (candidate, other))
    ]
    return found.conclude(names[0], names[1], Policy(fail_on, min_coverage))


def _list_statistics(found: TrainingFindings, steps: Sequence[StepTaken]) -> None:
    """List the buffers that a run writes: each step is judged from the candidate's own."""
    for name in steps[-1].buffers_written:
        reason = "a buffer that the forward writes is not judged: running statistics, say"
        found.skipped.append(Skipped(name, "both", reason, level="update"))


@dataclass
class _RunSide(Side):
    """What the candidate's own run made: loss and gradients, by node of the baseline's program."""

    baseline: Program
    taken: StepTaken

    def begin(self, case: Case) -> None:
        """Nothing is carried from case to case."""

    def step(self, inputs: Given) -> None:
        """It has run."""

    def observed(self, node: str) -> list[Observed]:
        """Return loss and gradients; a parameter without a gradient has one of zeros."""
        found = []
        for name, own in self.baseline.output_nodes.items():
            if own != node:
                continue
            if name == LOSS:
                found.append(Observed(self.taken.loss, name, "output"))
            else:
                parameter = name.removesuffix(GRADIENT)
                gradient = self.taken.gradients[parameter]
                zeros = torch.zeros_like(self.taken.state[parameter])
                found.append(Observed(zeros if gradient is None else gradient, name, "output"))
        return found

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return loss and gradients."""
        return self.results_by_node(self.baseline)


def _judge_gradients(
    found: TrainingFindings,
    number: int,
    baseline: nn.Module,
    candidate: nn.Module,
    taken: StepTaken,
    batch: Mapping[str, Any],
    loss: Loss,
) -> None:
    """Judge forward and backward of one step of the candidate, from its own parameters."""
    with torch.enable_grad():
        program = gradient_program(baseline, batch, loss, taken.state)
        theirs = program if candidate is baseline else gradient_program(candidate, batch, loss, taken.state)
    given = step_inputs(taken.state, batch)
    case = Case(f"step {number}", 1, steps=(given,))

    def scores_of(pairs: Mapping[str, SitePair]) -> tuple[Score, Score]:
        scores = [
            Score(ProgramSide(theirs, pairs, place=Place.STEP, replay=Replay(program)), program),
            Score(_RunSide(program, taken, place=Place.RUN, guarantee=Guarantee.GRADIENTS), program),
        ]
        run_cases(program, [case], None, scores, coarsest=None, on_step=lambda *_: None)
        return scores[0], scores[1]

    pairs, only_ours, only_theirs = pair_sites(program, theirs)
    used = {pair.baseline.node: pair for pair in pairs}
    ops, run = scores_of(used)
    if ops.divergences and only_ours and not any(pair.verdict in FLAGGED for pair in run.pairs):
        # Written with other ops, perhaps rightly: what the ops compute says better which belong together.
        used = pair_programs(program, theirs, [case])
        ops, run = scores_of(used)
    order = {node.name: index for index, node in enumerate(program.graph.nodes)}
    phases = {site.node: "backward" if is_backward(site.name) else "forward" for site in program.sites}
    at_site = {site.name: phases[site.node] for site in program.sites}
    own = sorted(ops.divergences.values(), key=lambda d: order[d.node or ""])
    own = [replace(d, level=phases[d.node or ""], step=number) for d in own]
    own, judged = _without_rewrites(own, ops.pairs, run.pairs, [*only_ours, *only_theirs])
    known = {d.site for d in found.origins}
    own = [as_written(ops, program, d) for d in own]
    flagged = {pair.candidate_site for pair in run.pairs if pair.verdict in FLAGGED}
    if flagged and LOSS not in flagged:
        own = explained(own, (program, theirs), used, taken, given)
    found.origins += [d for d in own if d.site not in known]
    found.pairs += [replace(pair, step=number, level=at_site[pair.site]) for pair in judged]
    found.pairs += [replace(p, step=number, site=p.candidate_site, inherited=bool(own)) for p in run.pairs]
    if not own:
        # The ops are all right as they were traced: what ran instead of them (a compiler's kernels) is not.
        for d in sorted(run.divergences.values(), key=lambda d: order[d.node or ""]):
            hint = Hint(
                "other", "every op is right when it is run by itself: the run itself is not", 0.5, evidence="compiled"
            )
            if d.candidate_site not in known:
                found.origins.append(replace(d, step=number, site=d.candidate_site, hints=(hint, *d.hints)))
    wanted = float_nodes(program, ("op",))
    names = {site.node: site.name for site in program.sites}
    found.wanted |= {names[node] for node in wanted}
    found.judged |= {names[node] for node in wanted & ops.judged_nodes}
    if number == 0:
        reason = "no counterpart in the same module call of the other side"
        found.skipped += [Skipped(site.name, "baseline", reason, level=at_site[site.name]) for site in only_ours]
        found.skipped += [Skipped(site.name, "candidate", reason) for site in only_theirs]


def _without_rewrites(
    origins: Sequence[Divergence], ops: Sequence[Pair], results: Sequence[Pair], unmatched: Sequence[Site]
) -> tuple[list[Divergence], list[Pair]]:
    """Cap at suspicious what was found in a module that is written with other ops, where loss and gradients agree.

    In such a module an op may have been paired with one that computes something else, or its error may be
    below the noise.
    """
    if any(pair.verdict in FLAGGED for pair in results):
        return list(origins), list(ops)
    rewritten = {site.name.rpartition("/")[0] for site in unmatched}
    if any(found.verdict == "wrong" and found.site.rpartition("/")[0] not in rewritten for found in origins):
        return list(origins), list(ops)
    reason = "written with other ops; loss and gradients agree"
    capped = [replace(found, verdict="suspicious") for found in origins]
    return capped, [replace(p, verdict="suspicious", reason=reason) if p.verdict == "wrong" else p for p in ops]


def _require_one_model(baseline: nn.Module, candidate: nn.Module) -> None:
    ours, theirs = state_of(baseline), state_of(candidate)
    if set(ours) != set(theirs):
        alone = sorted(set(ours) ^ set(theirs))
        raise IncomparableError(
            "the two sides have different parameters", got=", ".join(alone[:5]), expected="the same names on both sides"
        )
    different = compare_weights(ours, theirs).different
    if different:
        raise IncomparableError(
            "the two sides begin with different parameters",
            got=", ".join(different[:5]),
            expected="the same values: candidate.load_state_dict(baseline.state_dict())",
        )


def _plain(module: nn.Module) -> nn.Module:
    found: nn.Module = getattr(module, "_orig_mod", module)
    return found
