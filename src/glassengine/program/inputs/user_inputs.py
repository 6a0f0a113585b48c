"""Load what a user calls --inputs: a factory, or a file of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glassengine import asked
from glassengine.errors import CorruptError, UsageError
from glassengine.program.user_code.calls import call_factory
from glassengine.reading.documents import read_document
from glassengine.reading.tensors import check_unfolded, read_npz, read_safetensors, read_torch
from glassengine.stores.places import place

_MAX_JSON_BYTES = 256 << 20
_MAX_JSON_ITEMS = 16_000_000


def load_inputs(spec: str, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Load keyword arguments, one dict per step.

    Args:
        spec: `file.py:factory` that returns a dict or a list of dicts, or a file: .pt, .safetensors, .npz, .json.
        names: Parameters of the forward, where tensors may be given in order: one, or a tuple of them.

    Raises:
        UsageError: No such file, an unknown ending, or something else than dicts of tensors and plain values.
    """
    if asked.is_factory(str(asked.inputs(spec))):
        return steps_of(call_factory(spec), spec, names)
    path = place(spec)
    try:
        steps = steps_of(_read(path), spec, names)
        check_unfolded(steps, spec)
    except CorruptError as error:
        got = f"{error.what}: {error.got}"
        raise UsageError(f"{path} cannot be read", got=got, expected=error.expected, hint=error.hint) from error
    except (ValueError, TypeError, RuntimeError, OverflowError, MemoryError) as error:
        raise UsageError(f"{path} cannot be read", got=f"{type(error).__name__}: {error}") from error
    return steps


def _read(path: Path) -> Any:
    if path.suffix in (".pt", ".pth"):
        return read_torch(path, old=True)
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    if path.suffix == ".npz":
        return {name: torch.from_numpy(array) for name, array in read_npz(path).items()}
    if path.suffix == ".json":
        # Hand-written tensors may contain NaN.
        return _tensors(read_document(path, Any, most=_MAX_JSON_BYTES, nonfinite=True, items=_MAX_JSON_ITEMS))
    if path.suffix == ".txt":
        raise UsageError(
            "prompts are for a language model that generates", got=str(path), hint="--inputs FILE with tensors"
        )
    raise UsageError(f"{path} has an unknown ending", got=path.suffix, expected=".pt, .safetensors, .npz, .json")


def _tensors(data: Any) -> Any:
    """Make tensors of the lists that are values of an object, at every level."""
    if isinstance(data, dict):
        return {key: _tensor(value) if isinstance(value, list) else _tensors(value) for key, value in data.items()}
    return [_tensors(item) for item in data] if isinstance(data, list) else data


def _tensor(values: list[Any]) -> Any:
    # A list of objects stays one.
    return _tensors(values) if any(isinstance(value, dict) for value in values) else torch.tensor(values)


def are_in_order(data: Any) -> bool:
    """Whether inputs are one tensor, or several in the order of a forward's parameters."""
    return isinstance(data, torch.Tensor) or (isinstance(data, (list, tuple)) and any(map(are_in_order, data)))


def steps_of(data: Any, spec: str, names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a dict, or a list of them, as one dict a step; `spec` names them in the error.

    Args:
        data: A dict, tensors in the order of `names`, or a list of either.
        spec: What to call them.
        names: Parameters of the forward; without any, tensors in order are refused.

    Raises:
        UsageError: It is something else, or nothing.
    """
    data = in_order(data, names) if names and are_in_order(data) else data
    steps = list(data) if isinstance(data, (list, tuple)) else [data]
    if not steps or not all(isinstance(step, Mapping) for step in steps):
        kinds = ", ".join(sorted({type(step).__name__ for step in steps})) or "nothing"
        raise UsageError(
            f"{spec} does not hold inputs", got=kinds, expected="a dict of keyword arguments, or a list of them"
        )
    return [dict(step) for step in steps]


def in_order(inputs: Any, names: Sequence[str]) -> Any:
    """Return inputs of a forward as keyword arguments in its order, of each step where there are several.

    Args:
        inputs: As `build` takes them: by name, or one or several tensors in order; or a list of such.
        names: Parameters of the forward.

    Raises:
        UsageError: They are something else, or too many.
    """
    if isinstance(inputs, Mapping):
        return {name: inputs[name] for name in names if name in inputs} | dict(inputs)
    if isinstance(inputs, (list, tuple)) and not any(isinstance(one, torch.Tensor) for one in inputs):
        return [in_order(one, names) for one in inputs]
    given = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
    if not any(isinstance(one, torch.Tensor) for one in given):
        got, expected = type(inputs).__name__, "a dict of keyword arguments, tensors in order, or a list of either"
        raise UsageError("a forward cannot be called with these inputs", got=got, expected=expected)
    return positional(given, {}, names)


def positional(args: Sequence[Any], more: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return arguments that are given in order and by name, all by name.

    Raises:
        UsageError: There are too many, or one is given twice.
    """
    twice = [name for name in names[: len(args)] if name in more]
    if len(args) > len(names) or twice:
        got = f"{twice[0]} twice" if twice else f"{len(args)} in order"
        raise UsageError(
            "the inputs are not the arguments of the forward", got=got, expected=", ".join(names) or "none"
        )
    return {**dict(zip(names, args, strict=False)), **more}
