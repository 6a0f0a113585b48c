"""The fingerprint of a model: a hash of all that it holds."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def fingerprint(module: nn.Module) -> str:
    """Return a hash of the names, dtypes, shapes and values of all parameters and persistent buffers.

    A quantized weight counts by what it is made of: codes, scales, zero points.
    """
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        for leaf in pytree.tree_leaves(value):
            for part in _parts_of(leaf):
                if not isinstance(part, torch.Tensor):
                    digest.update(f"{name} {part!r}\n".encode())
                    continue
                digest.update(f"{name} {part.dtype} {tuple(part.shape)}\n".encode())
                raw: Any = part.detach().cpu().contiguous().flatten()
                if raw.numel():
                    digest.update(raw.view(torch.uint8).numpy())
    return digest.hexdigest()[:32]


def _parts_of(leaf: Any) -> Iterator[Any]:
    """Yield the plain tensors and values that something in a state_dict is made of."""
    if isinstance(leaf, torch.Tensor) and is_traceable_wrapper_subclass(leaf):
        names, context = leaf.__tensor_flatten__()
        yield type(leaf).__qualname__
        for name in names:
            yield from _parts_of(getattr(leaf, name))
        yield {key: value for key, value in dict(context or {}).items() if isinstance(value, (bool, int, float, str))}
    elif isinstance(leaf, torch.Tensor) and leaf.is_quantized:
        per_channel = leaf.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
        yield leaf.int_repr()
        yield from (
            (leaf.q_per_channel_scales(), leaf.q_per_channel_zero_points(), leaf.q_per_channel_axis())
            if per_channel
            else (leaf.q_scale(), leaf.q_zero_point())
        )
    elif isinstance(leaf, (torch.Tensor, bool, int, float, str, bytes, torch.dtype)):
        yield leaf
    elif leaf is not None:
        yield type(leaf).__qualname__
