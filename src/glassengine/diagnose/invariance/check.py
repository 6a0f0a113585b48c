"""`glass check MODEL --invariant WHAT`: a model beside itself under changes that must not matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from glassengine.diagnose.check_model import check
from glassengine.diagnose.invariance.causes import cause_of
from glassengine.diagnose.invariance.recorded import check_invariant_served
from glassengine.diagnose.invariance.subjects import EngineSubject, InvarianceSubject, Results, subject_of
from glassengine.diagnose.invariance.trace import CallDifference, Search, TracedOp
from glassengine.diagnose.invariance.ways import (
    ALL,
    InvarianceWay,
    described,
    largest_difference,
    same_bits,
    variants_of,
)
from glassengine.engine.run.load import load
from glassengine.errors import UnknownNameError, UsageError, first_line
from glassengine.judge.sides.protocol import Place
from glassengine.numerics.judgement import Judgement, unit_roundoff
from glassengine.numerics.verdict import Reference
from glassengine.program import load_inputs, load_model
from glassengine.program.user_code.calls import forward_errors
from glassengine.results import VERDICTS, Comparison
from glassengine.results.answer import LEAST_DB
from glassengine.results.without_tensors import (
    CHANGE_VERDICTS,
    ChangeVerdict,
    FirstOperation,
    Invariance,
    Variation,
    What,
    concluded,
)
from glassengine.serving.protocol import ServingOptions, is_served
from glassengine.stores.places import place

_FEW_ROUNDINGS = 64.0
"""Of the largest number: how far two kernels of one op may be apart where no run says it."""

NUM_RUNS = 2


def check_invariant(
    model: str | Path | nn.Module,
    *,
    invariant: Sequence[str] | str = ALL,
    inputs: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    adapter: str | Path | None = None,
    trust_engine: bool = False,
    library: str | Path | None = None,
    python: str | Path | None = None,
) -> Invariance:
    """Compare a model with itself under changes that must not matter, bit for bit and then by its noise floor.

    Args:
        model: As for `check`, an engine directory, or a serving engine (`gguf:FILE`): all that it shows is compared.
        invariant: "run", "batch", "padding", "length", "cache", "threads", "order", "compile", "attention", "world";
            "all" is every one that the model has but "world", which exports it.
        inputs: Keyword arguments, as for `check`; None makes them up.
        dtype: As for `check`.
        attn_implementation: As for `check`.
        trust_remote_code: As for `check`.
        revision: As for `check`.
        adapter: As for `check`.
        trust_engine: As for `check`.
        library: As for `check`, of a serving engine.
        python: As for `check`, of a serving engine.

    Raises:
        UsageError: The model cannot be run, or cannot be changed in this way.
        UnknownNameError: There is no such change.
    """
    steps = load_inputs(str(inputs)) if isinstance(inputs, str | Path) else inputs
    given = [steps] if isinstance(steps, Mapping) else steps
    if isinstance(model, str) and is_served(model):
        options = ServingOptions(library=library, python=python, dtype=dtype)
        names = [invariant] if isinstance(invariant, str) else invariant
        return check_invariant_served(model, names, given[0] if given else None, options)
    if isinstance(model, str | Path) and (place(model) / "engine.json").is_file():
        return judged(EngineSubject(load(model, trust=trust_engine), given[0] if given else None), invariant)
    loaded = load_model(
        model,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        revision=revision,
        adapter=adapter,
    )
    with forward_errors(loaded.module, f"{loaded.spec} cannot run on these inputs: its forward raised in"):
        ranks = partial(check, model, tensor_parallel=2, backend="eager", steps=1, inputs=inputs, dtype=dtype)
        return judged(subject_of(loaded, given), invariant, ranks)


def judged(
    subject: InvarianceSubject, invariant: Sequence[str] | str, ranks: Callable[[], Comparison] | None = None
) -> Invariance:
    """Judge what is run under each change; `ranks` compares the model with its parts on two ranks."""
    names = wanted(subject, [invariant] if isinstance(invariant, str) else invariant)
    # Whether it is the same twice decides what other differences mean.
    run = _changed(subject, "run", None)
    changes = [
        run if what == "run" else _of_ranks(ranks()) if what == "world" and ranks else _changed(subject, what, run)
        for what in names
    ]
    return concluded(subject.name, changes, described())


def _of_ranks(found: Comparison) -> Variation:
    """Return the change that the level of the ranks shows."""
    result = next(one for one in found.results if one.level == Place.RANKS)
    verdict = CHANGE_VERDICTS[(0, 1, 1, 3)[VERDICTS.index(result.verdict)]] if result.is_decided else "undecided"
    first, is_same = found.first_divergence, verdict == CHANGE_VERDICTS[0]
    return Variation(
        "world",
        verdict,
        1,
        0 if is_same else 1,
        None if is_same else "1 rank, and 2 that share each layer",
        result.num_tokens,
        result.num_tokens - result.same_tokens,
        result.max_abs_diff,
        result.largest,
        result.noise_ratio,
        result.reason,
        first=None if first is None else FirstOperation(first.site, "", first.source, first.step, True, None),
        cause=None if is_same or first is not None else "a reduction that is split by ranks",
    )


def wanted(subject: InvarianceSubject, names: Sequence[str]) -> list[What]:
    """Return the changes that were asked for.

    Raises:
        UsageError: What is run has no such change.
        UnknownNameError: There is no such change.
    """
    known: tuple[What, ...] = get_args(What)
    found: list[What] = []
    for name in names:
        if name == ALL:
            found += [what for what in known if what not in subject.refusals and what != "world"]
        elif name not in known:
            raise UnknownNameError("change", name, [*known, ALL])
        elif name in subject.refusals:
            raise UsageError(
                f"--invariant {name} cannot be tried here", got=subject.name, expected=subject.refusals[name]
            )
        else:
            found.append(name)
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class _Compared:
    """How the results of a variant differ."""

    variant: InvarianceWay
    verdict: ChangeVerdict = "bitwise"
    num_tokens: int = 0
    num_changed: int = 0
    size: float | None = None
    largest: float | None = None
    ratio: float | None = None
    reason: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def rank(self) -> tuple[int, float]:
        """How bad it is."""
        return CHANGE_VERDICTS.index(self.verdict), self.ratio or 0.0


def _changed(subject: InvarianceSubject, what: What, run: Variation | None) -> Variation:
    variants = variants_of(
        what,
        length=subject.length,
        decodes=subject.decodes,
        one_token=subject.one_token,
        prime=subject.prime,
        least=subject.least_rows,
    )
    found: list[_Compared] = []
    notes: list[str] = []
    failed: Counter[str] = Counter()
    for variant in variants:
        why = subject.refusal(variant.first) or subject.refusal(variant.second)
        if why is not None:
            notes.append(why)
            continue
        try:
            pair = subject.run(variant.first), subject.run(variant.second)
        except Exception as error:  # the model's own code may raise anything
            failed[first_line(error)] += 1
            continue
        if (compared := _compared(subject, variant, pair)) is not None:
            found.append(compared)
    notes += [f"{number} variants could not be run: {reason}" for reason, number in failed.items()]
    different = [one for one in found if one.verdict != "bitwise"]
    if not different:
        verdict: ChangeVerdict = "bitwise" if found else "undecided"
        reason = None if found else "nothing could be compared"
        return Variation(what, verdict, len(found), reason=reason, notes=tuple(dict.fromkeys(notes)))
    worst = max(different, key=lambda one: one.rank)
    is_mistake = worst.verdict == CHANGE_VERDICTS[-1]
    difference, more = located(subject, worst.variant, is_mistake=is_mistake)
    cause = cause_of(subject, what, worst.variant, difference, run, is_mistake=is_mistake)
    return Variation(
        what,
        worst.verdict,
        len(found),
        len(different),
        worst.variant.words,
        worst.num_tokens,
        worst.num_changed,
        worst.size,
        worst.largest,
        worst.ratio,
        worst.reason,
        first=_first(difference) or cause.first,
        cause=cause.text,
        switch=cause.switch,
        tried=cause.tried,
        notes=tuple(dict.fromkeys([*notes, *more, *worst.notes])),
    )


def _compared(subject: InvarianceSubject, variant: InvarianceWay, pair: tuple[Results, Results]) -> _Compared | None:
    """Judge the results of a variant; None where nothing belongs together."""
    parts = list(_parts(variant, *pair))
    if not parts:
        return None
    if all(same_bits(x, y) for _, x, y in parts):
        return _Compared(variant)
    noisy = _noise(subject, variant, pair[1])
    worst, relative = _Compared(variant), 0.0
    num_tokens = num_changed = 0
    for i, (name, x, y) in enumerate(parts):
        if name == "logits":
            num_tokens += x[..., 0].numel()
            num_changed += int((x.argmax(-1) != y.argmax(-1)).sum())
        is_float = x.is_floating_point()
        runs = [x.double() + one[i] for one in noisy] if is_float else []
        exact, dtype = (x.double(), x.dtype) if is_float else (x, torch.float32)
        reference = Reference(exact, x, runs, dtype=dtype, valid=None, relative_floor=relative)
        found = reference.judge(y)
        if is_float:
            relative = max(relative, reference.relative_floor)
        verdict, reason = _verdict(x, y, found)
        own = _Compared(variant, verdict, 0, 0, largest_difference(x, y), _largest(x), found.noise_ratio, reason)
        worst = max(worst, own, key=lambda one: one.rank)
    return replace(worst, num_tokens=num_tokens, num_changed=num_changed)


def _verdict(x: Tensor, y: Tensor, found: Judgement) -> tuple[ChangeVerdict, str | None]:
    """Return what the judgement by the noise floor says of a change, and why where size does not decide."""
    if same_bits(x, y):
        return "bitwise", None
    if found.verdict == "wrong":
        return "beyond rounding", found.reason
    if _signal(x, y) < LEAST_DB:
        return "undecided", "the model's own rounding changes the results as much as this"
    return "within rounding", found.reason


def _noise(subject: InvarianceSubject, variant: InvarianceWay, second: Results) -> list[list[Tensor]]:
    """Return what rounding alone does to each part, of several runs on the same random numbers."""
    runs = [subject.noise(variant.first, seed) for seed in range(NUM_RUNS)]
    return [[x for _, x, _ in _parts(variant, run, second)] for run in runs]


def _parts(variant: InvarianceWay, first: Results, second: Results) -> Any:
    """Yield (name, tensor of the first way, of the second) of what belongs together."""
    for (call, view), results in zip(variant.views, second, strict=True):
        for name, y in results.items():
            x = first[call].get(name)
            # A result of one shape for different numbers of rows, as a loss, has no rows to compare.
            has_rows = view.batch[0] == view.batch[1] or (x is not None and x.shape != y.shape)
            pair = view.aligned(x, y) if x is not None and has_rows else None
            if pair is not None:
                yield name, *pair


def _largest(tensor: Tensor) -> float | None:
    return float(tensor.double().abs().max()) if tensor.numel() and not tensor.is_complex() else None


def _signal(x: Tensor, y: Tensor) -> float:
    """Return the signal-to-noise ratio in dB; infinite where there is none to speak of."""
    if not x.is_floating_point():
        return float("inf")
    noise, power = (x.double() - y.double()).square().mean(), x.double().square().mean()
    return float("inf") if not noise > 0 or not power > 0 else float(10 * torch.log10(power / noise))


def located(
    subject: InvarianceSubject, variant: InvarianceWay, *, is_mistake: bool
) -> tuple[CallDifference | None, list[str]]:
    """Return where the two ways begin to differ, and what one would not expect of the search.

    Of a difference beyond rounding it is the first operation that rounding does not explain; of the same call again,
    the first that differs in a bit.
    """
    if variant.second.compiler is not None:
        return None, []
    for modules_only in (False, True):
        try:
            first, left = subject.traced(variant.first, modules_only=modules_only)
            second, right = subject.traced(variant.second, modules_only=modules_only)
        except Exception as error:  # what runs under a mode of torch may refuse that
            reason = f"operations could not be observed: {first_line(error)}"
            continue
        if all(same_bits(x, y) for _, x, y in _parts(variant, first, second)):
            reason = "the results are equal while operations are observed"
            continue
        found = None
        if is_mistake and variant.first.seeded:
            noisy = [_noisy_trace(subject, variant, left, seed, modules_only) for seed in range(NUM_RUNS)]
            found = Search(left, right, variant.views, noisy, is_rounding).first()
        found = found or Search(left, right, variant.views).first()
        if found is not None:
            return found, []
        reason = subject.unseen if not right else "no operation could be paired"
    return None, [reason]


def _noisy_trace(
    subject: InvarianceSubject, variant: InvarianceWay, left: Sequence[TracedOp], seed: int, modules_only: bool
) -> Sequence[TracedOp]:
    try:
        return subject.traced(replace(variant.first, seeded=True), modules_only=modules_only, noise=seed)[1]
    except Exception:  # what runs under a mode of torch may refuse that
        return left


def is_rounding(x: Tensor, y: Tensor, runs: Sequence[Tensor]) -> bool:
    """Whether rounding explains the difference of two tensors, by the noise of runs that round otherwise."""
    if x.shape != y.shape or not x.is_floating_point():
        return False
    own = [run.double() for run in runs if run.shape == x.shape]
    if not own:  # runs that round otherwise have another op there: an attention is written out
        apart = largest_difference(x, y)
        return apart is not None and apart <= _FEW_ROUNDINGS * unit_roundoff(x.dtype) * (
            _largest(x.nan_to_num(0.0, 0.0, 0.0)) or 0.0
        )
    return Reference(x.double(), x, own, dtype=x.dtype, valid=None).judge(y).verdict != "wrong"


def _first(difference: CallDifference | None) -> FirstOperation | None:
    if difference is None:
        return None
    op = difference.ops[1]
    is_equal = difference.kind == "operation"
    return FirstOperation(op.name, op.module, op.source, op.call, is_equal, difference.size, difference.detail)
