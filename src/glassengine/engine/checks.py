"""Inputs checked before they reach compiled code, which would read past the end of a tensor that is too small."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from glassengine.engine.manifest import Manifest
from glassengine.errors import UsageError
from glassengine.program.export import named_inputs


def check_inputs(manifest: Manifest, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of `inputs` by the executable's names.

    Args:
        manifest: Of an engine of kind "module".
        inputs: Keyword arguments.

    Raises:
        UsageError: One message with a table: name, dtype, device, shape, what was built, and what to change.
    """
    given = named_inputs(inputs)
    sizes: dict[str, int] = {}
    rows: list[tuple[str, str, str, str]] = []
    wrong = False
    for entry in manifest.inputs:
        tensor = given.pop(entry.name, None)
        built = f"{entry.dtype} [{', '.join(_size_text(size, manifest) for size in entry.shape)}] cpu"
        if tensor is None:
            rows.append((entry.name, "missing", built, "pass it"))
            wrong = True
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        problem = ""
        if dtype != entry.dtype:
            problem = f"pass .to(torch.{entry.dtype}), or build with other --inputs"
        elif tensor.device.type != "cpu":
            problem = "pass .cpu()"
        else:
            problem = _shape_problem(tuple(tensor.shape), entry.shape, manifest, sizes)
        wrong |= bool(problem)
        rows.append((entry.name, f"{dtype} {list(tensor.shape)} {tensor.device}", built, problem or "ok"))
    for name, tensor in given.items():
        rows.append((name, f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}", "-", "not an input"))
        wrong = True
    wrong |= _check_fixed(manifest, inputs, rows)
    if wrong:
        header = ("input", "given", "built for", "to do")
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
            for row in [header, *rows]
        ]
        raise UsageError(f"the inputs do not fit the engine {manifest.name!r}", got="\n" + "\n".join(lines))
    tensors = named_inputs(inputs)
    return {entry.name: tensors[entry.name] for entry in manifest.inputs}


def _check_fixed(manifest: Manifest, inputs: Mapping[str, Any], rows: list[tuple[str, str, str, str]]) -> bool:
    """Plain values are part of the graph: another value would be ignored."""
    wrong = False
    for name, value in inputs.items():
        plain = isinstance(value, (bool, int, float, str, type(None)))
        if plain and manifest.fixed_inputs.get(name, not value) != value:
            built = repr(manifest.fixed_inputs[name]) if name in manifest.fixed_inputs else "-"
            rows.append((name, repr(value), built, "its value was built in: build again with other --inputs"))
            wrong = True
    return wrong


def _shape_problem(
    given: tuple[int, ...], built: tuple[int | str, ...], manifest: Manifest, sizes: dict[str, int]
) -> str:
    if len(given) != len(built):
        return f"pass {len(built)} dimensions"
    for index, (size, wanted) in enumerate(zip(given, built, strict=True)):
        if isinstance(wanted, int):
            if size != wanted:
                return f"dimension {index} must be {wanted}: give --inputs two steps that differ in it"
        elif wanted in manifest.ranges:
            low, high = manifest.ranges[wanted]
            if size < low or (high is not None and size > high):
                return f"dimension {index} must be {low} to {'any' if high is None else high}"
            if sizes.setdefault(wanted, size) != size:
                return f"dimension {index} must be {sizes[wanted]}, as in the inputs above"
    return ""


def _size_text(size: int | str, manifest: Manifest) -> str:
    if isinstance(size, int) or size not in manifest.ranges:
        return str(size)
    low, high = manifest.ranges[size]
    return f"{low}..{'' if high is None else high}"
