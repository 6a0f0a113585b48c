"""What the names of sites say: which part of a training step, gradients of what, inside of which modules."""

from __future__ import annotations

from glassengine.sites import ROOT

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


def paths_above(path: str) -> set[str]:
    """Return the paths of the modules around one."""
    names = path.split(".") if path != ROOT else []
    return {".".join(names[:i]) for i in range(1, len(names))} | ({ROOT} if names else set())
