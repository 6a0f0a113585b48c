"""Inputs of a baseline that the forward of a candidate does not take: they may be left out if they have no effect."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from glassengine.errors import IncomparableError
from glassengine.judge.sides.arguments import Step
from glassengine.program import LoadedModel
from glassengine.program.kinds.steps import MadeUp
from glassengine.program.user_code.module_state import run_alone


def without_inputs(steps: Sequence[Step], names: Sequence[str], baseline: LoadedModel, takes: str) -> Sequence[Step]:
    """Return steps in which inputs that the candidate does not take have no effect.

    Args:
        steps: Inputs of the baseline.
        names: Those that the candidate does not take.
        baseline: Whose inputs they are.
        takes: What the candidate takes, for the message.

    Raises:
        IncomparableError: They do.
    """
    module = baseline.module
    if isinstance(steps, MadeUp) and all(_is_mask(step[name]) for step in steps for name in names):
        silent = [step for step in steps if all(_is_all_ones(step[name]) for name in names)]
        steps = _like(steps, silent or [{**step, **{n: torch.ones_like(step[n]) for n in names}} for step in steps])
    fewer = _like(steps, [{name: value for name, value in step.items() if name not in names} for step in steps])
    if all(_says_nothing(module, step, less) for step, less in zip(steps, fewer, strict=True)):
        return fewer
    if isinstance(steps, MadeUp):
        if baseline.stored is not None and all(_is_all_ones(step[name]) for step in steps for name in names):
            return steps
        with contextlib.suppress(Exception):
            for step in fewer:
                run_alone(module, step)
            return fewer
    raise IncomparableError(
        "the candidate does not take all inputs of the baseline",
        got=takes,
        expected=f"an argument for {', '.join(names)}",
        hint="give inputs without it (--inputs), or make it an argument of the candidate's forward",
    )


def _says_nothing(module: nn.Module, step: Step, fewer: Step) -> bool:
    try:
        with_all, without = run_alone(module, step), run_alone(module, fewer)
    except Exception:  # of a forward that insists on them
        return False
    pairs = zip(_tensors(with_all), _tensors(without), strict=False)
    return all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs)


def _is_mask(value: Any) -> bool:
    is_whole = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return is_whole and bool(((value == 0) | (value == 1)).all())


def _is_all_ones(value: Any) -> bool:
    return _is_mask(value) and bool((value == 1).all())


def _tensors(tree: Any) -> list[torch.Tensor]:
    """Return the floating-point results of a forward: another rounding of a kernel for masks is not another result."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _like(steps: Sequence[Step], changed: Sequence[Step]) -> Sequence[Step]:
    """Return other steps, made up where `steps` were."""
    if not isinstance(steps, MadeUp):
        return changed
    return MadeUp(map(dict, changed), recipes=steps.recipes, origin=steps.origin)
