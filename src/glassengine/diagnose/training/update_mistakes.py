"""Names the mistake in an update by trial: the baseline's optimizer with one mistake reproduces the candidate's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.diagnose.training.run import StepTaken, repeat_update
from glassengine.numerics.float64 import double
from glassengine.numerics.judgement import unit_roundoff
from glassengine.results import TRIED, Hint, Kind

_CERTAIN, _APART = 4.0, 8.0
"""What explains leaves so few roundings, and is nearer than the right update by this factor."""
_LATE = 1e9
"""A step so late that no bias is left to correct."""
_KINDS: dict[str, Kind] = dict.fromkeys(("lr", "betas", "weight_decay", "momentum", "dampening", "maximize"), "scale")
_KINDS["eps"] = "eps"


@dataclass(frozen=True)
class _Mistake:
    kind: Kind
    text: str
    options: Mapping[str, Any] | None = None
    """Hyperparameters that every group has instead of its own."""
    factor: float = 1.0
    """Of the gradients."""
    is_late: bool = False


@dataclass
class Updates:
    """The baseline's optimizer, in float64, and the step of a run that it is tried on.

    Attributes:
        optimizer: Of a copy of the baseline; what it keeps is overwritten.
        names: Its parameters.
        step: Of the candidate's run.
    """

    optimizer: torch.optim.Optimizer
    names: Mapping[nn.Parameter, str]
    step: StepTaken

    def __post_init__(self) -> None:
        self._fitting: list[tuple[_Mistake, Mapping[str, Tensor]]] = []

    def explain(self, site: str, exact: Tensor, native: Tensor, theirs: Tensor) -> Hint | None:
        """Return the mistake with which the optimizer makes what the candidate made; None where none of these does.

        Args:
            site: "parameter:param" or "parameter:state.name".
            exact: The right result, float64.
            native: The same in the candidate's dtype.
            theirs: What the candidate's optimizer made.
        """
        exact, wrong = double(exact), double(theirs)
        name, _, what = site.partition(":")
        before = self.step.state[name].double()
        if what == "param" and torch.equal(wrong, before) and not torch.equal(exact, before):
            return Hint("stale", "the parameter is not updated", 1.0, evidence=TRIED, proven=True)
        size = max(float(exact.norm()), 1e-300)
        share = float((double(native) - exact).norm()) / size + unit_roundoff(theirs.dtype)
        rounding = share * max(size, float(wrong.norm()))
        of_right = float((wrong - exact).norm())
        known = [(mistake, made) for mistake, made in self._fitting if site in made]
        for mistake, made in (*known, *self._tried(site, exact, wrong, before)):
            left = float((made[site] - wrong).norm())
            if left <= _CERTAIN * rounding and left * _APART <= of_right:
                if (mistake, made) not in known:
                    self._fitting.append((mistake, made))
                rest = left / of_right if of_right else 0.0
                return Hint(mistake.kind, mistake.text, 1.0, evidence=TRIED, proven=True, unexplained=rest)
        return None

    def _tried(
        self, site: str, exact: Tensor, wrong: Tensor, before: Tensor
    ) -> Iterator[tuple[_Mistake, Mapping[str, Tensor]]]:
        for mistake in (*self._of_options(), *self._fitted(site, exact, wrong, before)):
            made = self._made(mistake)
            if made is not None and site in made:
                yield mistake, made

    def _of_options(self) -> Iterator[_Mistake]:
        """Yield: the options that the candidate's optimizer says it has, else one that is turned around or left out."""
        first = self.optimizer.param_groups[0]
        theirs = next(iter(self.step.options.values()), {})
        differing = {key: theirs[key] for key in first if key in theirs and _plain(first[key]) != theirs[key]}
        if differing:
            text = "; ".join(
                f"{key}: {first[key]} in the baseline, {value} in the candidate" for key, value in differing.items()
            )
            yield _Mistake(kind_of_option(next(iter(differing))), text, differing)
        for key, value in first.items():
            if isinstance(value, bool) and key not in ("foreach", "fused", "capturable", "differentiable"):
                what = "taken off the weights" if value else "added to the gradients"
                text = f"{key} is {'not ' if value else ''}on in the candidate"
                text = (
                    f"the weight decay is {what} in the baseline, not in the candidate"
                    if key.startswith("decoupled")
                    else text
                )
                yield _Mistake(kind_of_option(key), text, {key: not value})
            elif isinstance(value, float) and value and key in ("weight_decay", "momentum"):
                yield _Mistake("scale", f"{key} is missing: {value:g} in the baseline", {key: 0.0})
        if "betas" in first:
            yield _Mistake("scale", "the bias correction is missing", is_late=True)

    def _fitted(self, site: str, exact: Tensor, wrong: Tensor, before: Tensor) -> Iterator[_Mistake]:
        """Yield: another learning rate, and gradients of another size, by the number that fits."""
        rate = self.optimizer.param_groups[0].get("lr")
        if site.endswith(":param") and isinstance(rate, float):
            factor = _along(exact - before, wrong - before)
            if factor is not None:
                text = (
                    f"the update is {factor:.6g} times as large: a learning rate of {rate * factor:.6g}, not {rate:g}"
                )
                yield _Mistake("scale", text, {"lr": rate * factor})
        beside = self._made(_Mistake("scale", "", factor=2.0))
        if beside is not None and site in beside:
            slope = _along(beside[site] - exact, wrong - exact)
            for factor in () if slope is None else (1 + slope, abs(1 + 3 * slope) ** 0.5):  # of a sum, of squares
                yield _Mistake("scale", f"gradients are {factor:.6g} times as large when they arrive", factor=factor)

    def _made(self, mistake: _Mistake) -> dict[str, Tensor] | None:
        """Return parameters and memory after the update with a mistake, by site; None where it cannot be made."""
        step, groups = self.step, self.optimizer.param_groups
        kept = [dict(group) for group in groups]
        scaled = {name: None if g is None else g.double() * mistake.factor for name, g in step.gradients.items()}
        memory = {name: dict(values) for name, values in step.memory.items()}
        if mistake.is_late:
            memory = {name: self._late(name, memory.get(name, {})) for name in step.gradients}
        try:
            for group in groups:
                group.update(mistake.options or {})
            self.optimizer.state.clear()
            changed = replace(step, gradients=scaled, memory=memory)
            parameters, kept_by_name = repeat_update(self.optimizer, dict(self.names), changed, double)
        except (KeyError, RuntimeError, TypeError, ValueError):
            return None
        finally:
            for group, options in zip(groups, kept, strict=True):
                group.update(options)
        tensors = {f"{name}:param": value.double() for name, value in parameters.items()}
        for name, values in kept_by_name.items():
            tensors |= {
                f"{name}:state.{key}": value.double() for key, value in values.items() if isinstance(value, Tensor)
            }
        return tensors

    def _late(self, name: str, memory: dict[str, Any]) -> dict[str, Any]:
        zeros = torch.zeros_like(self.step.state[name])
        kept = memory or {"exp_avg": zeros, "exp_avg_sq": zeros}
        return {**kept, "step": torch.tensor(_LATE)}


def kind_of_option(name: str) -> Kind:
    """Return the kind of the mistake that a hyperparameter is another one."""
    return _KINDS.get(name, "other")


def _along(one: Tensor, other: Tensor) -> float | None:
    """Return the factor by which a tensor comes nearest to another one; None of zeros."""
    power = float(one.square().sum())
    factor = float((one * other).sum()) / power if power else 0.0
    return factor or None


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
