"""How far a forward that raised was right: a hint, not a verdict."""

from __future__ import annotations

from collections.abc import Mapping

import torch

_NEAR = 64
"""Units of the coarser dtype."""


def until_here(found: Mapping[str, torch.Tensor], baseline: Mapping[str, torch.Tensor]) -> str | None:
    """Say which module outputs before an error are the baseline's; None where none has the name of one there."""
    common = [name for name in found if name in baseline]
    if not common:
        return None
    differs = next((name for name in common if not _is_near(found[name], baseline[name])), None)
    if differs is not None:
        return f"before that its {differs} is not the baseline's any more"
    return f"until then it is the baseline's: {len(common)} module outputs, the last of them {common[-1]}"


def _is_near(candidate: torch.Tensor, baseline: torch.Tensor) -> bool:
    """Whether two tensors are the same but for what rounding does within a few layers; a hint, not a verdict."""
    if candidate.shape != baseline.shape or not baseline.is_floating_point():
        return torch.equal(candidate, baseline)
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (candidate, baseline) if tensor.is_floating_point())
    wide = baseline.double()
    return bool((candidate.double() - wide).norm() <= _NEAR * eps * wide.norm())
