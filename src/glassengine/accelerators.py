"""Tests whether a device can be used on this machine."""

from __future__ import annotations

from glassengine.errors import BackendError


def require_device(device: str, what: str, *, hint: str = "--device cpu") -> None:
    """Refuse to go on where a device is needed that torch cannot use.

    Args:
        device: "cpu", "cuda", "cuda:1", ...
        what: What needs it, for the message.
        hint: What to do without one.

    Raises:
        BackendError: There is no such device here; says what torch finds.
    """
    import torch

    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        got = str(error).splitlines()[0]
        needs = f"{what} needs the device {device!r}"
        if device.startswith("cuda") and not torch.cuda.is_available():
            needs = f"{what} needs a GPU"
            built = f"built for CUDA {torch.version.cuda}, finds no GPU or no driver"
            got = f"torch {torch.__version__} " + (built if torch.version.cuda else "is a build without CUDA")
        raise BackendError(needs, got=got, expected="a device that torch can use", hint=hint) from error
