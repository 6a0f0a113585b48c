"""Says how two shapes differ, and which flag or layout operation would make them fit."""

from __future__ import annotations

import json
import math
from typing import Any

Shape = tuple[int, ...]


def difference(baseline: Shape, candidate: Shape, site: str) -> str:
    """Return a sentence on two shapes that differ: which dimensions, and what would make them fit.

    Args:
        baseline: Shape of the tensor of the baseline.
        candidate: Shape of its counterpart.
        site: Name of the tensor, for the flag.
    """
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
