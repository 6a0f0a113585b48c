"""Compares records of tensors without their models: pairs them, judges by the baseline's noise floor or tolerances.

Pipeline: open both sides, bring them into one form, refuse what cannot be compared, pair by map, name and alias within
a step and rank, judge pair by pair, apply the rules over several verdicts, rank. What is not judged is listed with its
reason. A baseline that was recorded with its noise floor says what rounding alone explains; dtype-aware tolerances know
nothing about the computation, so a verdict based on them is reported as uncalibrated. Neither distinguishes an
error of an op from one that is passed on.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from glassengine import environment
from glassengine.compare.judge import BY_FLOOR, BY_GIVEN_TOLERANCE
from glassengine.compare.matching.maps import TensorMap, load_map
from glassengine.compare.matching.matching import MatchedPair
from glassengine.compare.matching.sources import ExecutionOrder, SourceWrapper, phase_of
from glassengine.compare.pairs import ComparisonPlan, PairBlock, planned
from glassengine.compare.roundings import (
    BY_TOLERANCE,
    COARSE,
    IF_COARSE,
    NOT_JUDGED,
    ROUNDED,
    TOO_SMALL,
    PrecisionTable,
    beside_larger,
    not_judged,
)
from glassengine.compare.session import ComparisonOptions, ComparisonRequest, ComparisonSession, Map, Side, judge_block
from glassengine.compare.verdicts import Judging, Verdicts, apply_cross_pair_rules
from glassengine.errors import IncomparableError, UnknownNameError, UsageError, first_line
from glassengine.extensions import plugin
from glassengine.numerics.exemptions import Ledger
from glassengine.progress import Progress, Work, silent
from glassengine.recording.layout.entries import Entries
from glassengine.recording.layout.noise_floor import NoiseFloor
from glassengine.recording.source import TensorSource, open_source
from glassengine.recording.write.policy import NO_VALUES
from glassengine.results import VERDICTS, Comparison, Divergence, Findings, Packed, Policy, Skipped, counts_of, worst
from glassengine.results.comparison import Comparisons
from glassengine.results.findings import over_budget
from glassengine.results.pairs import severity
from glassengine.sites import ROOT, matches, patterns_of
from glassengine.workers import InProcess, Workers
from glassengine.workers.processes import Processes

_PRINTED = "uncalibrated: only printed mean, deviation, minimum and maximum are known"
_BYTES_A_PROCESS = 2 << 30
"""Below, a process takes longer to start than it saves."""
_MOST_PROCESSES = 8
_BYTES_FOR_THREADS = 32 << 20
_MOST_THREADS = 4
"""More of them wait for the interpreter lock."""

FailOn = Literal["rounding", "suspicious", "wrong"]


def compare(
    baseline: str | Path | TensorSource,
    candidate: str | Path | TensorSource,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    map: str | Path | Mapping[str, Any] | TensorMap | None = None,
    show_only: Sequence[str] = (),
    floating_point_only: bool = False,
    transpose: Sequence[str] = (),
    device: str = "cpu",
    fail_on: FailOn | None = None,
    min_coverage: float = 0.9,
    min_snr: float | None = None,
    jobs: int | None = None,
    cluster: str | None = None,
    first: bool = False,
    progress: Progress = silent,
) -> Comparison:
    """Judge every tensor of `candidate` against the tensor of the same step and rank in `baseline` that it belongs to.

    Tensors belong together by `map`, by name, or by an alias that a recording knows. Where one side was run by several
    ranks and the other by one, the parts of the ranks are put together (`compare.ranks.ranks`). Memory: rows of 4 MiB
    of large tensors of recordings, whole tensors of other files and where a layout changes. The work is cut into blocks
    from the indices alone (`compare.pairs`); the number of workers makes no difference to the result.

    Args:
        baseline: Recording directory, `.pt`, `.pth`, `.safetensors`, `.npz`, `.npy`, a directory of `step{i}.pt` or of
            `<name>-step<i>.npy`, or an open source.
        candidate: The same.
        rtol: Relative tolerance instead of the dtype's own; integers and bools stay exact.
        atol: Absolute tolerance instead of the dtype's own; integers and bools stay exact.
        map: Which names belong together and in which layout: a JSON file or what it holds (`compare.matching.maps`).
        show_only: Site patterns (glob or `re:`): only these tensors are judged and shown, each with its statistics.
        floating_point_only: Skip integers and bools.
        transpose: Site patterns whose baseline tensor is transposed (its last two dimensions) first; of what a pattern
            names, vectors stay as they are.
        device: Where the arithmetic runs, e.g. "cuda"; it must know float64.
        fail_on: The mildest verdict that makes the result not ok; None is "wrong". Two recordings of two precisions
            are judged by what is left of the signal (`compare.roundings`), unless it or a tolerance is given.
        min_coverage: The result is not ok when a smaller share of the baseline's float-valued tensors was judged.
        min_snr: Of two precisions: least signal-to-noise ratio of each result, in dB.
        jobs: Processes of this machine that judge; 1 is this one. The sides are paths then, and so is `map`, or a dict.
            None is up to four threads of this process below 4 GB of both sides, else a process for each 2 GB, up
            to the processors and 8.
        cluster: Ray tasks judge: `ray://HOST:PORT`, or "auto". As for `jobs`; `jobs` bounds how many at a time.
        first: Stop after the first block with a tensor that is wrong.
        progress: Called with an event for each block that is over.

    Raises:
        BackendError: The cluster cannot be used.
        IncomparableError: The sides hold different token ids, or nothing can be compared.
        UnknownNameError: A pattern names nothing.
        UsageError: A side does not exist, an argument or the map is invalid, or Ray is not installed.
        CorruptError: A side is damaged.
    """
    if jobs is not None and jobs < 1:
        raise UsageError("invalid --jobs", got=str(jobs), expected="a number from 1 on")
    if cluster is not None:
        plugin("cluster.ray_tasks").require_ray()  # before anything is read
    check_arguments(rtol, atol, fail_on or "wrong", min_coverage, device)
    show_only, transpose = patterns_of(show_only, "show_only"), patterns_of(transpose, "transpose")
    by_drift = fail_on is None and rtol is None and atol is None
    options = ComparisonOptions(rtol, atol, tuple(transpose), device, by_drift)
    rules = None if map is None else load_map(map)
    left, right = (open_source(side) if isinstance(side, str | Path) else side for side in (baseline, candidate))
    require_same_tokens(left, right)
    session = ComparisonSession(left, right, rules, options)
    require_names(show_only, *session.sides)
    require_names(transpose, session.sides[0])
    plan = planned(session.judge, rules, show_only=show_only, floating_point_only=floating_point_only)
    if not len(plan.pairs):
        raise nothing_to_compare(*session.sides, plan.impossible)
    workers, task = _workers(session, plan, (baseline, candidate, map, options), jobs, cluster)
    precision = None if session.dtypes is None else PrecisionTable(session.dtypes)
    ledger = Ledger()
    judging = Judging(session, plan, workers, task, ledger, precision)
    total = len(plan.spans)
    progress(Work.JUDGING.says(f"judging {len(plan.pairs)} tensors in {total} blocks", 0, total))
    try:
        verdicts = judging.verdicts(
            first=first, on_block=lambda done: progress(Work.JUDGING.says(f"block {done} of {total}", done, total))
        )
    finally:
        workers.close()
    return _concluded(
        session,
        plan,
        judging,
        verdicts,
        ledger,
        precision,
        policy=Policy(fail_on or "wrong", min_coverage, min_snr),
        show_only=show_only,
    )


def compare_many(
    baseline: str | Path | TensorSource, candidates: Sequence[str | Path | TensorSource], **options: Any
) -> Comparisons:
    """Judge every one of `candidates` against `baseline`; the options are those of `compare`.

    Raises:
        UsageError: No candidate is given; otherwise as `compare`.
        IncomparableError: As `compare`.
        UnknownNameError: As `compare`.
        CorruptError: As `compare`.
    """
    if not candidates:
        raise UsageError("no candidate to compare", expected="one or more")
    found = [compare(baseline, candidate, **options) for candidate in candidates]
    bad = [one for one in found if not one.ok]
    return Comparisons(
        baseline=found[0].baseline,
        ok=not bad,
        verdict=worst(one.verdict for one in found),
        comparisons=tuple(found),
        too_little=bool(bad) and all(one.too_little for one in bad),
    )


def _workers(
    session: ComparisonSession,
    plan: ComparisonPlan,
    asked: tuple[Side, Side, Map, ComparisonOptions],
    jobs: int | None,
    cluster: str | None,
) -> tuple[Workers, Callable[[PairBlock], Any]]:
    """Return who judges blocks, and a function that returns what they are sent of one."""
    baseline, candidate, map, options = asked
    if jobs is None and cluster is None:
        is_sent = all(isinstance(side, str | Path) for side in asked[:2]) and not isinstance(map, TensorMap)
        most = min(environment.num_cpus(), _MOST_PROCESSES, len(plan.spans)) if is_sent else 1
        jobs = max(1, min(most, plan.num_bytes // _BYTES_A_PROCESS))
        if jobs == 1 and options.device == "cpu" and plan.num_bytes > _BYTES_FOR_THREADS:
            session.num_threads = min(environment.num_cpus(), _MOST_THREADS)
    if cluster is None and jobs == 1:
        return InProcess(session.answer), lambda block: block
    request = ComparisonRequest.of(baseline, candidate, map, options)
    if cluster is None:
        assert jobs is not None
        return Processes(judge_block, jobs), lambda block: (request, block)
    bound = jobs if jobs and jobs > 1 else None
    tasks: Workers = plugin("cluster.ray_tasks").RayTasks(judge_block, cluster, bound)
    return tasks, lambda block: (request, block)


def _concluded(
    session: ComparisonSession,
    plan: ComparisonPlan,
    judging: Judging,
    verdicts: Verdicts,
    ledger: Ledger,
    precision: PrecisionTable | None,
    *,
    policy: Policy,
    show_only: Sequence[str],
) -> Comparison:
    left, right = session.sides
    pairs, chosen = verdicts.pairs, verdicts.judged
    apply_cross_pair_rules(pairs, chosen, judging)
    summarize_worst(pairs, judging, all_of_them=bool(show_only))
    lost = [_lost(plan.pairs[number], why) for number, why in sorted(verdicts.lost.items())]
    for i in not_judged(pairs, chosen, left, right):
        pairs[i] = dataclasses.replace(pairs[i], verdict="suspicious", reason=NOT_JUDGED)
    for i, other in beside_larger(pairs, chosen, left).items():
        pairs[i] = dataclasses.replace(pairs[i], reason=f"it is as small as the rounding of {other}")
    if any(pairs[i].reason == COARSE for i in pairs.flagged()):
        for i in [i for i in pairs.flagged() if pairs[i].reason == IF_COARSE]:
            pairs[i] = dataclasses.replace(pairs[i], verdict="suspicious", reason=f"{COARSE}, in other tensors")
    unsure = [i for i in pairs.flagged() if pairs[i].reason in (NOT_JUDGED, ROUNDED, TOO_SMALL)]
    lost += [Skipped(pairs[i].site, "both", str(pairs[i].reason), step=pairs[i].step) for i in unsure]
    verdict = worst(own for (own, _, _), count in pairs.tally.items() if count)
    coverage = plan.coverage(
        [*(plan.pairs[i].baseline for i in _missing(plan, verdicts)), *(chosen[i].baseline for i in unsure)]
    )
    num_bad = sum(count for (own, _, _), count in pairs.tally.items() if policy.fails(own))
    drift = () if precision is None else precision.table()
    # Of two precisions every tensor is another, so that only what is wrong is worth a name.
    divergence = None if session.is_drift and not num_bad else first_divergence(pairs, chosen, judging)
    not_recorded = [
        dataclasses.replace(item, side=name)
        for name, side in (("baseline", left), ("candidate", right))
        for item in side.skipped
    ]
    steps = [{entry.step for entry in side.entries} for side in (left, right)]
    if session.is_drift and session.dtypes is not None:
        rests_on = f"another precision: drift, {' against '.join(session.dtypes)}"
    elif left.is_printed:
        rests_on = _PRINTED
    else:
        rests_on = calibration(pairs, session.judge.floor, left, session.why_no_floor)
    worse = "" if policy.fail_on == "wrong" else " or worse"
    found = Findings(
        baseline=str(left.path),
        candidate=str(right.path),
        environment=environment_of(left),
        candidate_environment=environment_of(right),
        inside=verdict,
        inside_reason=f"{num_bad} of {len(pairs)} tensors {'is' if num_bad == 1 else 'are'} {policy.fail_on}{worse}",
        # A budget is for the results; where none was recorded, for the last row.
        over=over_budget([row for row in drift if row.kind == "result"] or drift[-1:], policy.min_snr),
        left=not_compared(pairs, lost, show_only if verdicts.stopped_at is None else ()),
        first_divergence=divergence,
        origins=() if divergence is None else (divergence,),
        counts=counts_of(
            pairs,
            unmatched_baseline=plan.unmatched["baseline"],
            unmatched_candidate=plan.unmatched["candidate"],
            not_recorded=len(not_recorded),
            missing_steps=len(steps[0] ^ steps[1]),
        ),
        pairs=pairs,
        skipped=(*not_recorded, *plan.skipped, *lost, *_not_asked(plan, verdicts)),
        coverage=coverage,
        calibration=rests_on,
        drift=drift,
        exemptions=ledger.exemptions(),
        num_elements=ledger.num_elements,
        same_weights=same_weights(left, right),
        notes=[apart] if (apart := sampling_apart(left, right)) else (),
    )
    return found.conclude(policy)


def _missing(plan: ComparisonPlan, verdicts: Verdicts) -> list[int]:
    """Return the numbers of the pairs that have no verdict."""
    if len(verdicts.pairs) == len(plan.pairs):
        return []
    known = set(verdicts.numbers)
    return [number for number in range(len(plan.pairs)) if number not in known]


def _lost(match: MatchedPair, why: str) -> Skipped:
    entry = match.baseline
    rank = f" (rank {entry.rank})" if entry.rank else ""
    return Skipped(entry.site, "both", f"each worker that judged it was {why}{rank}", step=entry.step)


def _not_asked(plan: ComparisonPlan, verdicts: Verdicts) -> list[Skipped]:
    if verdicts.stopped_at is None:
        return []
    entry = plan.pairs[verdicts.stopped_at].baseline
    count = len(plan.pairs) - verdicts.stopped_at
    return [Skipped("*", "both", f"--first: {count} tensors from {entry.site!r} on", step=entry.step)]


_NUM_SUMMARIZED = 3
"""Statistics need several passes (the median), so of many pairs only the worst get them."""


def summarize_worst(pairs: Packed, judging: Judging, *, all_of_them: bool) -> None:
    """Give all of `pairs`, or else the worst few, the statistics of both sides and of the errors."""
    count = len(pairs) if all_of_them else _NUM_SUMMARIZED
    chosen = heapq.nlargest(count, range(len(pairs)), key=lambda i: severity(pairs[i]))
    for i, pair in zip(chosen, judging.with_statistics([(i, pairs[i]) for i in chosen]), strict=True):
        pairs[i] = pair


def first_divergence(pairs: Packed, judged: Sequence[MatchedPair], judging: Judging) -> Divergence | None:
    """Return the first tensor of the worst verdict, in the order of the run."""
    flagged, (left, right) = pairs.flagged(), judging.sides
    if not flagged:
        return None
    verdict = "wrong" if any(pairs[i].verdict == "wrong" for i in flagged) else "suspicious"
    step = min(pairs[i].step for i in flagged if pairs[i].verdict == verdict)
    entries = left.entries
    own = entries.of_step(step) if isinstance(entries, Entries) else [one for one in entries if one.step == step]
    order = ExecutionOrder(own)
    there = [i for i in flagged if pairs[i].verdict == verdict and pairs[i].step == step]
    found = min(there, key=lambda i: order.key(judged[i].baseline))
    pair, entry = pairs[found], judged[found].baseline
    # Of the same tensor in other ranks.
    alike = [i for i in range(len(pairs)) if i != found and (pairs[i].step, pairs[i].site) == (pair.step, pair.site)]
    those = sorted([found, *alike])
    rank, hints = judging.explained(those, found)
    sources, candidate_sources = (side.metadata.get("sources") for side in (left, right))
    source = sources.get(entry.site) if isinstance(sources, dict) else None
    other = candidate_sources.get(pair.candidate_site) if isinstance(candidate_sources, dict) else None
    return Divergence(
        level=phase_of(entry.site) if left.metadata.get("gradients") else None,
        step=entry.step,
        site=entry.site,
        node=entry.node,
        candidate_site=pair.candidate_site,
        source=source if isinstance(source, str) else None,
        verdict=pair.verdict,
        noise_ratio=pair.noise_ratio,
        hints=hints,
        candidate_source=other if isinstance(other, str) else None,
        rank=rank,
    )


def not_compared(pairs: Packed, lost: Sequence[Skipped], asked: Sequence[str]) -> str | None:
    """Return in words what was to be judged and was not; None where all was."""
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return f"not judged: {lost[0].site}, step {lost[0].step}{more}: {lost[0].reason}"
    missed = [
        pattern
        for pattern in asked
        if not any(matches(pattern, name) for pair in pairs for name in (pair.site, pair.candidate_site))
    ]
    return f"asked for and not judged: {', '.join(missed)}" if missed else None


def calibration(pairs: Packed, floor: NoiseFloor | None, left: SourceWrapper, why_not: str | None) -> str:
    """Return in words what the verdicts rest on."""
    by: Counter[str] = Counter()
    for (verdict, judged_by, _), count in pairs.tally.items():
        by[judged_by] += count if verdict != "identical" else 0
    if by[BY_GIVEN_TOLERANCE]:
        return "by the given tolerances"
    if floor is None or (by[BY_TOLERANCE] and not by[BY_FLOOR]):
        return "uncalibrated" + (f": {why_not}" if why_not else "")
    return f"calibrated by the floor of {left.path}" + (
        f"; {by[BY_TOLERANCE]} uncalibrated" if by[BY_TOLERANCE] else ""
    )


def same_weights(left: SourceWrapper, right: SourceWrapper) -> bool | None:
    """Return whether both sides are of one model; None where that is not known."""
    sides = [tuple(side.metadata.get(key) for key in ("class", "dtype", "model_fingerprint")) for side in (left, right)]
    # A fingerprint covers names and values in their own dtype: it does not apply to another class or dtype.
    if None in sides[0] or None in sides[1] or sides[0][:2] != sides[1][:2]:
        return None
    return sides[0][2] == sides[1][2]


def environment_of(side: SourceWrapper) -> dict[str, Any]:
    """Return what is known of where a side was made."""
    known = side.metadata.get("environment")
    facts = {**(known if isinstance(known, dict) else {}), "complete": side.complete}
    return {**facts, **side.changes}


_SHOWN = 6
_LEAST = 3
"""Tokens by which a shifted row has to fit further, to be called shifted."""


def require_same_tokens(left: TensorSource, right: TensorSource) -> None:
    """Raise an `IncomparableError` where both sides know their token ids, and they differ."""
    x, y = left.metadata.get("token_ids"), right.metadata.get("token_ids")
    if x is None or y is None or x == y:
        return
    rows_x, rows_y = (side if isinstance(side, list) else [side] for side in (x, y))
    # In which order ranks have the rows of a batch, or which positions of them, their inputs tell, which are judged.
    num_ranks = [side.metadata.get("num_ranks", 1) for side in (left, right)]
    if max(num_ranks) > 1 and (_are_shares(rows_x, rows_y) or all(map(_has_inputs, (left, right)))):
        return
    where = next((i for i, (a, b) in enumerate(zip(rows_x, rows_y, strict=False)) if a != b), None)
    got, hint = f"{len(rows_x)} and {len(rows_y)} rows", None
    if where is not None:
        prompts = [_at(side.metadata.get("prompt_lengths"), where) for side in (left, right)]
        bos = (left.metadata.get("sampling") or {}).get("bos_token_id")
        how, is_generated = _difference(rows_x[where], rows_y[where], prompts, bos)
        got = f"the first difference is in row {where}: {how}{_of_texts(left, right)}"
        if is_generated and (apart := sampling_apart(left, right)):
            got += f"; {apart}"
        if not is_generated:
            hint = "compare the tokenizers: glass check-prompt BASELINE CANDIDATE"
    raise IncomparableError(
        "the two sides were run on different token ids",
        got=f"{left.path} and {right.path}: {got}",
        expected="the same token ids: what follows a different token is different for good reasons",
        hint=hint or f"record the candidate on the baseline's tokens: glass record TARGET --tokens-of {left.path}",
    )


def sampling_apart(left: TensorSource, right: TensorSource) -> str | None:
    """Return how the settings of generation differ, in words; None where they do not, or one side has none."""
    x, y = (side.metadata.get("sampling") for side in (left, right))
    if not isinstance(x, dict) or not isinstance(y, dict):
        return None
    names = [name for name in dict.fromkeys([*x, *y]) if x.get(name) != y.get(name)]
    differences = [
        f"{name} {x.get(name, 'not set')} in the baseline, {y.get(name, 'not set')} in the candidate" for name in names
    ]
    return f"the settings of generation differ: {'; '.join(differences)}" if differences else None


def _difference(x: Any, y: Any, prompts: Sequence[int | None], bos: Any) -> tuple[str, bool]:
    """Return how two rows differ, in words, and whether their prompts are the same."""
    if not isinstance(x, list) or not isinstance(y, list):
        return "other ids", False
    at = _agreeing(x, y)
    if y and _agreeing(x, y[1:]) >= min(at + _LEAST, len(x)):
        twice = y[1:2] == y[:1]
        return f"{'BOS twice' if twice else 'one id more at the front'}: the candidate begins with {y[:_SHOWN]}", False
    if x and _agreeing(x[1:], y) >= min(at + _LEAST, len(y)):
        what = "no BOS" if x[0] == bos else "one id fewer at the front"
        return f"{what}: the baseline begins with {x[:_SHOWN]}, the candidate with {y[:_SHOWN]}", False
    shown = f"{x[at : at + _SHOWN] or 'nothing'} in the baseline, {y[at : at + _SHOWN] or 'nothing'} in the candidate"
    if prompts[0] is not None and prompts[0] == prompts[1] and at >= prompts[0]:
        return f"the prompts are the same, generated token {at - prompts[0]} is another: {shown}", True
    return f"from position {at} on, {shown}", False


def _agreeing(x: Sequence[Any], y: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))


def _at(values: Any, where: int) -> int | None:
    return values[where] if isinstance(values, list) and where < len(values) else None


def _of_texts(left: TensorSource, right: TensorSource) -> str:
    x, y = left.metadata.get("prompt"), right.metadata.get("prompt")
    if not isinstance(x, str) or not isinstance(y, str):
        return ""
    if x == y:
        return "; the text of the prompt is the same: the tokenizers differ"
    at = _agreeing(x, y)
    return f"; the texts of the prompts differ: {x[at : at + 40]!r}, in the candidate {y[at : at + 40]!r}"


def _has_inputs(side: TensorSource) -> bool:
    return any(entry.site.startswith(f"{ROOT}:in") and entry.dtype == "int64" for entry in side.entries)


def _are_shares(x: Sequence[Any], y: Sequence[Any]) -> bool:
    """Whether both sides have the same rows in any order, or the same tokens where rows are cut."""
    if all(isinstance(row, list) for row in (*x, *y)):
        if {len(row) for row in x} == {len(row) for row in y}:
            return set(map(tuple, x)) == set(map(tuple, y))
        return {token for row in x for token in row} == {token for row in y for token in row}
    return False


def require_names(patterns: Sequence[str], *sides: TensorSource) -> None:
    """Raise an `UnknownNameError` where a pattern names no tensor of any of `sides`."""
    names = list(dict.fromkeys(entry.site for side in sides for entry in side.entries))
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise UnknownNameError("tensor", pattern, names)


def check_arguments(rtol: float | None, atol: float | None, fail_on: str, min_coverage: float, device: str) -> None:
    """Raise a `UsageError` that names the flag where an argument of `compare` makes no sense."""
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise UsageError(f"invalid --{name}", got=str(value), expected="a number from 0 on")
    if not 0 <= min_coverage <= 1:
        raise UsageError("invalid --min-coverage", got=str(min_coverage), expected="a share from 0 to 1")
    if fail_on not in VERDICTS[1:]:
        raise UsageError("invalid --fail-on", got=fail_on, expected=VERDICTS[1:])
    if device == "cpu":
        return
    import torch

    try:
        torch.zeros(1, dtype=torch.float64, device=device) + 1
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = first_line(error)
        raise UsageError(
            "the device cannot be used",
            got=f"{device}: {reason}",
            expected="a device with float64",
            hint="--device cpu",
        ) from error


def nothing_to_compare(
    left: TensorSource, right: TensorSource, impossible: Sequence[Skipped] = ()
) -> IncomparableError:
    """Return the error to raise where no pair is left to judge.

    Args:
        left: The baseline.
        right: The candidate.
        impossible: Tensors that both sides have, and that the parts of the ranks do not make up.
    """
    if impossible:
        first, *others = impossible
        return IncomparableError(
            "there is nothing to compare: the tensors of the ranks do not make up those of the other side",
            got=f"step {first.step}, {first.site}: {first.reason}" + (f"; so {len(others)} more" if others else ""),
            expected="ranks that share rows and positions out, or have all of them",
            hint="pad the rows of all ranks to one length, or compare a rank alone: RUN/rank0 with its own baseline",
        )

    def describe(side: TensorSource) -> str:
        steps = sorted({entry.step for entry in side.entries})
        some = ", ".join(entry.site for entry in side.entries[:3])
        without = f", {len(side.skipped)} without values ({side.skipped[0].reason})" if side.skipped else ""
        return f"{side.path}: {len(side.entries)} tensors, steps {steps[:5]}, {some or 'none'}{without}"

    empty = [side for side in (left, right) if not side.entries]
    without_values = any(item.reason == NO_VALUES for side in empty for item in side.skipped)
    return IncomparableError(
        "there is nothing to compare: no tensor of the baseline has a partner in the candidate",
        got=f"baseline: {describe(left)}; candidate: {describe(right)}",
        expected="the same name, step and rank on both sides",
        hint="record values, without --no-values" if without_values else "say which names belong together: --map FILE",
    )
