"""Arrays of NumPy, JAX and others that speak DLPack, as tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack


def as_tensors(tree: Any) -> Any:
    """Return a tree with its arrays as tensors; what is no array as it is."""
    return pytree.tree_map(_as_tensor, tree)


def _as_tensor(value: Any) -> Any:
    if isinstance(value, torch.Tensor) or not hasattr(value, "__dlpack__"):
        return torch.as_tensor(value) if type(value).__module__ == "numpy" else value
    try:
        return from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError):
        # What is read-only, or has a byte order of its own, is copied.
        import numpy as np

        return torch.from_numpy(np.array(value))
