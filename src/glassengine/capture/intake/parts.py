"""What a tensor that is not plain consists of: sparse, quantized, nested, distributed, wrapped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, maybe_get_bdim

from glassengine.recording.layout.layout import Sharding


def untransformed(tensor: Tensor) -> Tensor:
    """Return the values of what `torch.func` (vmap, grad, jvp) passes around, the mapped dimensions first.

    To be called, and its result to be used, under `_DisableFuncTorch`.
    """
    while is_functorch_wrapped_tensor(tensor):
        mapped = maybe_get_bdim(tensor)
        tensor = get_unwrapped(tensor)
        if mapped >= 0:
            tensor = tensor.movedim(mapped, 0)
    return tensor


def sharding_of(tensor: Tensor) -> Sharding | None:
    """Return how a distributed tensor is spread over processes; None of any other."""
    if type(tensor).__name__ != "DTensor":
        return None
    whole: Any = tensor
    mesh = whole.device_mesh
    return Sharding(
        shape=tuple(whole.shape),
        placements=tuple(map(_placement, whole.placements)),
        mesh=tuple(mesh.shape),
        names=tuple(mesh.mesh_dim_names or ()),
        coordinate=tuple(mesh.get_coordinate() or ()),
        ranks=tuple(mesh.mesh.flatten().tolist()),
    )


def _placement(placement: Any) -> str:
    # Not every version of torch says how what is partial is reduced.
    return f"P({placement.reduce_op})" if placement.is_partial() else str(placement)


def waited(tensor: Tensor) -> Tensor:
    """Return the values of a collective operation that may still be running, once it has ended; others as they are."""
    if type(tensor).__name__ != "AsyncCollectiveTensor":
        return tensor
    running: Any = tensor
    done: Tensor = running.trigger_wait()
    return done


def parts_of(tensor: Tensor) -> list[tuple[str, Tensor]] | None:
    """Return the plain tensors that a tensor of another kind consists of, by key; None if unknown."""
    if (done := waited(tensor)) is not tensor:
        return [("", done)]
    if tensor.layout is torch.sparse_coo:
        whole = tensor.detach().coalesce()
        return [(".indices", whole.indices()), (".values", whole.values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [(f".{name}", getattr(tensor.detach(), name)()) for name in ("crow_indices", "col_indices", "values")]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [(f".{name}", getattr(tensor.detach(), name)()) for name in ("ccol_indices", "row_indices", "values")]
    if tensor.layout is not torch.strided and not hasattr(tensor, "__tensor_flatten__"):
        return None
    if tensor.is_nested and not hasattr(tensor, "__tensor_flatten__"):
        # Concatenated sequences of different lengths; not contiguous if transposed.
        whole = tensor.detach().contiguous()
        return [(".values", whole.values()), (".sizes", whole._nested_tensor_size())]
    if tensor.is_quantized:
        return [(".int_repr", tensor.int_repr()), *_quantization(tensor)]
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [(f".{name.lstrip('_')}", getattr(tensor, name)) for name in names]
    plain = tensor.detach().as_subclass(Tensor)
    return [("", plain)] if type(plain) is Tensor else None


def _quantization(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        yield ".scale", torch.tensor(tensor.q_scale(), dtype=torch.float64)
        yield ".zero_point", torch.tensor(tensor.q_zero_point())
    else:
        yield ".scale", tensor.q_per_channel_scales()
        yield ".zero_point", tensor.q_per_channel_zero_points()


def port_of_part(site: str, key: str) -> str:
    """Return what joins the key of a part to its site: a part of a plain path is a part of its output."""
    return ":out" if key and ":" not in site else ""
