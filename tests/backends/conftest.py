"""Programs and built subjects of the tiny models, made once per worker: compiling is what these tests cost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from benchmarks.tables.conformance_table import PROGRAMS, make_program
from glassengine.backends.registry import find_backend
from glassengine.program.export.export import export_module
from glassengine.program.representation.program import Program
from glassengine.testing import conformance, models

MakeProgram = Callable[..., Program]
MakeSubject = Callable[..., conformance.Subject]


@pytest.fixture(scope="session")
def program_of(exporting_once: Callable[[], AbstractContextManager[None]]) -> MakeProgram:
    """Return a function (one of `PROGRAMS` or a plain module of `models`, dtype) -> program; each is exported once."""
    made: dict[tuple[str, str], Program] = {}

    def make(name: str, dtype: str = "float32") -> Program:
        if (name, dtype) not in made:
            if name in PROGRAMS:
                # Of an encoder-decoder both programs are exported together, and asked for one by one.
                with exporting_once():
                    made[name, dtype] = make_program(name, dtype)
            else:
                steps = [getattr(models, f"{name}_inputs")(batch) for batch in (2, 3)]
                made[name, dtype] = export_module(getattr(models, name)(), steps)
        return made[name, dtype]

    return make


@pytest.fixture(scope="session")
def subject_of(program_of: MakeProgram, tmp_path_factory: pytest.TempPathFactory) -> MakeSubject:
    """Return a function (model name, back-end name, dtype) -> subject with every op observed; each is built once."""
    made: dict[tuple[str, str, str], conformance.Subject] = {}

    def make(name: str, backend: str, dtype: str = "float32") -> conformance.Subject:
        if (name, backend, dtype) not in made:
            directory = tmp_path_factory.mktemp(f"{name}-{backend}-{dtype}")
            made[name, backend, dtype] = conformance.prepare(program_of(name, dtype), find_backend(backend), directory)
        return made[name, backend, dtype]

    return make
