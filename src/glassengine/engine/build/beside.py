"""Compiles a program in another process, while this one compiles the same program with debug outputs.

A compiler that takes longer than a process to start uses one processor: two of them take half the time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from glassengine import environment
from glassengine.backends.registry import choose_backend, find_backend
from glassengine.engine.build.build import settings_of
from glassengine.engine.build.write import for_compiler
from glassengine.engine.store import files
from glassengine.program import Program
from glassengine.program.representation.stored import load_program, save_program
from glassengine.workers import Died
from glassengine.workers.processes import Processes

_MOST_BYTES = 1 << 28
"""Of weights: another process has copies of its own, several while it compiles."""


@contextmanager
def compiled_beside(program: Program, backend: str | None, **sizes: Any) -> Iterator[Callable[[Path], None] | None]:
    """Begin to compile a program without debug outputs; yield what puts the executable into an empty directory.

    None where this would gain nothing, or where this process is not a command alone: what else it has changed in the
    compiler is not known.

    Args:
        program: With weights.
        backend: As in `build`.
        sizes: As in `build_program`.

    Raises:
        BackendError: As `build`.
    """
    chosen, _ = choose_backend(backend, for_onnx=program.onnx is not None)
    is_worth = chosen.capabilities.compiles_slowly and environment.num_cpus() > 1 and environment.owns_process()
    if not is_worth or sum(weight.nbytes for weight in program.weights().values()) > _MOST_BYTES:
        yield None
        return
    settings = settings_of(program, backend, **sizes)
    with tempfile.TemporaryDirectory(prefix="glassengine-beside-") as folder:
        directory = Path(folder)
        save_program(for_compiler(program, settings), directory)
        tensors = {**program.exported.state_dict, **program.exported.constants}
        weights = {name: value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
        files.save_weights(weights, directory / files.WEIGHTS)
        request = (folder, chosen.name, torch.get_num_threads(), torch.get_float32_matmul_precision())
        with ThreadPoolExecutor(1) as thread, closing(Processes(compile_stored, 1)) as workers:
            begun = thread.submit(lambda: next(workers.run([request], attempts=1)))

            def put(path: Path) -> None:
                if isinstance(begun.result(), Died):  # of too little memory, say
                    chosen.build(for_compiler(program, settings), path)
                    return
                path.rmdir()
                (directory / files.MAIN).rename(path)

            yield put


def compile_stored(request: tuple[str, str, int, str]) -> None:
    """Compile a program that `compiled_beside` has stored; in the other process."""
    folder, backend, num_threads, precision = request
    torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision(precision)
    directory = Path(folder)
    program = load_program(directory, files.load_weights(directory / files.WEIGHTS))
    (directory / files.MAIN).mkdir()
    find_backend(backend).build(program, directory / files.MAIN)
