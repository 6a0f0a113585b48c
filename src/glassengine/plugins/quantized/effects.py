"""Measures the effect of a quantized weight at the output of its module and at the logits, all else unquantized.

A module runs again on the inputs it had, so that an error made before it does not count. To compare with, it also runs
with a weight that is moved by up to half a step at random: what rounding to nearest would make.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from glassengine.errors import IncomparableError, UsageError
from glassengine.judge.cases import beside_tokens, causal_cases, in_one_forward
from glassengine.numerics.drift import DriftSums, shared
from glassengine.numerics.logits import compare_logits
from glassengine.numerics.weight_error import WeightError
from glassengine.program import LoadedModel, example_inputs
from glassengine.program.user_code.module_state import own_copies
from glassengine.progress import Progress, Work
from glassengine.results import DriftRow

_PATIENCE_S = 2.0


@dataclass
class Weight:
    """One quantized weight while it is looked at; `value` is in the baseline's scale."""

    name: str
    error: WeightError
    value: Tensor
    step: Tensor
    is_rescaled: bool = False
    error_power: float = 0.0
    rounding_power: float = 0.0
    output_power: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


def forwards_of(model: LoadedModel, inputs: Any, steps: int) -> list[dict[str, Any]]:
    """Return the keyword arguments of each forward; prompts are continued with what the baseline chooses."""
    if not model.generation.takes_tokens or beside_tokens(inputs):
        given = in_one_forward(inputs) if model.generation.takes_tokens else inputs
        if given is None:
            given = example_inputs(model.module, model.directory)
        if isinstance(given, str):
            raise UsageError("prompts are for a causal language model", got=given, hint="--inputs FILE with tensors")
        return [dict(each) for each in ([given] if isinstance(given, Mapping) else given)]
    cases = causal_cases(model, inputs, 0)
    # The padded batch repeats prompts that are there alone.
    cases = [case for case in cases if case.attention_mask is not None and case.attention_mask.all()] or cases
    forwards = []
    for case in cases:
        ids, mask = case.input_ids, case.attention_mask
        assert ids is not None and mask is not None
        for _ in range(steps):
            chosen = model.module(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, -1:].argmax(-1)
            ids, mask = torch.cat([ids, chosen], 1), torch.cat([mask, torch.ones_like(chosen)], 1)
        forwards.append({"input_ids": ids, "attention_mask": mask, "use_cache": False})
    return forwards


@dataclass(frozen=True)
class Outcome:
    """What a model gives: logits [N, V] of all real tokens, or the first result [N, ...] of a model without logits."""

    rows: Tensor
    are_logits: bool


def outcome_of(module: nn.Module, forwards: Sequence[Mapping[str, Any]]) -> Outcome:
    """Return what `module` gives in all `forwards` together, float32."""
    made = [_rows(module(**own_copies(forward)), forward) for forward in forwards]
    return Outcome(torch.cat([rows for rows, _ in made]), all(are_logits for _, are_logits in made))


def _rows(made: Any, forward: Mapping[str, Any]) -> tuple[Tensor, bool]:
    logits = getattr(made, "logits", None)
    if not isinstance(logits, Tensor):
        values = list(made.values()) if isinstance(made, Mapping) else made
        found = values if isinstance(values, Tensor) else next(v for v in values if isinstance(v, Tensor))
        return found.float().reshape(-1, found.shape[-1] if found.dim() else 1), False
    mask = forward.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == logits.shape[:-1]:
        return logits.float()[mask.bool()], True
    return logits.float().reshape(-1, logits.shape[-1]), True


@contextmanager
def watching(root: nn.Module, parameters: Mapping[str, nn.Parameter], weights: Sequence[Weight]) -> Iterator[None]:
    """Run each module with a quantized weight again with it, and with one rounded to nearest, on the same inputs."""
    generator = torch.Generator().manual_seed(0)
    modules = dict(root.named_modules())
    busy = False

    def hook_of(parameter: nn.Parameter, weight: Weight) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal busy
            if busy:
                return
            busy = True
            try:
                first = _first(output).double()
                noise = (torch.rand(parameter.shape, generator=generator) - 0.5) * weight.step.float().abs()
                for value, part in ((weight.value, "error_power"), (parameter.data + noise, "rounding_power")):
                    with _in_place(parameter, value):
                        power = float((_first(module(*args, **kwargs)).double() - first).square().sum())
                    setattr(weight, part, getattr(weight, part) + power)
                weight.output_power += float(first.square().sum())
            finally:
                busy = False

        return hook

    with ExitStack() as hooks:
        for weight in weights:
            module, hook = modules[weight.name.rpartition(".")[0]], hook_of(parameters[weight.name], weight)
            hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        yield


@contextmanager
def _in_place(parameter: nn.Parameter, value: Tensor) -> Iterator[None]:
    before = parameter.data
    parameter.data = value.to(before.dtype)
    try:
        yield
    finally:
        parameter.data = before


def _first(output: Any) -> Tensor:
    tensor: Tensor = output if isinstance(output, Tensor) else next(x for x in output if isinstance(x, Tensor))
    return tensor


def one_by_one(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    weights: Sequence[Weight],
    forwards: Sequence[Mapping[str, Any]],
    expected: Outcome,
    progress: Progress,
) -> str | None:
    """Fill in the figures of each weight: the results of the model with that one exchanged, beside `expected`.

    Returns:
        How far it came, where it was interrupted.
    """
    began = said = time.monotonic()
    for index, weight in enumerate(weights):
        now = time.monotonic()
        if now - said > _PATIENCE_S:
            said, left = now, (now - began) / index * (len(weights) - index)
            text = f"running with weight {index + 1} of {len(weights)} alone, about {left:.0f} s left"
            progress(Work.RUNNING.says(text, index + 1, len(weights)))
        try:
            with _in_place(parameters[weight.name], weight.value):
                weight.figures = difference(expected, outcome_of(module, forwards))
        except KeyboardInterrupt:
            for other in weights[index:]:
                other.figures = {"error": math.nan, "snr_db": math.nan, "kl": None}
            return f"{index} of {len(weights)} weights were run alone"
    return None


def difference(expected: Outcome, found: Outcome) -> dict[str, Any]:
    """Return error power, SNR, and where the results are logits divergence and agreement."""
    b, c = expected.rows, found.rows
    if b.shape != c.shape:
        raise IncomparableError(
            "the results of the two sides differ in shape", got=str(list(c.shape)), expected=str(list(b.shape))
        )
    error, power = float((c.double() - b.double()).square().sum()), float(b.double().square().sum())
    kl, agreement = (compare_logits(b, c) if expected.are_logits else None) or (None, None)
    return {
        "error": error,
        "snr_db": snr_db(power, error),
        "cosine": cosine(b, c),
        "kl": kl,
        "agreement": agreement,
    }


def cosine(b: Tensor, c: Tensor) -> float:
    """Return the cosine of two tensors of one shape; 1 where both are zero."""
    norms = float(b.double().norm()) * float(c.double().norm())
    return float((b.double() * c.double()).sum()) / norms if norms else float(not bool(c.any()) and not bool(b.any()))


def snr_db(power: float, error: float) -> float:
    """Return the signal-to-noise ratio of two sums of squares; -inf if the error is not a number."""
    if error == 0:
        return math.inf
    return 10 * math.log10(power / error) if power > 0 and math.isfinite(error) else -math.inf


BYTE_BUDGET = 1 << 30
"""Most bytes of outputs that are kept of one forward of the baseline."""

_Key = tuple[str, int]


@torch.no_grad()
def checkpoint_drift(
    baseline: nn.Module, candidate: nn.Module, forwards: Sequence[Mapping[str, Any]]
) -> tuple[DriftRow, ...]:
    """Return the rows of the modules without children that both sides have, in the order in which they first run."""
    named = (side.named_modules() for side in (baseline, candidate))
    modules = [{name: one for name, one in pairs if not list(one.children())} for pairs in named]
    names = [name for name in modules[0] if name in modules[1]]
    sums: dict[str, DriftSums] = {}
    for forward in forwards:
        kept: dict[_Key, Tensor] = {}
        left = BYTE_BUDGET

        def keep(key: _Key, args: Any, kwargs: Any, output: Tensor, kept: dict[_Key, Tensor] = kept) -> None:
            nonlocal left
            left -= output.nbytes
            if left >= 0:
                kept[key] = output.clone()

        def compare(key: _Key, args: Any, kwargs: Any, output: Tensor, kept: dict[_Key, Tensor] = kept) -> None:
            expected = kept.pop(key, None)
            if expected is not None:
                exact = tree_map_only(
                    Tensor, lambda one: one.to(expected.dtype) if one.is_floating_point() else one, (args, kwargs)
                )
                predicted = modules[0][key[0]](*exact[0], **exact[1])
                own = sums.setdefault(key[0], DriftSums())
                own.add(expected, output, predicted=predicted if isinstance(predicted, Tensor) else None)

        for side, table, observer in ((baseline, modules[0], keep), (candidate, modules[1], compare)):
            with _listening({name: table[name] for name in names}, observer):
                side(**forward)
    return shared([own.row(name, name, "module", own.loss) for name, own in sums.items() if own.num_tensors])


@contextmanager
def _listening(modules: Mapping[str, nn.Module], observe: Callable[[_Key, Any, Any, Tensor], None]) -> Iterator[None]:
    """Hand over every call of `modules` that returns a tensor; calls are counted by module."""
    calls: dict[str, int] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[name] = calls.get(name, -1) + 1
            if isinstance(output, Tensor):
                observe((name, calls[name]), args, kwargs, output)

        return hook

    with ExitStack() as hooks:
        for name, one in modules.items():
            hooks.enter_context(one.register_forward_hook(hook_of(name), with_kwargs=True))
        yield
