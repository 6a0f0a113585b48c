"""Scalars of a profile for TensorBoard: what its own library reads, where that is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write(directory: Path, summary: Mapping[str, Any]) -> bool:
    """Write `step_ms` for every step and `total_ms/<kind>` for every kind of span; return whether it could be done.

    Args:
        directory: Of the profile, a run to TensorBoard.
        summary: What `profile_trace.summarize` returns.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # TensorBoard is an extra
        return False
    with SummaryWriter(str(directory)) as writer:
        for step, length in enumerate(summary["steps_us"]):
            writer.add_scalar("step_ms", length / 1e3, step)
        for kind, found in sorted(summary["kinds"].items()):
            writer.add_scalar(f"total_ms/{kind}", found["total_us"] / 1e3, 0)
    return True
