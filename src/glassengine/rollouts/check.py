"""Compares log-probabilities that an engine reported with those of the checkpoint, and names the causes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassengine import environment
from glassengine.errors import IncomparableError, UsageError
from glassengine.program import LoadedModel, load_model
from glassengine.results import Comparison, Findings, Policy, ResultComparison, Verdict
from glassengine.results.without_tensors import RolloutCause, RolloutComparison, RolloutToken
from glassengine.rollouts.formats import Rollout, Sample, read_rollout
from glassengine.rollouts.gap import Gap, GapExplanation, PrecisionGap, judge_rest, rounding_floor, search, shares
from glassengine.rollouts.settings import KIND_OF, RolloutSettings, changed, in_words, is_rounding
from glassengine.rollouts.trainer import DTYPES, Trainer

_MOST_TOKENS, _MOST_LOGITS = 512, 1 << 24
"""Of the search."""
_MOST_WORST, _MOST_POINTS = 8, 600
_HELPS = 0.95
_FOREIGN = 2.0
"""Nats that engine and trainer differ by, in the root of the mean square, where they have nothing in common."""
_APART = 8.0
"""Least gap of a response that differs, over rounding, where other responses do not differ."""
_LEAST_SHARE, _LEAST_REST, _MOST_REST = 0.01, 0.002, 0.5
_VERDICTS: dict[str, Verdict] = {"none": "identical", "rounding": "rounding", "unknown": "suspicious"}


def check_rollout(
    checkpoint: str | Path | nn.Module,
    rollout: str | Path,
    *,
    weights: Sequence[str | Path] = (),
    temperature: float | None = None,
    engine_dtype: str | None = None,
    dtype: str = "auto",
    fail_on: str = "wrong",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> Comparison:
    """Compare log-probabilities that an engine reported with those of the checkpoint.

    Args:
        checkpoint: The policy: directory or id of Hugging Face, `file.py:factory`, or a module.
        rollout: File with token ids and log-probabilities; see `docs/guide/my-rollout-is-not-my-policy.md`.
        weights: Checkpoints of other steps, that the engine may have had.
        temperature: That the trainer divides its logits by; None for what the file states, or 1.
        engine_dtype: Dtype of the engine, where it is known; None for any.
        dtype: Of the trainer: "auto" (that of the checkpoint), "float32", "bfloat16", "float16".
        fail_on: The mildest verdict that is not ok.
        attn_implementation: As in transformers.
        trust_remote_code: Run code that comes with the checkpoint.
        revision: Of a hub id.

    Raises:
        UsageError: There is no such file or checkpoint, or the file has no token ids.
        CorruptError: The file is damaged.
        IncomparableError: The rollout is not of this model.
    """
    if engine_dtype is not None and engine_dtype not in ("float32", "float16", "bfloat16"):
        raise UsageError("unknown dtype of an engine", got=engine_dtype, expected="float32, bfloat16 or float16")
    if temperature is not None and not (math.isfinite(temperature) and temperature > 0):
        raise UsageError("a temperature is above 0", got=f"{temperature}")
    read_rollout(rollout)  # refuses a file before the model is loaded
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision, "dtype": dtype}
    loaded = load_model(checkpoint, attn_implementation=attn_implementation, **options)

    def state_of(spec: str | Path) -> Callable[[], dict[str, Tensor]]:
        return lambda: load_model(spec, **options).module.state_dict()

    trainer = Trainer(loaded.module, {str(spec): state_of(spec) for spec in weights})
    given = read_rollout(rollout, pad=trainer.pad)
    result = compare(trainer, given, _tokenizer(loaded), temperature=temperature, engine_dtype=engine_dtype)
    return _concluded(loaded.spec, str(rollout), given, result, Policy(fail_on))


def compare(
    trainer: Trainer,
    given: Rollout,
    text_of: Callable[[int], str | None],
    *,
    temperature: float | None = None,
    engine_dtype: str | None = None,
) -> RolloutComparison:
    """Return the gap of a rollout with its causes.

    Raises:
        IncomparableError: As for `check_rollout`.
    """
    base = RolloutSettings(temperature=temperature or given.temperature or 1.0)
    gap = Gap(trainer, _searched(given.samples, trainer.vocab_size), base)
    if not gap.tokens.engine.nan_to_num(0.0).any():
        raise IncomparableError(
            "the engine reports 0 for all tokens, so that its log-probabilities say nothing",
            got="log-probabilities of a greedy choice, or values that were never filled in",
            hint='ask vLLM for "raw_logprobs"; other engines for those before sampling',
        )
    if not gap.values(base).isfinite().any():
        raise IncomparableError(
            "the checkpoint gives no token of the rollout a finite log-probability",
            got="logits that are NaN or infinite",
            hint="look at its weights, or run it in another dtype: --dtype float32",
        )
    floor = rounding_floor(gap, base)
    gap, where = _of_others(gap, base, floor)
    first = base
    if trainer.gates and any(one.routes is not None for one in gap.samples):
        forced = base.but(routes="file")
        first = forced if gap.loss(forced) < _HELPS * gap.loss(base) else base

    def is_tight(settings: RolloutSettings) -> bool:
        return judge_rest(gap, settings, engine_dtype).is_tight

    found = search(gap, base, first, floor, is_tight)
    rest = judge_rest(gap, found.settings, engine_dtype)
    causes, left = _causes(gap, found, base, rest)
    causes = tuple(replace(one, text=one.text + where) for one in causes)
    if rest.dtype is None and left > _MOST_REST:
        # What leaves most of a gap does not explain it, and may only look like it.
        causes, left = (), 1.0
    result = _result(trainer, given, base, causes, left, rest, gap, found, text_of, engine_dtype)
    return result if causes else replace(result, rest_is=result.rest_is + where)


def _searched(samples: Sequence[Sample], vocab_size: int) -> list[Sample]:
    """Return as many samples as the search can hold, at least one."""
    most = max(64, min(_MOST_TOKENS, _MOST_LOGITS // max(1, vocab_size)))
    found: list[Sample] = []
    number = 0
    for one in samples:
        if found and number + len(one.response) > most:
            break
        found.append(one)
        number += len(one.response)
    return found


def _of_others(gap: Gap, base: RolloutSettings, floor: float) -> tuple[Gap, str]:
    """Return the gap of the responses that differ by more than rounding, where others do not, and which in words.

    New weights may come between two responses. Where routers are free, a response with other experts is no evidence.
    """
    if gap.is_free:
        return gap, ""
    d = (gap.tokens.engine - gap.values(base)).abs()
    sizes = [len(one.response) for one in gap.samples]
    each = [float(part[part.isfinite()].mean()) for part in torch.split(d, sizes)]
    others = [one for one, size in zip(gap.samples, each, strict=True) if not size <= 2 * floor]
    least = min((size for size in each if not size <= 2 * floor), default=0.0)
    if len(others) in (0, len(each)) or not least > _APART * floor:
        return gap, ""
    where = f", in {len(others)} of {len(each)} responses: the others differ by rounding alone"
    return Gap(gap.trainer, others, base), where


def _causes(
    gap: Gap, found: GapExplanation, base: RolloutSettings, rest: PrecisionGap
) -> tuple[tuple[RolloutCause, ...], float]:
    each, left = shares(gap, found.settings, base)
    alike = tuple(
        " and ".join(in_words(name, value) for name, value in changed(one, base).items()) for one in found.alike[:3]
    )
    after = f", and {in_words('order', found.settings.order)}" if found.settings.order != base.order else ""
    causes = [
        RolloutCause(
            KIND_OF.get(name, "semantics"),
            name,
            str(value),
            in_words(name, value) + (after if name == "temperature" else ""),
            each[name],
            is_rounding(name, value) or (name == "routes" and _flips_by_rounding(gap, found.settings, rest)),
            alike,
        )
        for name, value in changed(found.settings, base).items()
        if abs(each.get(name, 0.0)) >= _LEAST_SHARE
    ]
    return tuple(sorted(causes, key=lambda one: -one.share)), left


def _flips_by_rounding(gap: Gap, settings: RolloutSettings, rest: PrecisionGap) -> bool:
    """Whether the file's experts differ from the trainer's no more often than rounding in the engine's dtype makes."""
    if rest.dtype is None:
        return False
    plain = settings.but(routes="own")
    own = gap.trainer.own_routes(gap.samples, plain)
    # What rounding in the trainer's own dtype flips shows beside a run that rounds less.
    dtype = "float32" if rest.dtype == gap.trainer.dtype else rest.dtype
    how = {"dtype": dtype} if dtype in DTYPES else {"cache": dtype.split()[0]}
    rounded = gap.trainer.own_routes(gap.samples, plain.but(**how))
    flips = [0, 0, 0]
    for one, ours, coarse in zip(gap.samples, own, rounded, strict=True):
        theirs = gap.trainer.routes(one)
        if theirs is not None:
            is_other = (theirs.sort(-1).values != ours.sort(-1).values).any(-1)
            flips[0] += int((is_other & (theirs >= 0).all(-1)).sum())
            flips[1] += int((coarse.sort(-1).values != ours.sort(-1).values).any(-1).sum())
            flips[2] += ours[..., 0].numel()
    return flips[0] <= 2 * flips[1] + 0.002 * flips[2]


def _result(
    trainer: Trainer,
    given: Rollout,
    base: RolloutSettings,
    causes: tuple[RolloutCause, ...],
    left: float,
    rest: PrecisionGap,
    gap: Gap,
    found: GapExplanation,
    text_of: Callable[[int], str | None],
    engine_dtype: str | None,
) -> RolloutComparison:
    tokens, engine, ours = _all(trainer, given, base)
    d = engine - ours
    ratio = (-d).clamp(-20, 20)
    k3 = ratio.exp() - 1 - ratio
    centered = ours - ours.mean()
    length = float(centered.square().sum())
    mistakes = [one for one in causes if not one.is_rounding]
    told = _in_words(rest, gap, found.settings) if not causes or left > _LEAST_REST else "too small to matter"
    if impossible := given.num_tokens - len(d):
        told = f"a checkpoint that gives {impossible} of {given.num_tokens} tokens no finite log-probability"
        kind = "unexplained"
    elif not d.any():
        kind = "none"
    elif mistakes:
        kind = "mistake"
    elif causes and left <= _LEAST_REST:
        kind = "rounding"
    elif rest.is_between and engine_dtype is None:
        kind = "unknown"
    elif rest.dtype is None:
        kind = "unexplained"
    else:
        kind = "unknown" if rest.is_wide else "rounding"
    order = (-d.abs()).argsort(stable=True)[:_MOST_WORST].tolist()
    by_trainer = ours.argsort(stable=True)
    by_trainer = by_trainer[:: max(1, math.ceil(len(by_trainer) / _MOST_POINTS))]
    worst = tuple(
        RolloutToken(sample, place, token, text_of(token), float(engine[at]), float(ours[at]))
        for at in order
        for sample, place, token in [tokens[at]]
    )
    return RolloutComparison(
        given.format,
        len(given.samples),
        len(d),
        int(gap.tokens.engine.isfinite().sum()),
        trainer.num_runs,
        trainer.dtype,
        float(d.mean()),
        float(d.square().mean().sqrt()),
        float(d.abs().max()),
        float(k3.mean()),
        float(d.abs().clamp(max=20).mean().exp()),
        float(((ratio < math.log(0.9)) | (ratio > math.log(1.1))).double().mean()),
        float((d > 0).double().mean()),
        float((centered * engine).sum()) / length if length else None,
        impossible,
        causes,
        left,
        told,
        dict(rest.ratios),
        kind,  # type: ignore[arg-type]
        worst,
        tuple((float(ours[at]), float(engine[at])) for at in by_trainer.tolist()),
        tuple(given.versions),
    )


def _all(trainer: Trainer, given: Rollout, base: RolloutSettings) -> tuple[list[tuple[int, int, int]], Tensor, Tensor]:
    """Return (sample, place, token), engine and trainer of all tokens with finite values, a few samples at a time."""
    names: list[tuple[int, int, int]] = []
    engine: list[Tensor] = []
    trainers: list[Tensor] = []
    for at in range(0, len(given.samples), base.batch):
        part = given.samples[at : at + base.batch]
        gap = Gap(trainer, part, base)
        values = gap.values(base)
        known = gap.tokens.engine.isfinite() & values.isfinite()
        places = [(at + n, place, token) for n, one in enumerate(part) for place, token in enumerate(one.response)]
        names += [place for place, is_known in zip(places, known.tolist(), strict=True) if is_known]
        engine.append(gap.tokens.engine[known])
        trainers.append(values[known])
    return names, torch.cat(engine), torch.cat(trainers)


def _in_words(rest: PrecisionGap, gap: Gap, settings: RolloutSettings) -> str:
    """Return what the rest of the gap is."""
    if rest.dtype is not None:
        own = "" if rest.dtype == gap.trainer.dtype else f", in an engine beside a trainer in {gap.trainer.dtype}"
        if rest.is_wide:
            return (
                f"as large as rounding in {rest.dtype}{own}, which sends tokens to other experts; a mistake may hide"
                " in it, unless the file has the routes"
            )
        return f"rounding in {rest.dtype}{own}"
    named = sorted(rest.ratios.items(), key=lambda one: -one[1])
    sizes = [f"{ratio:.3g} times that of {name}" for name, ratio in named]
    if rest.is_between:
        above = sum(ratio > 1 for _, ratio in named)
        size = " and ".join(sizes[max(above - 1, 0) : above + 1])
        return (
            f"between rounding in two dtypes (its size is {size}): a part of the engine in fewer digits would make it"
        )
    size = sizes[-1]
    why = "it leans to one side, as rounding does not" if rest.leans else f"its size is {size}"
    return f"not rounding ({why}), and no change that was tried explains it{_shape(gap, settings)}"


def _shape(gap: Gap, settings: RolloutSettings) -> str:
    """Return a hint by the form of the gap, or ""."""
    values = gap.values(settings)
    d = gap.tokens.engine - values
    known = d.isfinite()
    places = torch.cat([torch.arange(len(one.response)) for one in gap.samples])
    early, late = (d[known & part].abs() for part in (places < places.max() / 4, places > places.max() / 2))
    d = d[known]
    if not len(d):
        return ""
    if len(early) and len(late) and float(early.median()) > 3 * float(late.median()):
        return "; it fades along the response, as where the engine read another prompt or template"
    if float(d.square().mean().sqrt()) > _FOREIGN:
        return "; so large a gap another checkpoint or tokenizer would make"
    if float((d > 0).double().mean()) > 0.98:
        return "; the engine calls all tokens likelier, as where tokens are left out of the sum"
    if float(d.abs().max()) > 100 * float(d.abs().median()):
        return "; few tokens have most of it, as where experts are routed otherwise, or tokens stand at another place"
    return ""


def _tokenizer(loaded: LoadedModel) -> Callable[[int], str | None]:
    found: Any = None
    if loaded.directory is not None:
        from transformers import AutoTokenizer

        with contextlib.suppress(Exception):  # it is there for words alone
            found = AutoTokenizer.from_pretrained(loaded.directory)
    return lambda token: None if found is None else str(found.decode([token]))


def _concluded(name: str, file: str, given: Rollout, result: RolloutComparison, policy: Policy) -> Comparison:
    """Return the comparison that follows."""
    verdict = _VERDICTS.get(result.found, "wrong")
    told = result.in_words()
    row = ResultComparison(
        "log-probabilities",
        "log-probabilities",
        "rollout",
        "name",
        "rounding" if result.found == "unknown" else verdict,
        None,
        "rollout",
        0,
        1,
        (result.num_tokens,),
        result.dtype,
        "float64",
        result.largest,
        max((abs(one) for pair in result.curve for one in pair), default=0.0),
        noise_ratio=min(result.rounding.values(), default=None),
        is_decided=result.found != "unknown",
    )
    findings = Findings(
        name,
        file,
        environment.describe(),
        inside=row.verdict,
        inside_reason=told if verdict == "wrong" else None,
        differences=[told] if verdict == "wrong" else (),
        left=told if result.found == "unknown" else None,
        results=[row],
        notes=given.notes,
        rollout=result,
    )
    return findings.conclude(policy)
