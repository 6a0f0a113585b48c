"""`torch_xla.distributed.parallel_loader`, imported as `pl`: batches on the lazy device, each the begin of a step."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from glassengine.compat.torch_xla.core.xla_model import send_cpu_data_to_device
from glassengine.compat.torch_xla.refusals import require_default
from glassengine.errors import UsageError
from glassengine.executable.steps import mark_step
from glassengine.plugins.lazy.running import run_pending

logger = logging.getLogger("glassengine.lazy")


class PerDeviceLoader:
    """The batches of a loader on the lazy device; taking the next one ends a step.

    Args:
        loader: Of batches on the CPU.
        device: The lazy device.
        batches_per_execution: How many batches are one step.
    """

    def __init__(self, loader: Iterable[Any], device: Any, batches_per_execution: int = 1) -> None:
        self._loader = loader
        self._device = device
        self._batches = batches_per_execution

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches; what is pending before the first one runs by itself, and belongs to no step."""
        run_pending()
        number = 0
        for number, batch in enumerate(self._loader, 1):
            yield send_cpu_data_to_device(batch, self._device)
            if number % self._batches == 0:
                mark_step()
        if number % self._batches:
            mark_step()

    def __len__(self) -> int:
        """Return how many batches the loader has."""
        return len(self._loader)  # type: ignore[arg-type]

    def close(self) -> None:
        """Do nothing: no thread runs."""


class ParallelLoader:
    """Batches for the devices of this process, of which there is one.

    Args:
        cpu_loader: Of batches on the CPU.
        devices: The lazy device in a list.
        batchdim: Without effect: a batch goes to one device as a whole.
        batches_per_execution: How many batches are one step.
        loader_prefetch_size: Without effect, like the other numbers of batches and threads: a batch is loaded when it
            is needed. `torch.utils.data.DataLoader(num_workers=...)` loads in advance.
        device_prefetch_size: Likewise.
        host_to_device_transfer_threads: Likewise.
        input_sharding: Refused.

    Raises:
        UsageError: There are several devices, or a sharding.
    """

    def __init__(
        self,
        cpu_loader: Iterable[Any],
        devices: Sequence[Any],
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int | None = None,
        device_prefetch_size: int | None = None,
        host_to_device_transfer_threads: int | None = None,
        input_sharding: Any = None,
    ) -> None:
        if len(devices) != 1:
            raise UsageError("there is one lazy device in each process", got=f"{len(devices)} devices")
        require_default("ParallelLoader", {"input_sharding": input_sharding}, "there is one device")
        if loader_prefetch_size or device_prefetch_size or host_to_device_transfer_threads:
            logger.info("batches are loaded when they are needed; DataLoader(num_workers=...) loads in advance")
        self._loader = PerDeviceLoader(cpu_loader, devices[0], batches_per_execution)

    def per_device_loader(self, device: Any) -> PerDeviceLoader:
        """Return the loader of the only device."""
        return self._loader

    def __len__(self) -> int:
        """Return how many batches the loader has."""
        return len(self._loader)

    def close(self) -> None:
        """Do nothing: no thread runs."""


class MpDeviceLoader:
    """The batches of a loader on the lazy device; taking the next one ends a step.

    Args:
        loader: Of batches on the CPU.
        device: The lazy device.
        kwargs: Of `ParallelLoader`.
    """

    def __init__(self, loader: Iterable[Any], device: Any, **kwargs: Any) -> None:
        self._loader = ParallelLoader(loader, [device], **kwargs).per_device_loader(device)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches."""
        return iter(self._loader)

    def __len__(self) -> int:
        """Return how many batches the loader has."""
        return len(self._loader)
