"""`glass.check_training`: where two training runs part company: which step, and there forward, backward or update.

The candidate is trained as it is; every step is judged from its own parameters, so that no error is passed on from
the step before:

    forward, backward   the baseline's step (see `gradient_program`) is replayed op by op on the candidate's values, and
                        what the candidate's own run made (a compiled one, say) is judged at loss and gradients
    update              the baseline's optimizer is given the candidate's parameters, gradients and memory, in float64
                        (the prediction), in their own dtype and with rounded inputs (the floor)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from glassengine import environment
from glassengine.diagnose.training_mistakes import Updates, explained, kind_of_option
from glassengine.diagnose.training_run import (
    GRADIENT,
    LOSS,
    Loss,
    OptimizerFactory,
    StepTaken,
    batches_of,
    gradient_program,
    is_backward,
    loss_of,
    module_of,
    optimizer_of,
    options_of,
    repeat_update,
    split,
    step_inputs,
    train,
)
from glassengine.errors import IncomparableError
from glassengine.judge.cases import Case, Given
from glassengine.judge.pairing.by_value import pair_programs
from glassengine.judge.pairing.weights import compare_weights
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.program import ProgramSide
from glassengine.judge.sides.protocol import Guarantee, Observed, Place, Side, float_nodes
from glassengine.judge.site_pairs import SitePair, pair_sites
from glassengine.judge.verdict.run import run_cases
from glassengine.judge.verdict.score import Score
from glassengine.judge.verdict.source_lines import as_written
from glassengine.numerics.float64 import double
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.verdict import Reference
from glassengine.program.representation.program import Program
from glassengine.program.user_code.module_state import weights_of
from glassengine.results import (
    FLAGGED,
    Comparison,
    Divergence,
    Findings,
    Hint,
    LevelResult,
    Pair,
    Policy,
    Skipped,
    WrittenDifferently,
    worst,
)
from glassengine.results.sentences import mistake
from glassengine.sites import Site

GUARANTEES = {
    "forward": Guarantee.EVERY_OP.text,
    "backward": Guarantee.EVERY_OP.text,
    "run": Guarantee.GRADIENTS.text,
    "update": "judged by the optimizer's step",
}
LEVELS = tuple(GUARANTEES)
"""In the order in which a step makes them: "run" is what the candidate's own forward and backward came to."""


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
    kept = copy.deepcopy(weights_of(_plain(other)))
    trained = other if _plain(other) is not other else copy.deepcopy(other)
    try:
        steps = train(trained, batches, measure, optimizer_of(candidate_optimizer) if candidate_optimizer else made_by)
    finally:
        with torch.no_grad():
            for name, tensor in weights_of(_plain(other)).items():
                tensor.copy_(kept[name])
        if trained is other:
            _plain(other).zero_grad(set_to_none=True)
    found = TrainingFindings()
    for number, (step, batch) in enumerate(zip(steps, batches, strict=True)):
        _judge_gradients(found, number, trusted, _plain(other), step, batch, measure)
    judge_updates(found, trusted, steps, made_by)
    reason = "a buffer that the forward writes is not judged: running statistics, say"
    found.skipped += [Skipped(name, "both", reason, level="update") for name in steps[-1].buffers_written]
    names = [
        type(_plain(module)).__name__ if isinstance(target, nn.Module) else str(target)
        for target, module in ((baseline, trusted), (baseline if candidate is None else candidate, other))
    ]
    return found.conclude(names[0], names[1], Policy(fail_on, min_coverage))


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
    ours, theirs = weights_of(baseline), weights_of(candidate)
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


def judge_updates(
    found: TrainingFindings, baseline: nn.Module, steps: Sequence[StepTaken], optimizer: OptimizerFactory
) -> None:
    """Judge every update of the candidate by the baseline's optimizer, from the candidate's own gradients."""
    generator = torch.Generator().manual_seed(0)

    def disturbed(tensor: Tensor) -> Tensor:
        unit = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
        return double(tensor) * (1 + unit_roundoff(tensor.dtype) * unit)

    changes: list[Callable[[Tensor], Tensor]] = [double, lambda tensor: tensor, disturbed]
    lanes = []
    for lane in range(len(changes)):
        twin = copy.deepcopy(baseline) if lane == 1 else copy.deepcopy(baseline).double()
        made, scheduler = split(optimizer(twin))
        lanes.append((made, scheduler, {parameter: name for name, parameter in twin.named_parameters()}))
    flagged: set[str] = set()
    for number, step in enumerate(steps):
        results = [
            repeat_update(made, names, step, change) for (made, _, names), change in zip(lanes, changes, strict=True)
        ]
        updates = Updates(lanes[0][0], lanes[0][2], step)
        hints = dict(_options_differ(options_of(lanes[1][0], lanes[1][2]), step.options))
        for site, exact, native, noisy, theirs in _updated(results, step, found, number):
            judgement = Reference(double(exact), native, [double(noisy)], dtype=native.dtype, valid=None).judge(theirs)
            hint = hints.get(site.partition(":")[0])
            if judgement.verdict == "suspicious" and hint is not None:
                # Two kinds of evidence: too large for rounding, and other hyperparameters.
                judgement = replace(
                    judgement, verdict="wrong", reason="written differently, and too large for rounding"
                )
            if hint is not None:
                known = found.written.get(hint)
                verdict = judgement.verdict if known is None else worst([known.verdict, judgement.verdict])
                found.written[hint] = WrittenDifferently(known.site if known else site, site, hint, verdict, "update")
            case = f"step {number}"
            pair = Pair(number, site, site, "name", 1.0, judgement.verdict, "reverse replay", case=case, level="update")
            found.pairs.append(replace(pair, noise_ratio=judgement.noise_ratio, reason=judgement.reason))
            if judgement.verdict in FLAGGED and site not in flagged:
                flagged.add(site)
                tried = updates.explain(site, exact, native, theirs)
                guess = tried or (Hint(kind_of_option(hint.partition(":")[0]), hint, 1.0, "argument") if hint else None)
                found.origins.append(
                    Divergence(
                        level="update",
                        step=number,
                        site=site,
                        node=None,
                        candidate_site=site,
                        source=None,
                        verdict=judgement.verdict,
                        noise_ratio=judgement.noise_ratio,
                        introduced=judgement.rms_error,
                        inherited=0.0,
                        hints=() if guess is None else (guess,),
                    )
                )
        for _, scheduler, _ in lanes:
            if scheduler is not None:
                scheduler.step()
    found.origins.sort(key=lambda d: (d.step, LEVELS.index(d.level or "")))


def _updated(
    results: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Mapping[str, Any]]]],
    step: StepTaken,
    found: TrainingFindings,
    number: int,
) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
    """Yield (site, exact, native, noisy, candidate) of the optimizer's memory first: parameters are made from it."""
    (parameters, _), (_, native), _ = results
    for name in step.parameters_after:
        for key in native.get(name, {}):
            values = [result[1].get(name, {}).get(key) for result in results]
            theirs = step.memory_after.get(name, {}).get(key)
            site = f"{name}:state.{key}"
            if all(isinstance(value, Tensor) for value in (*values, theirs)):
                yield site, *values, theirs  # type: ignore[misc]
            elif isinstance(values[1], Tensor) and number == 0:
                found.skipped.append(Skipped(site, "baseline", "the candidate's optimizer keeps no such value"))
    for name, theirs in step.parameters_after.items():
        yield f"{name}:param", parameters[name], results[1][0][name], results[2][0][name], theirs


def _options_differ(
    ours: Mapping[str, Mapping[str, Any]], theirs: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, str]]:
    for name, options in ours.items():
        other = theirs.get(name)
        if other is None:
            yield name, "the candidate's optimizer does not have this parameter"
            continue
        differing = [key for key in options if key in other and options[key] != other[key]]
        if differing:
            yield (
                name,
                "; ".join(f"{key}: {options[key]} in the baseline, {other[key]} in the candidate" for key in differing),
            )


@dataclass
class TrainingFindings:
    """What was judged so far."""

    pairs: list[Pair] = field(default_factory=list)
    origins: list[Divergence] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    wanted: set[str] = field(default_factory=set)
    judged: set[str] = field(default_factory=set)
    written: dict[str, WrittenDifferently] = field(default_factory=dict)

    def conclude(self, baseline: str, candidate: str, policy: Policy) -> Comparison:
        """Return the comparison."""
        levels = []
        for name, guarantee in GUARANTEES.items():
            own = [pair for pair in self.pairs if pair.level == name]
            first = min((d for d in self.origins if d.level == name), key=lambda d: d.step, default=None)
            verdict = worst(pair.verdict for pair in own)
            if own:
                levels.append(LevelResult(name, "baseline", "candidate", verdict, guarantee, len(own), None, first))
        verdict = worst(pair.verdict for pair in self.pairs)
        first = self._first()
        found = Findings(
            baseline=baseline,
            candidate=candidate,
            environment=environment.describe(),
            inside=verdict,
            inside_reason=f"a tensor is {verdict}" if first is None else self._reason(first),
            first_divergence=first,
            origins=self.origins,
            pairs=self.pairs,
            skipped=self.skipped,
            coverage=len(self.judged) / len(self.wanted) if self.wanted else 1.0,
            levels=levels,
            written_differently=list(self.written.values()),
        )
        return found.conclude(policy)

    def _first(self) -> Divergence | None:
        """Return the first of the worst origins; one of the forward only if the loss differs, or nothing else does."""
        worst_ones = next(
            (some for level in reversed(FLAGGED) if (some := [d for d in self.origins if d.verdict == level])), []
        )
        flagged = {
            pair.site: pair.step for pair in reversed(self.pairs) if pair.level == "run" and pair.verdict in FLAGGED
        }
        if flagged and LOSS not in flagged:
            return next((d for d in worst_ones if d.level != "forward"), None) or next(iter(worst_ones), None)
        return next(iter(worst_ones), None)

    def _reason(self, first: Divergence) -> str:
        """Return what is wrong: the loss, how many gradients, or an op alone."""
        run = [pair for pair in self.pairs if pair.level == "run" and pair.step == first.step]
        gradients = [pair for pair in run if pair.site.endswith(GRADIENT)]
        wrong = [pair for pair in gradients if pair.verdict in FLAGGED]
        op = f"the first {first.verdict} {first.noun} is {first.site} ({first.level}, step {first.step})"
        if not wrong:
            return op
        is_loss_wrong = any(pair.site == LOSS and pair.verdict in FLAGGED for pair in run)
        loss = "the loss differs" if is_loss_wrong else "the loss agrees"
        # In the order of the backward.
        name = wrong[0].site.removesuffix(GRADIENT)
        op = mistake(first) or op
        return f"{loss}, {len(wrong)} of {len(gradients)} gradients are wrong, first that of {name}; {op}"
