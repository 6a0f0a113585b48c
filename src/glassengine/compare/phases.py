"""What the names of sites say about training: which part of a step, and gradients of what."""

from __future__ import annotations

PHASES = ("forward", "backward", "update")


def phase_of(site: str) -> str:
    """Return in which part of a training step a site of a recording is made."""
    port = site.rpartition(":")[2]
    if port == "param" or port.startswith("state."):
        return "update"
    return "backward" if port.startswith("grad") else "forward"


def is_of_parameter(site: str) -> bool:
    """Whether a site is that of a parameter: its gradient, what an update made of it, or the optimizer's state."""
    port = site.partition(":")[2]
    return port in ("grad", "param") or port.startswith("state.")


def is_of_activation(site: str) -> bool:
    """Whether a site is the gradient of an activation."""
    return site.partition(":")[2].startswith(("grad_in", "grad_out"))
