"""Files that are programs already: ONNX models, and `.pt2` files of `torch.export.save`. Nothing is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from glassengine.errors import CorruptError, GlassError, UnknownNameError, UsageError, first_line
from glassengine.program.loading.exported_file import read_exported
from glassengine.program.loading.onnx import onnx_model, onnx_program
from glassengine.program.onnx.stored.file import is_onnx, read_onnx
from glassengine.program.representation.program import Program
from glassengine.program.user_code.calls import RAISED
from glassengine.reading.files import shown

ENDINGS = (".onnx", ".pt2")


def not_a_program(path: Path, error: Exception) -> CorruptError:
    """Return the error for a file whose description of a program makes no sense."""
    return CorruptError(
        f"{path.name} describes no program that can be made",
        got=shown(f"{type(error).__name__}: {first_line(error)}")[:400],
        hint="run with -v for the place; onnx.checker.check_model says more of an ONNX file",
    )


def is_stored(spec: Any) -> bool:
    """Whether `spec` names a file that is a program."""
    return isinstance(spec, (str, Path)) and Path(spec).suffix.lower() in ENDINGS


def read_stored(
    path: Path, *, dtype: str = "auto", attn_implementation: str | None = None
) -> tuple[nn.Module, Program]:
    """Read a file that is a program.

    Args:
        path: The file.
        dtype: "auto", or that of its weights: nothing is cast.
        attn_implementation: None: nothing is chosen any more.

    Returns:
        A module that runs what the file says, and the program, whose metadata say what it is.

    Raises:
        UsageError: There is no such file, it is of another kind, or it cannot be as it was asked for.
        CorruptError: It is damaged, or reading it could do harm.
        BackendError: A package to read it with is missing.
    """
    path = path.expanduser()
    if not path.is_file():
        here = [str(p) for p in path.parent.glob("*") if is_stored(p)] if path.parent.is_dir() else []
        raise UnknownNameError("model file", str(path), here, hint="MODEL may be an ONNX file or a .pt2 program")
    module: nn.Module
    try:
        if is_onnx(path):
            file = read_onnx(path)
            program = onnx_program(file)
            module = onnx_model(file, program)
        else:
            module, program = read_exported(path)
    except GlassError:
        raise
    except RAISED as error:
        raise not_a_program(path, error) from error
    weights = program.weights().values()
    floating = next((weight.dtype for weight in weights if weight.is_floating_point()), torch.float32)
    own = str(floating).removeprefix("torch.")
    if attn_implementation is not None or dtype not in ("auto", own):
        flag = f"--attn-implementation {attn_implementation}" if attn_implementation else f"--dtype {dtype}"
        raise UsageError(
            "dtype and attention of a stored program were chosen when it was made",
            got=f"{flag}, for {path.name} with {own} weights",
            hint="remove the flag, or give the model that the program was made of",
        )
    kind = "onnx.ModelProto" if program.onnx is not None else "torch.export.ExportedProgram"
    program.metadata |= {"model": str(path), "class": kind, "dtype": own, "attn_implementation": None}
    return module, program
