"""Which ops a functional graph keeps, which become others, and how the dispatcher hands their arguments on."""

from __future__ import annotations

import functools
import operator
from typing import Any

import sympy
import torch
from torch._export.utils import _is_cia_op, _is_preservable_cia_op
from torch.fx import Node
from torch.utils._sympy.functions import Min

aten = torch.ops.aten

VIEWS = frozenset(
    {
        aten.alias.default,
        aten.diagonal.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.t.default,
        aten.transpose.int,
        aten.unfold.default,
        aten.unsqueeze.default,
        aten.view.default,
    }
)
PARTS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})
CONVERSIONS = frozenset({aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.contiguous.default})
NUMBERS = frozenset({operator.add, operator.sub, operator.mul, operator.floordiv, operator.neg, aten.sym_size.int})
IN_PLACE = frozenset(
    {"add_", "sub_", "mul_", "div_", "copy_", "index_copy_", "scatter_"}
    | {"masked_fill_", "index_fill_", "relu_", "clamp_"}
)


def is_simple(value: torch.Tensor) -> bool:
    """Whether the trace found the strides of a view; it leaves bounds in them that are known to hold."""
    return not any(isinstance(s, torch.SymInt) and s.node.expr.has(sympy.Min, Min) for s in value.stride())


def conversion(node: Node) -> dict[str, Any]:
    """Return what `_to_copy` is given for a call of `to`, and whether a copy was asked for."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    given = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    names = ("dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format", "copy")
    return {name: given[name] for name in names if given.get(name) not in (None, False)}


def normal(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return arguments as the dispatcher hands them on: by position where they have one, defaults left out."""
    if not isinstance(target, torch._ops.OpOverload):
        return args, kwargs
    positional = [argument for argument in target._schema.arguments if not argument.kwarg_only]
    by_position = list(args)
    if any(argument.name in kwargs for argument in positional):
        for argument in positional[len(args) :]:
            by_position.append(kwargs.pop(argument.name, argument.default_value))
    while by_position and len(by_position) <= len(positional):
        argument = positional[len(by_position) - 1]
        if not argument.has_default_value() or not _equal(by_position[-1], argument.default_value):
            break
        by_position.pop()
    defaults = {a.name: a.default_value for a in target._schema.arguments if a.kwarg_only and a.has_default_value()}
    named = {k: v for k, v in kwargs.items() if k not in defaults or not _equal(v, defaults[k])}
    return tuple(by_position), named


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


@functools.lru_cache(maxsize=4096)
def stays(target: Any) -> bool:
    """Whether an op is the same in a functional graph: it neither writes nor returns what it was given."""
    schema = target._schema
    if schema.name == "glass::mark" or target is aten._assert_tensor_metadata.default:
        return True
    aliases = [*schema.arguments, *schema.returns]
    is_plain = target.namespace == "aten" and schema.returns and not schema.is_mutable
    if not is_plain or any(argument.alias_info is not None for argument in aliases):
        return False
    if any(str(value.type) not in ("Tensor", "List[Tensor]") for value in schema.returns) or "lift" in schema.name:
        return False
    if torch.Tag.data_dependent_output in target.tags:
        return False
    if torch._C.DispatchKey.Autograd in target.py_kernels:
        return False
    return not _is_cia_op(target) or _is_preservable_cia_op(target)
