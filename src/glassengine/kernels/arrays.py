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
    if isinstance(value, torch.Tensor):
        return value
    if type(value).__module__ == "numpy":
        return _of_numpy(value)
    return from_dlpack(value) if hasattr(value, "__dlpack__") else value


def _of_numpy(value: Any) -> Any:
    import numpy as np

    is_usual = value.dtype.isbuiltin == 1 and value.dtype.isnative
    if value.ndim and is_usual and value.flags.writeable and min(value.strides) >= 0:
        return torch.from_numpy(value)
    # Torch takes no strides below 0 (its DLPack ends the process), and no numbers that others have added to NumPy.
    own = np.array(value, value.dtype.newbyteorder("=") if not value.dtype.isnative else value.dtype, order="C")
    added = getattr(torch, own.dtype.name, None) if own.dtype.isbuiltin == 2 else None
    return torch.from_numpy(own) if added is None else torch.from_numpy(own.view(f"i{own.itemsize}")).view(added)
