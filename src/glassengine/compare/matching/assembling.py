"""One tensor out of those that a rule names: in the layout that it gives them, and put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from glassengine.compare.matching import layouts
from glassengine.compare.matching.maps import MapRule
from glassengine.errors import UsageError


def assembled(rule: MapRule, parts: Sequence[tuple[Tensor, Callable[[str], Tensor]]]) -> Tensor:
    """Return the tensor that the candidates of a rule are together.

    Args:
        rule: Of a map.
        parts: Each candidate of each of `maps.steps_of`, with what looks up other tensors of its step.

    Raises:
        UsageError: An operation does not fit, or the tensors do not fit each other.
    """
    made = [layouts.apply(rule.candidate_ops, part, lookup=lookup) for part, lookup in parts]
    number = len(rule.candidates)
    of_steps = [_joined(rule, made[at : at + number]) for at in range(0, len(made), number)]
    return of_steps[0] if rule.accumulate is None else _concatenated(of_steps, rule.accumulate)


def _joined(rule: MapRule, parts: Sequence[Tensor]) -> Tensor:
    if rule.is_sum:
        if any(part.shape != parts[0].shape for part in parts):
            raise UsageError("the candidates cannot be added", got=", ".join(str(list(part.shape)) for part in parts))
        return torch.stack(list(parts)).sum(0)
    return parts[0] if rule.concat_dim is None else _concatenated(parts, rule.concat_dim)


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    try:
        return torch.cat(list(parts), dim)
    except (RuntimeError, IndexError) as error:
        got = ", ".join(str(list(part.shape)) for part in parts)
        raise UsageError(f"the candidates cannot be concatenated along dimension {dim}", got=got) from error
