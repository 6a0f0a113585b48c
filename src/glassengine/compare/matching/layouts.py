"""Layout operations, done to a tensor of one side before it is judged; and those that two different shapes call for.

    {"op": "transpose"}                          the last two dimensions, or "dims": [a, b]
    {"op": "permute", "dims": [0, 2, 1]}
    {"op": "reshape", "shape": [0, 0, 12, -1]}   0 keeps the size of that dimension, -1 is what is left
    {"op": "flatten"}                            all dimensions, or from "start" to "end" (inclusive)
    {"op": "squeeze", "dim": 1}                  {"op": "unsqueeze", "dim": 1}
    {"op": "slice", "dim": -1, "start": 0, "end": 64, "step": 1}
    {"op": "select", "dim": 2, "index": 0}       one entry; the dimension disappears
    {"op": "split", "dim": -1, "parts": 3, "index": 0}, or "sizes": [64, 16, 16] instead of "parts"
    {"op": "pack", "mask": "attention_mask"}     [B, S, ...] -> [tokens, ...] without padding; the mask [B, >= S] is a
                                                 tensor of the same side and step, or the numbers themselves
    {"op": "cast", "dtype": "float32"}
    {"op": "unpair", "dim": -1, "width": 64}     rotary pairs (x0 y0 x1 y1 ...) to halves (x0 x1 ... y0 y1 ...) in each
                                                 head of `width`; "rotated" of its elements, all by default
    {"op": "pair", "dim": -1, "width": 64}       the other way
    {"op": "add", "value": -1}                   what a converter has added (1 to the weight of a norm)

None of them changes a value except `cast` and `add`.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from glassengine.errors import UsageError, first_line, nearest
from glassengine.recording.layout.layout import STORED

if TYPE_CHECKING:
    from torch import Tensor


Lookup: TypeAlias = "Callable[[str], Tensor]"
"""Returns the tensor of a name, of the same side, step and rank."""


@dataclass(frozen=True)
class LayoutOperation:
    """One operation of the list above: its name and its arguments, checked."""

    op: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.op}({', '.join(f'{name}={value}' for name, value in self.arguments.items())})"


def parse_operation(data: object, where: str) -> LayoutOperation:
    """Return the operation that `data` describes.

    Raises:
        UsageError: It is none: an unknown operation, an argument that is missing, unknown or of another kind.
    """
    if not isinstance(data, dict) or not isinstance(data.get("op"), str):
        raise UsageError(f"{where} is not an operation", got=_short(data), expected='{"op": NAME, ...}')
    name = data["op"]
    if name not in _OPERATIONS:
        close = nearest(name, _OPERATIONS)
        raise UsageError(f"{where}: unknown operation {name!r}", expected=[*close, *(_OPERATIONS.keys() - set(close))])
    kinds, defaults, _ = _OPERATIONS[name]
    arguments = {key: value for key, value in data.items() if key != "op"}
    for key, value in arguments.items():
        if key not in kinds:
            raise UsageError(f"{where}: {name} has no argument {key!r}", expected=list(kinds) or "no argument")
        if not _KINDS[kinds[key]](value):
            raise UsageError(f"{where}: argument {key!r} of {name}", got=_short(value), expected=kinds[key])
    missing = [key for key in kinds if key not in arguments and key not in defaults]
    if name == "split":
        missing = [key for key in missing if key not in ("parts", "sizes")]
        if ("parts" in arguments) == ("sizes" in arguments):
            raise UsageError(f"{where}: split needs one of 'parts' and 'sizes'", got=_short(data))
    if missing:
        raise UsageError(f"{where}: {name} needs {', '.join(map(repr, missing))}", got=_short(data))
    return LayoutOperation(name, {**defaults, **arguments})


def apply(operations: Sequence[LayoutOperation], tensor: Tensor, *, lookup: Lookup) -> Tensor:
    """Return `tensor` after `operations`, a view of it where torch can.

    Raises:
        UsageError: An operation does not fit the shape, or leaves nothing: comparing nothing is never a pass.
    """
    for operation in operations:
        before = tensor
        try:
            tensor = _OPERATIONS[operation.op][2](tensor, lookup, operation.arguments)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            shape = f"{str(before.dtype).removeprefix('torch.')}{list(before.shape)}"
            reason = first_line(error)
            raise UsageError(f"{operation} does not fit the tensor", got=f"{shape}: {reason}") from error
        if before.numel() and not tensor.numel():
            raise UsageError(f"{operation} leaves nothing to compare", got=str(list(before.shape)))
    return tensor


def _transpose(x: Tensor, _: Lookup, given: Mapping[str, Any]) -> Tensor:
    if len(given["dims"]) != 2:
        raise ValueError("transpose takes two dimensions; permute takes all")
    return x.transpose(*given["dims"])


def _reshape(x: Tensor, _: Lookup, given: Mapping[str, Any]) -> Tensor:
    return x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(given["shape"])])


def _squeeze(x: Tensor, _: Lookup, given: Mapping[str, Any]) -> Tensor:
    if x.shape[given["dim"]] != 1:
        # torch leaves it as it is; a map that does nothing is a mistake in the map
        raise ValueError(f"dimension {given['dim']} is not of size 1")
    return x.squeeze(given["dim"])


def _slice(x: Tensor, _: Lookup, given: Mapping[str, Any]) -> Tensor:
    dim = range(x.ndim)[given["dim"]]
    if given["step"] < 1:
        raise ValueError("a step is 1 or more")
    # Python cuts a slice at the ends; one that reaches beyond them is a mistake in the map.
    if any(abs(given[key] or 0) > x.shape[dim] for key in ("start", "end")):
        raise ValueError(f"dimension {given['dim']} has {x.shape[dim]} entries")
    return x[(slice(None),) * dim + (slice(given["start"], given["end"], given["step"]),)]


def _split(x: Tensor, _: Lookup, given: Mapping[str, Any]) -> Tensor:
    import torch

    size = x.shape[given["dim"]]
    parts = given.get("parts")
    if parts is not None and (parts < 1 or size % parts):
        raise ValueError(f"dimension {given['dim']} of size {size} is not {parts} equal parts")
    sizes = [size // parts] * parts if parts is not None else given["sizes"]
    pieces: tuple[Tensor, ...] = torch.split(x, sizes, given["dim"])
    return pieces[int(given["index"])]


def _pack(x: Tensor, lookup: Lookup, given: Mapping[str, Any]) -> Tensor:
    import torch

    mask = lookup(given["mask"]) if isinstance(given["mask"], str) else torch.tensor(given["mask"])
    if mask.ndim != 2 or x.ndim < 2 or mask.shape[0] != x.shape[0] or mask.shape[1] < x.shape[1]:
        raise ValueError(f"a mask {list(mask.shape)} does not say which of [batch, sequence] are tokens")
    # In a decode step the mask covers the whole cache; the tokens of the step are its last columns.
    return x[mask[:, mask.shape[1] - x.shape[1] :] != 0]


def _rotary(x: Tensor, _: Lookup, given: Mapping[str, Any], *, to_halves: bool) -> Tensor:
    """Return `x` with the rotated elements of each head in the other order."""
    import torch

    dim, width = range(x.ndim)[given["dim"]], given["width"]
    rotated = width if given["rotated"] is None else given["rotated"]
    if width < 1 or x.shape[dim] % width or not 0 <= rotated <= width or rotated % 2:
        raise ValueError(f"dimension {dim} of size {x.shape[dim]} has no heads of {width}, {rotated} of them rotated")
    order = torch.arange(rotated)
    order = order.view(-1, 2).T.flatten() if to_halves else order.view(2, -1).T.flatten()
    inside = torch.cat([order, torch.arange(rotated, width)])
    heads = torch.arange(0, x.shape[dim], width)
    return x.index_select(dim, (heads[:, None] + inside[None]).flatten())


def _cast(x: Tensor, _: Lookup, given: Mapping[str, Any]) -> Tensor:
    import torch

    dtype: torch.dtype = getattr(torch, given["dtype"])
    if x.is_complex() and not dtype.is_complex:
        raise ValueError(f"{given['dtype']} has no imaginary part")
    return x.to(dtype)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ints(value: object) -> bool:
    return isinstance(value, list) and all(_is_int(item) for item in value)


_KINDS: dict[str, Callable[[object], bool]] = {
    "an integer": _is_int,
    "an integer or null": lambda value: value is None or _is_int(value),
    "a list of integers": _are_ints,
    "a number": lambda value: isinstance(value, float) or _is_int(value),
    "a dtype": lambda value: isinstance(value, str) and value in STORED,
    "a name or rows of 0 and 1": lambda value: (
        isinstance(value, str) or (isinstance(value, list) and len(value) > 0 and all(map(_are_ints, value)))
    ),
}

_Run: TypeAlias = "Callable[[Tensor, Lookup, Mapping[str, Any]], Tensor]"

# name -> (argument -> kind, defaults, what it does)
_OPERATIONS: dict[str, tuple[dict[str, str], dict[str, Any], _Run]] = {
    "transpose": ({"dims": "a list of integers"}, {"dims": [-2, -1]}, _transpose),
    "permute": ({"dims": "a list of integers"}, {}, lambda x, _, given: x.permute(given["dims"])),
    "reshape": ({"shape": "a list of integers"}, {}, _reshape),
    "flatten": (
        {"start": "an integer", "end": "an integer"},
        {"start": 0, "end": -1},
        lambda x, _, given: x.flatten(given["start"], given["end"]),
    ),
    "squeeze": ({"dim": "an integer"}, {}, _squeeze),
    "unsqueeze": ({"dim": "an integer"}, {}, lambda x, _, given: x.unsqueeze(given["dim"])),
    "slice": (
        {"dim": "an integer", "start": "an integer", "end": "an integer or null", "step": "an integer"},
        {"start": 0, "end": None, "step": 1},
        _slice,
    ),
    "select": (
        {"dim": "an integer", "index": "an integer"},
        {},
        lambda x, _, given: x.select(given["dim"], given["index"]),
    ),
    "split": (
        {"dim": "an integer", "index": "an integer", "parts": "an integer", "sizes": "a list of integers"},
        {},
        _split,
    ),
    "pack": ({"mask": "a name or rows of 0 and 1"}, {}, _pack),
    "cast": ({"dtype": "a dtype"}, {}, _cast),
    "unpair": (
        {"dim": "an integer", "width": "an integer", "rotated": "an integer or null"},
        {"dim": -1, "rotated": None},
        functools.partial(_rotary, to_halves=True),
    ),
    "pair": (
        {"dim": "an integer", "width": "an integer", "rotated": "an integer or null"},
        {"dim": -1, "rotated": None},
        functools.partial(_rotary, to_halves=False),
    ),
    "add": ({"value": "a number"}, {}, lambda x, _, given: x + given["value"]),
}


def _short(data: object) -> str:
    text = repr(data)
    return text if len(text) <= 200 else f"{text[:200]}..."


Shape = tuple[int, ...]


def difference(baseline: Shape, candidate: Shape, site: str) -> str:
    """Return a sentence on two shapes that differ: which dimensions, and what would make them fit."""
    if len(baseline) == len(candidate):
        where = ", ".join(str(i) for i, (a, b) in enumerate(zip(baseline, candidate, strict=True)) if a != b)
        where = f"dimension{'s' if ',' in where else ''} {where}"
    else:
        where = f"{len(baseline)} and {len(candidate)} dimensions"
    advice = _advice(baseline, candidate, site)
    text = f"shapes differ: {list(baseline)} and {list(candidate)} ({where})"
    return f"{text}; {advice}" if advice else text


def _advice(x: Shape, y: Shape, site: str) -> str | None:
    if len(x) == len(y) > 1 and (*y[:-2], y[-1], y[-2]) == x:
        return f"they agree when transposed: --transpose '{site}'"
    operation = _same_elements(x, y)
    if operation is not None:
        return f'they agree with --map: "candidate_ops": [{json.dumps(operation)}]'
    differing = [i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b]
    if len(x) == len(y) and len(differing) == 1:
        (dim,) = differing
        if x[dim] and y[dim] % x[dim] == 0:
            part = {"op": "split", "dim": dim, "parts": y[dim] // x[dim], "index": 0}
            return f'a fused candidate? --map: "candidate_ops": [{json.dumps(part)}]'
        if y[dim] and x[dim] % y[dim] == 0:
            return f'a fused baseline? --map: {x[dim] // y[dim]} candidates with "concat_dim": {dim}'
    for side, packed, padded in (("candidate_ops", x, y), ("baseline_ops", y, x)):
        is_packed = 0 < len(packed) == len(padded) - 1 and padded[2:] == packed[1:]
        if is_packed and packed[0] < padded[0] * padded[1]:
            return f'packed tokens? --map: "{side}": [{{"op": "pack", "mask": "attention_mask"}}]'
    return None


def _same_elements(x: Shape, y: Shape) -> dict[str, Any] | None:
    """Return the operation that gives `y` the shape `x` without losing an element, or None."""
    if math.prod(x) != math.prod(y):
        return None
    if len(x) == len(y) and sorted(x) == sorted(y):
        left = list(range(len(y)))
        dims = []
        for size in x:
            found = next(i for i in left if y[i] == size)
            left.remove(found)
            dims.append(found)
        return {"op": "permute", "dims": dims}
    for dim in range(len(y)):
        if y[dim] == 1 and y[:dim] + y[dim + 1 :] == x:
            return {"op": "squeeze", "dim": dim}
    for dim in range(len(x)):
        if x[dim] == 1 and x[:dim] + x[dim + 1 :] == y:
            return {"op": "unsqueeze", "dim": dim}
    for start in range(len(y)):
        for end in range(start + 1, len(y)):
            if (*y[:start], math.prod(y[start : end + 1]), *y[end + 1 :]) == x:
                return {"op": "flatten", "start": start, "end": end}
    return {"op": "reshape", "shape": list(x)}
