"""`--suggest-precision`: the fewest modules to keep in float32, or unquantized, so that the results keep `--min-snr`.

    losses      the model runs once per module with that one coarse and all others exact: what it alone costs
    the set     the least number of the costliest ones that holds; then each is dropped again, and two are
                exchanged for one, where the budget still holds
    confirmed   one more run with the set; its results are the answer

Every candidate is judged by a run: what modules lose together is not the sum of what each loses alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from glassengine import environment
from glassengine.diagnose.ladder.request import CheckRequest
from glassengine.errors import UsageError
from glassengine.judge.cases import read_inputs
from glassengine.judge.sides.module import threads_for
from glassengine.plugins.quantized.check import check_quantized
from glassengine.plugins.quantized.effects import checkpoint_drift, difference, forwards_of, outcome_of
from glassengine.plugins.quantized.result import as_cost, result_of
from glassengine.program import load_model
from glassengine.program.loading.quantized import is_quantized, quantization_steps
from glassengine.progress import Progress, Work
from glassengine.results import Comparison, DriftRow, Findings, LevelResult

_COARSE = ("bfloat16", "float16")
_MOST_EXCHANGES = 500
_SKIP_LISTS = {
    "bitsandbytes": "BitsAndBytesConfig(llm_int8_skip_modules=...)",
    "awq": "AwqConfig(modules_to_not_convert=...)",
    "fp8": "FineGrainedFP8Config(modules_to_not_convert=...)",
    "torchao": "TorchAoConfig(modules_to_not_convert=...)",
    "compressed-tensors": "ignore=... of the recipe",
    "gptq": 'dynamic={"-:NAME": {}, ...} of GPTQModel',
}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Holds = Callable[[frozenset[str]], float]


def suggest(request: CheckRequest, min_snr: float) -> Comparison:
    """Find the modules to keep, and judge the model with them.

    Args:
        request: Of a model and a coarser dtype, or of a model and its quantized checkpoint.
        min_snr: Least signal-to-noise ratio of the results, in dB.

    Raises:
        UsageError: The candidate is another one, or the dtype is not coarser than float32.
    """
    if request.candidate is None:
        return _of_dtype(request, min_snr)
    if isinstance(request.candidate, nn.Module) or not is_quantized(request.candidate):
        raise UsageError(
            "--suggest-precision is for a model in a coarser dtype, or for its quantized checkpoint",
            got=f"the candidate {request.candidate}",
            hint="glass check MODEL --dtype bfloat16 --min-snr 40dB --suggest-precision",
        )
    return _of_checkpoint(request, min_snr)


@torch.no_grad()
def _of_dtype(request: CheckRequest, min_snr: float) -> Comparison:
    if request.dtype not in _COARSE:
        raise UsageError("--suggest-precision needs a coarser --dtype", got=request.dtype, expected=", ".join(_COARSE))
    request.progress(Work.LOADING.says("loading the baseline"))
    baseline = load_model(request.baseline, dtype="float32", adapter=request.adapter, **request.loading)
    mixed = MixedDtypes(baseline.module, getattr(torch, request.dtype))
    with threads_for(baseline.module):
        forwards = forwards_of(baseline, read_inputs(request.inputs), request.steps)
        expected = outcome_of(baseline.module, forwards)

        def measured(kept: Iterable[str]) -> dict[str, Any]:
            return difference(expected, outcome_of(mixed.keeping(kept), forwards))

        found = smallest(mixed.units, lambda kept: float(measured(kept)["snr_db"]), min_snr, request.progress)
        request.progress(Work.RUNNING.says("running with what is kept"))
        total = measured(found.kept)
        ends = result_of(expected, outcome_of(mixed.module, forwards), total, len(forwards))
        ends = replace(ends, candidate_dtype=request.dtype)
        drift = checkpoint_drift(baseline.module, mixed.module, forwards)
    last = DriftRow(ends.name, ends.name, "result", len(forwards), total["snr_db"], total["cosine"])
    name = f"{request.dtype}, {len(found.kept)} of {len(mixed.units)} modules in float32"
    answer = Findings(
        baseline=f"{baseline.spec} in float32",
        candidate=name,
        environment=environment.describe(),
        inside=ends.verdict if ends.reason is not None else "rounding",
        inside_reason=ends.reason,
        levels=[LevelResult("weights", baseline.spec, name, "rounding", "the same model", 1, 1.0, None)],
        costs=[as_cost(ends)] if ends.reason is None else [],
        results=[] if ends.reason is None else [ends],
        drift=[*drift, last],
        notes=found.notes(
            "in float32", "its own operations run in float32: it casts what it is given, and what it gives"
        ),
    )
    return answer.conclude(replace(request.policy, min_snr=min_snr))


@torch.no_grad()
def _of_checkpoint(request: CheckRequest, min_snr: float) -> Comparison:
    dtype = "float32" if request.dtype == "auto" else request.dtype
    request.progress(Work.LOADING.says("loading the baseline"))
    ours = load_model(request.baseline, dtype=dtype, adapter=request.adapter, **request.loading)
    request.progress(Work.DEQUANTIZING.says("dequantizing the candidate"))
    theirs = load_model(str(request.candidate), dtype=dtype, **request.loading)
    steps = quantization_steps(str(request.candidate), **request.loading)
    exact, own = dict(ours.module.named_parameters()), dict(theirs.module.named_parameters())
    units = [name for name in own if name in steps and name in exact and exact[name].shape == own[name].shape]
    coarse = {name: own[name].data for name in units}
    method = str((theirs.metadata.get("quantization") or {}).get("method"))

    def keep(kept: Iterable[str]) -> nn.Module:
        for name in units:
            own[name].data = exact[name].data if name in kept else coarse[name]
        return theirs.module

    with threads_for(ours.module):
        given = read_inputs(request.inputs)
        forwards = forwards_of(ours, given, request.steps)
        expected = outcome_of(ours.module, forwards)

        def snr(kept: frozenset[str]) -> float:
            return float(difference(expected, outcome_of(keep(kept), forwards))["snr_db"])

        found = smallest(units, snr, min_snr, request.progress)
        keep(found.kept)
        left = {name: step for name, step in steps.items() if name not in found.kept}
        policy = replace(request.policy, min_coverage=0.0, min_snr=min_snr)
        if not set(units) - found.kept:
            left = steps  # nothing stays quantized: every weight is at distance 0 from its own grid
        answer = check_quantized(
            ours, theirs, left, given=given, steps=request.steps, policy=policy, progress=request.progress
        )
    named = PrecisionSet(frozenset(name.removesuffix(".weight") for name in found.kept), found)
    answer.notes = [*answer.notes, *named.notes("unquantized", f"{method}: {_SKIP_LISTS.get(method, 'its skip list')}")]
    return answer.conclude(policy)


class MixedDtypes:
    """A copy of a module of which each part computes in a dtype of its own.

    A part is what a module does itself, its children left out: it casts what it is given and what its children return.

    Args:
        module: In float32.
        dtype: Of what is not kept.

    Attributes:
        module: The copy.
        units: Names of the parts, in the order of the model; "" is the model itself.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module = copy.deepcopy(module)
        self._low, self._running = dtype, []  # type: tuple[torch.dtype, list[torch.dtype]]
        self._dtypes: dict[str, torch.dtype] = {}
        self._parts: dict[str, tuple[nn.Module, list[tuple[dict[str, Any], str, Tensor]]]] = {}
        for name, one in self.module.named_modules():
            if type(one).forward is nn.Module.forward:  # a list of modules, which nothing calls
                continue
            tables: list[dict[str, Any]] = [one._parameters, one._buffers]
            held = [(table, key, value) for table in tables for key, value in table.items() if _is_float(value)]
            self._parts[name] = (one, held)
            one.register_forward_pre_hook(self._enter(name), with_kwargs=True, prepend=True)
            one.register_forward_hook(self._leave(name))
        self.units = list(self._parts)
        self._casts = {
            (id(value), low): value if not low else value.to(dtype)
            for _, held in self._parts.values()
            for _, _, value in held
            for low in (False, True)
        }

    def keeping(self, kept: Iterable[str]) -> nn.Module:
        """Return the module with some parts in float32; what two of them share is held by each."""
        names = frozenset(kept)
        for name, (_, held) in self._parts.items():
            low = name not in names
            self._dtypes[name] = self._low if low else torch.float32
            for table, key, value in held:
                cast = self._casts[id(value), low]
                table[key] = nn.Parameter(cast, requires_grad=False) if isinstance(value, nn.Parameter) else cast
        return self.module

    def _enter(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            if not name:
                self._running.clear()
            dtype = self._dtypes[name]
            self._running.append(dtype)
            return _cast(args, dtype), {key: _cast(value, dtype, key) for key, value in kwargs.items()}

        return hook

    def _leave(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            self._running.pop()
            return _cast(output, self._running[-1]) if self._running else output

        return hook


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _FLOATS


def _cast(value: Any, dtype: torch.dtype, name: str = "") -> Any:
    """Return what holds tensors with them in one dtype; caches and other objects stay as they are."""
    if _is_float(value):
        if "mask" in name and value.dtype != dtype:
            return value.clamp(min=torch.finfo(dtype).min).to(dtype)  # a masked place is finite in each dtype
        return value.to(dtype)
    if type(value) in (tuple, list):
        return type(value)(_cast(one, dtype, name) for one in value)
    if isinstance(value, dict):  # also a result of transformers
        made = copy.copy(value)
        for key, one in value.items():
            made[key] = _cast(one, dtype, str(key))
        return made
    return value


class PrecisionSet:
    """What a search has found.

    Attributes:
        kept: The set.
        snr: With it, in dB.
        without: With nothing kept.
        at_most: With all kept.
        runs: Number of runs.
        budget: What was asked for.
        num_units: What could be kept.
    """

    snr = without = at_most = budget = 0.0
    runs = num_units = 0

    def __init__(self, kept: frozenset[str], search: PrecisionSet | None = None) -> None:
        vars(self).update(vars(search) if search is not None else {})
        self.kept = kept

    def notes(self, how: str, means: str) -> list[str]:
        """Return the notes: the set, and what it means."""
        names = ", ".join(sorted(name or "(the model itself)" for name in self.kept))
        figures = f"{self.snr:.1f} dB with them, {self.without:.1f} dB without, found in {self.runs} runs"
        if self.at_most < self.budget:
            return [f"no set holds {self.budget:g} dB: with everything {how} it is {self.at_most:.1f} dB"]
        if not self.kept:
            return [f"nothing has to stay {how}: {self.without:.1f} dB"]
        return [f"keep {len(self.kept)} of {self.num_units} {how}: {names}", f"{figures}; {means}"]


def smallest(units: Sequence[str], snr: Holds, budget: float, progress: Progress) -> PrecisionSet:
    """Return the fewest units to keep so that a signal-to-noise ratio is reached; all where none is enough.

    Args:
        units: What can be kept.
        snr: Returns the ratio with some of them kept, in dB, by a run.
        budget: Least ratio, in dB.
        progress: Called with an event for each unit that is measured alone.
    """
    known: dict[frozenset[str], float] = {}

    def ratio(kept: Iterable[str]) -> float:
        key = frozenset(kept)
        if key not in known:
            known[key] = snr(key)
        return known[key]

    def holds(kept: Iterable[str]) -> bool:
        return ratio(kept) >= budget

    def set_of(kept: Iterable[str]) -> PrecisionSet:
        made = PrecisionSet(frozenset(kept))
        made.snr, made.without, made.at_most = ratio(kept), ratio(()), ratio(units)
        made.runs, made.budget, made.num_units = len(known), budget, len(units)
        return made

    everything = frozenset(units)
    if holds(()) or not holds(everything):
        return set_of(() if holds(()) else everything)
    progress(Work.JUDGING.says(f"running with each of {len(units)} modules coarse alone"))
    alone = {unit: ratio(everything - {unit}) for unit in units}
    order = sorted(units, key=alone.__getitem__)
    low, high = 0, len(order)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(order[:middle]) else (middle + 1, high)
    kept = _dropped(order[:high], order, holds)
    left = _MOST_EXCHANGES
    while left > 0 and (better := _exchanged(kept, order, holds, left)) is not None:
        left -= len(order)
        kept = _dropped(better, order, holds)
    return set_of(kept)


def _dropped(kept: Iterable[str], order: Sequence[str], holds: Callable[[Iterable[str]], bool]) -> frozenset[str]:
    """Return the set without what is not needed, the least costly tried first."""
    names = frozenset(kept)
    for unit in reversed(order):
        if unit in names and holds(names - {unit}):
            names -= {unit}
    return names


def _exchanged(
    kept: frozenset[str], order: Sequence[str], holds: Callable[[Iterable[str]], bool], most: int
) -> frozenset[str] | None:
    """Return the set with two of it exchanged for one other; None where none holds in so many runs."""
    runs = 0
    for pair in combinations([unit for unit in reversed(order) if unit in kept], 2):
        for unit in order:
            if unit not in kept:
                runs += 1
                if runs > most:
                    return None
                if holds((kept - set(pair)) | {unit}):
                    return (kept - set(pair)) | {unit}
    return None
