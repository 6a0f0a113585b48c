"""`torch_xla.runtime`, imported as `xr`: which process this is, of how many, and on what device its graphs run.

Ranks are those of `torch.distributed` once it is set up, and before that of the variables that torchrun sets.
"""

from __future__ import annotations

import torch

from glassengine import environment
from glassengine.compat.torch_xla.refusals import refusing, require_default
from glassengine.errors import UsageError
from glassengine.writing import local

_ONE_DEVICE = "each process has one lazy device, and a tensor is on it as a whole"

__getattr__ = refusing(
    __name__,
    {
        "get_master_ip": "torch.distributed sets up processes: MASTER_ADDR",
        "set_device_type": "graphs run on the CPU; glass.lazy.mode(backend=...) says which back-end compiles them",
        "use_spmd": _ONE_DEVICE,
    },
)


def is_distributed() -> bool:
    """Return whether `torch.distributed` is set up."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world_size() -> int:
    """Return how many processes there are; 1 where no variable gives a number."""
    return torch.distributed.get_world_size() if is_distributed() else environment.num_ranks() or 1


def global_ordinal() -> int:
    """Return the rank of this process among all."""
    return torch.distributed.get_rank() if is_distributed() else environment.rank()


local_ordinal = environment.local_rank
# Each process has one device.
process_index = global_ordinal
process_count = global_device_count = global_runtime_device_count = world_size


def addressable_device_count() -> int:
    """Return how many devices this process has."""
    return 1


addressable_runtime_device_count = addressable_device_count


def device_type() -> str:
    """Return what graphs run on."""
    return "CPU"


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keep compiled graphs in a directory from now on, as GLASS_CACHE_DIR does.

    Args:
        path: Of the directory; it need not exist.
        readonly: Refused: what is compiled is kept.

    Raises:
        UsageError: The cache is to be read only, or the path is no place on this machine.
    """
    require_default("initialize_cache", {"readonly": readonly}, "GLASS_CACHE_MAX_BYTES=0 turns the cache off")
    environment.set_cache_directory(local(path))


def using_pjrt() -> bool:
    """Return False: there is no runtime of XLA."""
    return False


def is_spmd() -> bool:
    """Return False: a tensor is on one device as a whole."""
    return False


def require_alone(name: str, instead: str) -> None:
    """Refuse what does nothing in a run of one process where there are several.

    Args:
        name: Of the function of PyTorch/XLA.
        instead: The function of torch that does the same among processes.

    Raises:
        UsageError: There are several processes.
    """
    if world_size() > 1:
        raise UsageError(
            f"torch_xla.{name} works in a run of one process only",
            got=f"process {global_ordinal()} of {world_size()}",
            hint=f"{instead}, on tensors of the CPU: tensor.cpu()",
        )
