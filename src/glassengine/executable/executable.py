"""The only place where a graph is compiled or run.

Front ends hand in what compiles (`compile_executable`) or loads (`load_executable`) and get an `Executable` back. Both
functions and `Executable.run` keep counts and times; metrics, snapshots and the profiler hang on them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from glassengine import environment
from glassengine.errors import BackendError, GlassError

logger = logging.getLogger("glassengine")

Tensors = dict[str, torch.Tensor]
Run = Callable[[Mapping[str, torch.Tensor]], Tensors]


@dataclass
class Executable:
    """One compiled graph, loaded.

    Attributes:
        name: Shown in messages, e.g. "tiny-llama/main".
        run_graph: Inputs by name -> outputs by name; mutates cache inputs where the back-end does.
        num_executions: Completed runs.
        execute_s: Seconds spent in them.
        synchronous: Whether a run ends when its devices have finished. An accelerator reports an error when it is next
            waited for, by default in a later execution, perhaps of another executable. Costs the overlap of host and
            device; nothing on the CPU.
    """

    name: str
    run_graph: Run
    num_executions: int = 0
    execute_s: float = 0.0
    synchronous: bool = field(default_factory=environment.synchronous)

    def run(self, inputs: Mapping[str, torch.Tensor]) -> Tensors:
        """Run once.

        Raises:
            BackendError: The back-end failed; names the executable and chains the original error.
        """
        start = time.perf_counter()
        try:
            outputs = self.run_graph(inputs)
            if self.synchronous:
                for device in _accelerators(inputs):
                    torch.accelerator.synchronize(device)
        except GlassError:
            raise
        except Exception as error:
            shapes = ", ".join(f"{name}: {_spell(tensor)}" for name, tensor in list(inputs.items())[:6])
            late = not self.synchronous and bool(_accelerators(inputs))
            raise BackendError(
                f"executable {self.name!r} failed in execution {self.num_executions}"
                + (", or one before it" if late else ""),
                got=f"{type(error).__name__}: {error}",
                expected=f"inputs that fit the built ranges, on the right device; these were {shapes}",
                hint="wait for the device after each execution: --synchronous, or GLASS_SYNCHRONOUS=1"
                if late
                else None,
            ) from error
        self.execute_s += time.perf_counter() - start
        self.num_executions += 1
        return outputs


def _accelerators(tensors: Mapping[str, torch.Tensor]) -> list[torch.device]:
    """Return the devices of `tensors` that work on their own time."""
    found = {tensor.device: None for tensor in tensors.values()}
    return [device for device in found if device.type not in ("cpu", "meta")]


def _spell(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}[{','.join(map(str, tensor.shape))}]@{tensor.device}"


@dataclass
class CompileRecord:
    """One compilation: what, when, how long."""

    name: str
    compile_s: float


@dataclass
class Ledger:
    """Every compilation of this process, in order."""

    compilations: list[CompileRecord] = field(default_factory=list)


ledger = Ledger()


def compile_executable(name: str, compiler: Callable[[Path], None], directory: Path) -> None:
    """Compile one graph into `directory`.

    Args:
        name: Shown in messages.
        compiler: Given by the back-end: writes its files into the directory.
        directory: Exists and is empty.

    Raises:
        BackendError: The compiler failed; chains the original error.
    """
    start = time.perf_counter()
    try:
        compiler(directory)
    except (GlassError, OSError):
        raise
    except Exception as error:
        raise BackendError(
            f"compiling {name!r} failed", got=f"{type(error).__name__}: {error}", hint="try another one with --backend"
        ) from error
    seconds = time.perf_counter() - start
    ledger.compilations.append(CompileRecord(name, seconds))
    logger.info("compiled %s in %.1f s", name, seconds)


def load_executable(name: str, loader: Callable[[Path], Run], directory: Path) -> Executable:
    """Load what `compile_executable` wrote.

    Raises:
        BackendError: The loader failed; chains the original error.
    """
    try:
        return Executable(name, loader(directory))
    except (GlassError, OSError):
        raise
    except Exception as error:
        raise BackendError(
            f"loading {name!r} failed", got=f"{type(error).__name__}: {error}", hint="build it again on this machine"
        ) from error
