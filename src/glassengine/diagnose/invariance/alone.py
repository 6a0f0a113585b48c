"""The first operation that differs, run by itself: in float64, by another kernel, on another instruction set.

`python -m glassengine.diagnose.invariance.alone FOLDER` runs what is in a folder, in an environment of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from glassengine import starting
from glassengine.diagnose.invariance.trace import CallDifference, TracedOp
from glassengine.diagnose.invariance.ways import PartMapping, largest_difference, same_bits
from glassengine.ops.row import Rounding
from glassengine.ops.traits import named
from glassengine.results.without_tensors import SwitchTried

PRODUCTS = (Rounding.PRODUCT, Rounding.CONVOLUTION, Rounding.ATTENTION)
_CHILD_SECONDS = 120
_APART = 1e-9
"""Relative difference of float64 results beyond which rounding explains nothing."""


def rounding_of(name: str) -> Rounding:
    """Return the class of an operation, also of kernels that only eager torch has."""
    found = named(name.rstrip("_")).rounding
    if found is not Rounding.UNKNOWN:
        return found
    if "attention" in name:
        return Rounding.ATTENTION
    return Rounding.PRODUCT if name.endswith("mm") else Rounding.COMPOSITE if "norm" in name else found


def tried_alone(found: CallDifference) -> Iterator[SwitchTried]:
    """Yield what was tried on the operation alone."""
    a, b = found.ops
    capability = (
        None if rounding_of(a.name) in PRODUCTS else _in_child(a, b, found.view, {"ATEN_CPU_CAPABILITY": "default"})
    )
    if capability is not None:
        yield SwitchTried("ATEN_CPU_CAPABILITY=default", capability, "operation")
    is_cpu = all(one.device.type == "cpu" for one in a.inputs)
    if a.name in ("mm", "addmm") and a.outputs[0].dtype is torch.float32 and is_cpu:
        yield SwitchTried("oneDNN's linear, at least 2 rows", _by_onednn(a, b, found.view), "operation")
    if a.outputs and a.outputs[0].dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield SwitchTried("float64, rounded once", _in_float64(a, b, found.view), "operation")


def _agree(view: PartMapping, x: list[Tensor], y: list[Tensor]) -> bool:
    pairs = [view.aligned(one, other) for one, other in zip(x, y, strict=True)]
    return all(pair is not None and same_bits(*pair) for pair in pairs)


def _in_float64(a: TracedOp, b: TracedOp, view: PartMapping) -> bool:
    """Whether float64 results, rounded once, are the same."""
    rounded = []
    for op in (a, b):
        wide = _wide(op)
        if wide is None:
            return False
        rounded.append([x.to(y.dtype) for x, y in zip(wide, op.outputs, strict=True)])
    return _agree(view, *rounded)


def _wide(op: TracedOp) -> list[Tensor] | None:
    """Return the results of an operation in float64; None where it has no such kernel."""
    leaves = [one.double() if isinstance(one, Tensor) and one.is_floating_point() else one for one in op.leaves]
    try:
        return op.rerun(leaves)
    except Exception:  # an operation refuses dtypes in ways of its own
        return None


def differs_in_float64(found: CallDifference) -> bool:
    """Whether the operation gives other results in float64, too: then no rounding explains that."""
    sides = [_wide(op) for op in found.ops]
    if sides[0] is None or sides[1] is None:
        return False
    for x, y in zip(sides[0], sides[1], strict=True):
        pair = found.view.aligned(x, y)
        if pair is None or pair[0].dtype is not torch.float64 or not pair[0].numel():
            continue
        size = float(pair[0].abs().nan_to_num(0.0, 0.0, 0.0).max())
        difference = largest_difference(*pair)
        if difference is not None and difference > _APART * size:
            return True
    return False


def _by_onednn(a: TracedOp, b: TracedOp, view: PartMapping) -> bool:
    """Whether oneDNN's product, which has another kernel for one row alone, gives both sides the same."""
    try:
        return _agree(view, *([onednn_product(*op.inputs)] for op in (a, b)))
    except Exception:  # a build of torch without oneDNN
        return False


def onednn_product(*inputs: Tensor) -> Tensor:
    """Return bias + x @ w, or x @ w, by oneDNN; a single row is padded to two."""
    bias, (x, w) = (inputs[0], inputs[1:]) if len(inputs) == 3 else (None, inputs)
    rows = torch.cat([x, torch.zeros_like(x)]) if len(x) == 1 else x
    packed = torch.ops.mkldnn._reorder_linear_weight(w.t().contiguous(), 1)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return found[: len(x)]


def _in_child(a: TracedOp, b: TracedOp, view: PartMapping, variables: dict[str, str]) -> bool | None:
    """Whether the operation gives both sides the same in a process with other variables; None where it cannot run."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, op in (("a", a), ("b", b)):
                schema = op.func._schema
                full = f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
                torch.save((full, list(op.leaves), pytree.treespec_dumps(op.spec)), Path(folder) / f"{name}.pt")
            command, surroundings = starting.python(__name__, folder), starting.surroundings() | variables
            starting.run(command, env=surroundings, check=True, capture_output=True, timeout=_CHILD_SECONDS)
            files = (Path(folder) / "a.out.pt", Path(folder) / "b.out.pt")
            return _agree(view, *(torch.load(file, weights_only=True) for file in files))
        except (OSError, subprocess.SubprocessError, RuntimeError, AttributeError, TypeError, NotImplementedError):
            return None


def main(arguments: Sequence[str]) -> int:
    """Run the two operations in a folder, and keep their results there."""
    folder = Path(arguments[0])
    for name in ("a", "b"):
        path, leaves, structure = torch.load(folder / f"{name}.pt", weights_only=True)
        function: Any = torch.ops
        for part in path.split("."):
            function = getattr(function, part)
        args, kwargs = pytree.tree_unflatten(leaves, pytree.treespec_loads(structure))
        with torch.no_grad():
            result = function(*args, **kwargs)
        tensors = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
        torch.save(tensors, folder / f"{name}.out.pt")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
