"""The token ids that a language model was given in one forward."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.capture.calls.promises import is_computed_later, values_now


def first_argument(root: nn.Module) -> str | None:
    """Return the name of the first argument of a model's forward, where it has one."""
    try:
        return next(iter(inspect.signature(root.forward).parameters), None)
    except (TypeError, ValueError):
        return None


def token_ids(args: Any, kwargs: Any, first: str | None) -> list[list[int]]:
    """Return what each row of the batch was given, without padding; nothing where the model reads no tokens.

    Serving engines pass the tokens of all rows concatenated: only a single row is then known.

    Args:
        args: Positional arguments of the forward.
        kwargs: Keyword arguments of the forward.
        first: Name of the first argument.
    """
    ids = kwargs.get("input_ids")
    if ids is None and args and first == "input_ids":
        ids = args[0]
    if not isinstance(ids, Tensor) or ids.is_floating_point():
        return []
    if is_computed_later(ids):
        ids = values_now(ids, "the token ids of a recording")
    if type(ids) is not Tensor:
        return []
    if ids.dim() == 1 and _is_one_row(ids, kwargs.get("positions", args[1] if len(args) > 1 else None)):
        return [ids.tolist()]
    if ids.dim() != 2:
        return []
    rows: list[list[int]] = ids.tolist()
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= ids.shape[1] > 0:
        seen = mask[:, -ids.shape[1] :].tolist()
        rows = [[token for token, valid in zip(*pair, strict=True) if valid] for pair in zip(rows, seen, strict=True)]
    return rows


def _is_one_row(ids: Tensor, positions: Any) -> bool:
    """Whether the positions of `ids` follow one another."""
    if not isinstance(positions, Tensor) or positions.shape != ids.shape or positions.is_floating_point():
        return False
    return bool((torch.diff(positions) == 1).all())
