"""Changes of one operation, or of one input, of a reference: the mistakes that people make in kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from glassengine.kernels.written_out import Change, WrittenOut
from glassengine.ops.row import argument
from glassengine.ops.traits import traits_of
from glassengine.program.representation.naming import op_name
from glassengine.results.kernels import MistakeKind

_EPS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
_BLOCKS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu by sigmoid": lambda x: x * torch.sigmoid(1.702 * x), "relu": F.relu, "silu": F.silu, "exp": torch.exp,
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "leaky relu": F.leaky_relu, "softplus": F.softplus, "elu": F.elu,
    "relu squared": lambda x: F.relu(x).square()
}  # fmt: skip
_OTHERS: dict[str, dict[str, Callable[..., Any]]] = {
    "exp": {"exp2": torch.exp2, "expm1": torch.expm1}, "log": {"log2": torch.log2, "log1p": torch.log1p},
    "amax": {"amin": torch.amin}, "sqrt": {"nothing": lambda x: x}, "square": {"abs": torch.abs},
    "maximum": {"minimum": torch.minimum}, "cos": {"sin": torch.sin}, "sin": {"cos": torch.cos},
    "add": {"sub": torch.sub}, "sub": {"add": torch.add}, "mul": {"div": torch.div}, "div": {"mul": torch.mul}
}  # fmt: skip
_ROUNDED = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_REDUCES = {"sum", "mean", "amax", "amin", "prod"}
_PRODUCTS = ("matmul", "mm", "bmm")
_MOST_NODES = 80


@dataclass(frozen=True)
class Mistake:
    """One mistake in a reference."""

    kind: MistakeKind
    text: str
    changes: Mapping[Node, Change] = field(default_factory=dict)
    inputs: Mapping[int, Tensor] = field(default_factory=dict)
    weight: int = 0


def mistakes_in(written: WrittenOut) -> Iterator[Mistake]:
    """Yield mistakes, the usual ones first."""
    yield from _of_inputs(written)
    if len(written.nodes) > _MOST_NODES:
        return
    yield from _of_all_reductions(written)
    for node in written.nodes:
        value = written.values[node]
        if isinstance(value, Tensor) and (value.is_floating_point() or value.dtype is torch.bool):
            yield from _left_out(node, written)
            yield from _numbers(node)
            yield from _replaced(node, written)
            yield from _operands(node, written)
            yield from _masks(node, value, written)
            yield from _shortened(node, written)
    for node in written.nodes:
        yield from _rounded(node, written)


def _called(written: WrittenOut, node: Any) -> str:
    """Return what an operand is called."""
    if node in written.placeholders:
        return f"argument {written.placeholders.index(node)}"
    if not isinstance(node, Node):
        return f"{node:g}" if isinstance(node, float) else str(node)
    return {"amax": "the maximum", "mean": "the mean", "sum": "the sum", "sqrt": "the root"}.get(
        op_name(node), f"the result of {op_name(node)}"
    )


def _kind_left_out(written: WrittenOut, node: Node, other: Any) -> MistakeKind:
    name = op_name(node)
    if name in ("add", "sub"):
        if isinstance(other, (int, float)):
            return "eps" if abs(other) < 0.01 else "bias missing"
        if name == "add" and other in written.placeholders:
            ours, value = written.values[other], written.values[node]
            return "bias missing" if ours.numel() < value.numel() else "argument ignored"
        return "statistics" if isinstance(other, Node) and op_name(other) == "mean" else "operation left out"
    if name in ("mul", "div"):
        is_number = isinstance(other, (int, float)) or (isinstance(other, Node) and not written.values[other].dim())
        return "scale" if is_number else "argument ignored" if other in written.placeholders else "operation left out"
    if traits_of(node).kind == "activation" or name in ("gelu", "sigmoid", "tanh", "relu"):
        return "activation"
    return "mask" if name in ("where", "masked_fill", "tril", "triu") else "operation left out"


def _left_out(node: Node, written: WrittenOut) -> Iterator[Mistake]:
    value, name = written.values[node], op_name(node)
    if traits_of(node).casts or name in ("view", "expand", "clone", "detach", "reshape", "_unsafe_view", "ones"):
        return
    operands = [a for a in node.args if isinstance(a, Node) and isinstance(written.values[a], Tensor)]
    numbers = [a for a in node.args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    for operand in operands:
        own = written.values[operand]
        if not own.is_floating_point() or not value.is_floating_point():
            continue
        sizes = zip(reversed(own.shape), reversed(value.shape), strict=False)
        if own.dim() > value.dim() or any(a not in (1, b) for a, b in sizes):
            continue
        rest = [a for a in operands if a is not operand] or numbers[:1]
        other = rest[0] if rest else None
        # What is kept is as large as the result, as a rule.
        weight = 0 if own.shape == value.shape else 2
        text = _LEFT_OUT.get(name, f"{name} is left out").format("" if other is None else _called(written, other))
        kind = _kind_left_out(written, node, other)
        yield Mistake(kind, text, {node: _takes(operand, written)}, weight=weight)
    top = node.args[0] if name == "div" else None
    if isinstance(top, Node) and op_name(top) == "exp" and op_name(top.args[0]) == "sub":  # type: ignore[arg-type]
        scores = top.args[0].args[0]  # type: ignore[union-attr]
        yield Mistake("operation left out", "the softmax is left out", {node: _then(lambda v: written.values[scores])})  # type: ignore[index]


def _takes(operand: Node, written: WrittenOut) -> Change:
    own = written.values[operand]
    return lambda value, args, kwargs: next((a for a in args if a is own), own).expand(value.shape)


_LEFT_OUT = {
    "add": "{} is not added", "sub": "{} is not subtracted", "mul": "it is not multiplied by {}",
    "div": "it is not divided by {}"
}  # fmt: skip


def _numbers(node: Node) -> Iterator[Mistake]:
    """Other numbers among the arguments: eps, factors, exponents, dimensions, diagonals, flags."""
    name = op_name(node)
    for place, given in enumerate(node.args):
        if isinstance(given, bool):
            text = f"{name} with {not given} in place of {given}"
            yield _argument("operation replaced", text, node, place, not given)
        elif isinstance(given, float) or (isinstance(given, int) and name in ("mul", "div", "add", "pow", "sub")):
            yield from _other_number(node, place, float(given))
        elif isinstance(given, int) and name in ("tril", "triu"):
            for by in (-2, -1, 1, 2):
                yield _argument("mask", f"the mask is moved by {by}", node, place, given + by)
    for by in (-2, -1, 1, 2) if name in ("tril", "triu") and len(node.args) == 1 else ():
        yield _argument("mask", f"the mask is moved by {by}", node, 1, by)


def _other_number(node: Node, place: int, given: float) -> Iterator[Mistake]:
    name = op_name(node)
    if name in ("add", "sub") and 0 < abs(given) < 0.01:
        for eps in _EPS:
            if eps != given:
                yield _argument("eps", f"eps is {eps:g} in place of {given:g}", node, place, eps)
        for user in node.users:
            if op_name(user) in ("sqrt", "rsqrt"):
                yield Mistake(
                    "eps", "eps is added outside of the root", {user: _of(lambda x: torch.sqrt(x - given) + given)}
                )
    elif name in ("mul", "div"):
        size = abs(given) or 1.0
        others = {1.0, -given, 1 / size, size**2, size**0.5, 2 * given, given / 2, math.log2(math.e), math.log(2)}
        for other in sorted(others - {given}):
            yield _argument("scale", f"a factor is {other:.6g} in place of {given:.6g}", node, place, other)


def numbers_in(written: WrittenOut) -> Iterator[tuple[Node, int, float]]:
    """Yield (op, place, number) of factors, and of numbers that are added."""
    for node in written.nodes:
        for place, given in enumerate(node.args):
            is_number = isinstance(given, (int, float)) and not isinstance(given, bool) and given
            if is_number and place < 2 and op_name(node) in ("mul", "div", "add", "sub"):
                yield node, place, float(given)


def with_number(node: Node, place: int, number: float) -> Mistake:
    """Return the mistake of another number."""
    given = float(node.args[place])  # type: ignore[arg-type]
    kind: MistakeKind = "scale" if op_name(node) in ("mul", "div") else "eps" if abs(given) < 0.01 else "bias missing"
    return _argument(kind, f"a number is {number:.6g} in place of {given:.6g}", node, place, number)


def _made(function: Callable[..., Any], *given: Any) -> Change:
    """Return the change to what a function makes of other arguments."""
    return lambda value, args, kwargs: function(*given)


def _of(function: Callable[..., Any]) -> Change:
    """Return the change to what a function makes of the arguments."""
    return lambda value, args, kwargs: function(*args, **kwargs)


def _then(function: Callable[[Any], Any]) -> Change:
    """Return the change to what a function makes of the result."""
    return lambda value, args, kwargs: function(value)


def _argument(kind: MistakeKind, text: str, node: Node, place: int, other: Any) -> Mistake:
    target: Any = node.target
    return Mistake(kind, text, {node: _of(lambda *a, **k: target(*a[:place], other, *a[place + 1 :], **k))})


def _replaced(node: Node, written: WrittenOut) -> Iterator[Mistake]:
    """Another op in its place."""
    name, value = op_name(node), written.values[node]
    is_activation = traits_of(node).kind == "activation" or name == "gelu"
    gate = _gate(node, written)
    if is_activation or gate is not None:
        given = written.given(node)[0][0] if gate is None else written.values[gate]
        for called, function in _ACTIVATIONS.items():
            text = f"{called} in place of {name if gate is None else 'silu'}"
            yield Mistake("activation", text, {node: _made(function, given)})
    for called, other in _OTHERS.get(name, {}).items():
        weight = 1 if name in ("add", "sub", "mul", "div") else 0
        kind: MistakeKind = "operation left out" if called == "nothing" else "operation replaced"
        text = f"{called} in place of {name}" if called != "nothing" else f"{name} is left out"
        yield Mistake(kind, text, {node: _of(other)}, weight=weight)
    if name in ("mean", "sum"):
        n = max(1, written.values[node.args[0]].numel() // max(1, value.numel()))  # type: ignore[index]
        other_name, factor = ("sum", n) if name == "mean" else ("mean", 1 / n)
        text = f"the {other_name} in place of the {name}"
        yield Mistake("statistics", text, {node: _then(lambda v: v * factor)})
        if name == "mean" and n > 1:
            by = n / (n - 1)
            yield Mistake("statistics", f"divided by n - 1, not by n = {n}", {node: _then(lambda v: v * by)})
    source = node.args[0] if name == "square" else None
    if isinstance(source, Node) and op_name(source) == "sub" and isinstance(source.args[0], Node):
        text = "the squares are taken before the mean is subtracted"
        yield Mistake("statistics", text, {node: _made(torch.square, written.values[source.args[0]])})
    if name == "where" and not isinstance(node.args[2], Node) and written.values[node.args[0]].dim():  # type: ignore[index]
        for by in (0.0, -1.0, -10.0):
            text = f"masked with {by:g} in place of {node.args[2]}"
            yield Mistake("mask", text, {node: _made(torch.where, *written.given(node)[0][:2], by)})


def _gate(node: Node, written: WrittenOut) -> Node | None:
    """Return x of x sigmoid(x)."""
    if op_name(node) != "mul" or len(node.args) < 2:
        return None
    for one, other in (node.args[:2], node.args[1::-1]):
        if isinstance(other, Node) and op_name(other) == "sigmoid" and other.args[0] is one and isinstance(one, Node):
            return one
    return None


def _operands(node: Node, written: WrittenOut) -> Iterator[Mistake]:
    """Operands exchanged, transposed, or taken from another place."""
    name = op_name(node)
    floats = [a for a in node.args if isinstance(a, Node) and isinstance(written.values[a], Tensor)]
    target: Any = node.target
    if len(floats) != 2 or name not in ("sub", "div", *_PRODUCTS):
        return
    if name not in _PRODUCTS or written.values[floats[0]].shape == written.values[floats[1]].shape:
        text = f"the operands of {name} are exchanged"
        yield Mistake("operands swapped", text, {node: _of(lambda a, b: target(b, a))})
    for place, operand in enumerate(floats) if name in _PRODUCTS else ():
        own = written.values[operand]
        if own.dim() > 1 and own.shape[-1] == own.shape[-2]:
            text = f"{_called(written, operand)} is transposed"
            yield Mistake("permuted", text, {node: _with(target, place, lambda t: t.mT)})


def _with(target: Any, place: int, change: Callable[[Tensor], Tensor]) -> Change:
    return _of(lambda *args, **kwargs: target(*(change(a) if i == place else a for i, a in enumerate(args)), **kwargs))


def _hiding(hidden: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda scores: scores.masked_fill(hidden, -math.inf)


def _masks(node: Node, value: Tensor, written: WrittenOut) -> Iterator[Mistake]:
    """Other masks where scores become probabilities."""
    is_score = op_name(node) in ("mul", "div", "where", "add") and value.dim() > 1 and value.is_floating_point()
    reads = [user for user in node.users if op_name(user) in ("amax", "sub")]
    if not is_score or not reads or value.shape[-1] < 4 or value.shape[-2] < 2:
        return
    rows, columns = torch.arange(value.shape[-2])[:, None], torch.arange(value.shape[-1])
    gap = rows - columns
    is_masked = op_name(node) == "where"
    shapes = {f"the mask is moved by {by}": gap >= -by for by in (1, -1, 2)} if is_masked else {"causal": gap >= 0}
    size, scores = value.shape[-1], written.given(node)[0][1] if is_masked else value
    for n in _tails(size):
        text = f"the last {n} of {size} are masked"
        yield Mistake("tail", text, {node: _then(_hiding(columns >= size - n))})
    shapes |= {"the other triangle is masked": gap <= 0}
    shapes |= {f"a window of {w} is masked": (gap >= 0) & (gap < w) for w in (2, 4, 8, 16, 32, 64, 128)}
    for text, seen in shapes.items():
        if not bool(seen.all()):
            yield Mistake("mask", text, {node: _made(_hiding(~seen), scores)})
    if is_masked:
        yield Mistake("mask", "the mask is left out", {node: _of(lambda *a: a[1])})
        yield Mistake("mask", "masked by zero", {node: _of(lambda *a: torch.where(a[0], a[1], 0.0))})


def _tails(size: int) -> list[int]:
    """Return numbers of elements beyond whole blocks, and a few small ones."""
    found = {size % block for block in _BLOCKS[3:]} | {1, 2, 3, size // 2}
    return sorted(n for n in found if 0 < n < size)


def _shortened(node: Node, written: WrittenOut) -> Iterator[Mistake]:
    """Sums that leave out the end, or that take more than there is."""
    name, first = op_name(node), node.args[0] if node.args else None
    if name not in ("sum", "mean", *_PRODUCTS) or not isinstance(first, Node):
        return
    x, dims = written.values[first], [-1] if name in _PRODUCTS else argument(node, "dim")
    dims = [dims] if isinstance(dims, int) else dims or list(range(x.dim()))
    if len(dims) != 1 or not x.dim():
        return
    size = x.shape[dims[0]]
    end = "terms of the product are left out" if name in _PRODUCTS else f"do not enter the {name}"
    for n in _tails(size):
        change = _with(node.target, 0, lambda t, n=n: _without_tail(t, dims[0], n))  # type: ignore[misc]
        yield Mistake("tail", f"the last {n} of {size} {end}", {node: change})


def _without_tail(tensor: Tensor, dim: int, number: int) -> Tensor:
    found = tensor.clone()
    found.narrow(dim, tensor.shape[dim] - number, number).zero_()
    return found


def _of_all_reductions(written: WrittenOut) -> Iterator[Mistake]:
    """All sums, means and maxima along another axis, or without the end."""
    nodes = [n for n in written.nodes if op_name(n) in _REDUCES and isinstance(n.args[0], Node)]
    nodes += [n for n in written.nodes if op_name(n) in ("cumsum", "cumprod", "sort", "flip")]
    if not nodes:
        return
    rank = written.values[nodes[0].args[0]].dim()
    for dim in range(rank):
        changes = {node: _along(node, dim) for node in nodes}
        yield Mistake("axis", f"along axis {dim}", changes)
        for node in nodes if len(nodes) > 1 else ():
            text = f"{op_name(node)} along axis {dim}"
            yield Mistake("axis", text, {node: changes[node]}, weight=1)
    for node in nodes:
        if op_name(node) in ("cumsum", "cumprod"):
            yield Mistake("permuted", f"{op_name(node)} runs backwards", {node: _backwards(node)})
    sums = [n for n in nodes if op_name(n) in ("sum", "mean")]
    dims = [argument(n, "dim") for n in sums]
    if sums and all(isinstance(d, (list, tuple)) and len(d) == 1 for d in dims):
        size = written.values[sums[0].args[0]].shape[dims[0][0]]
        for n in _tails(size):
            changes = {node: _first_only(node, n) for node in sums}
            yield Mistake("tail", f"the last {n} of {size} do not enter", changes)


def _backwards(node: Node) -> Change:
    target: Any = node.target
    dim = argument(node, "dim")
    return _of(lambda x, *args, **kwargs: target(x.flip(dim), *args, **kwargs).flip(dim))


def _first_only(node: Node, number: int) -> Change:
    (dim,), target = argument(node, "dim"), node.target
    return _with(target, 0, lambda x: x.narrow(dim, 0, x.shape[dim] - number))


def _along(node: Node, dim: int) -> Change:
    target: Any = node.target
    other = [dim] if isinstance(argument(node, "dim"), (list, tuple)) else dim
    if "dim" in node.kwargs or len(node.args) < 2:
        return _of(lambda *args, **kwargs: target(*args, **{**kwargs, "dim": other}))
    return _of(lambda x, _, *args, **kwargs: target(x, other, *args, **kwargs))


def _of_inputs(written: WrittenOut) -> Iterator[Mistake]:
    """Arguments that are ignored, exchanged, transposed, moved, cut off or rounded."""
    floats = [i for i, t in enumerate(written.inputs) if t.is_floating_point()]
    for i in floats:
        x = written.inputs[i]
        if len(written.inputs) > 1:
            yield Mistake("argument ignored", f"argument {i} is ignored (taken as 1)", inputs={i: torch.ones_like(x)})
            kind: MistakeKind = "bias missing" if x.dim() == 1 else "argument ignored"
            yield Mistake(kind, f"argument {i} is ignored (taken as 0)", inputs={i: torch.zeros_like(x)})
        yield Mistake("bias missing", f"1 is added to argument {i}", inputs={i: x + 1})
        for kind, text, other in _of_input(x, f"argument {i}"):
            yield Mistake(kind, text, inputs={i: other}, weight=0 if text.endswith("transposed") else 1)
    for i in range(len(written.inputs)):
        for j in range(i + 1, len(written.inputs)):
            a, b = written.inputs[i], written.inputs[j]
            if a.shape == b.shape and a.dtype == b.dtype:
                yield Mistake("operands swapped", f"arguments {i} and {j} are exchanged", inputs={i: b, j: a})
    for shape in {t.shape for t in written.inputs if t.dim()}:
        alike = [i for i in floats if written.inputs[i].shape == shape]
        for axis in range(len(shape)) if len(alike) > 1 else ():
            for by in (1, -1):
                text = f"arguments {', '.join(map(str, alike))} are moved by {by} along axis {axis}"
                yield Mistake("position", text, inputs={i: written.inputs[i].roll(by, axis) for i in alike})
    for i, t in enumerate(written.inputs):
        if not t.is_floating_point() and t.dtype is not torch.bool and t.dim():
            for by in (1, -1):
                yield Mistake("position", f"argument {i} is moved by {by}", inputs={i: t.roll(by, 0)})
    for name, dtype in _ROUNDED.items():
        every = {i: written.inputs[i].to(dtype).double() for i in floats}
        yield Mistake("precision", f"the inputs are rounded to {name}", inputs=every)
        for i in floats if len(floats) > 1 else ():
            yield Mistake("precision", f"argument {i} is rounded to {name}", inputs={i: every[i]}, weight=1)
    every = {i: _tf32(written.inputs[i]) for i in floats}
    yield Mistake("precision", "the inputs are rounded to tf32", inputs=every)


def _of_input(x: Tensor, called: str) -> Iterator[tuple[MistakeKind, str, Tensor]]:
    for factor in (-1.0, 2.0, 0.5):
        yield "scale", f"{called} is multiplied by {factor:g}", x * factor
    for axis, size in enumerate(x.shape):
        if size > 1:
            yield "permuted", f"{called} is reversed along axis {axis}", x.flip(axis)
        for n in _tails(size):
            text = f"the last {n} of {size} along axis {axis} of {called} are left out"
            yield "tail", text, _without_tail(x, axis, n)
        for by in (1, -1):
            text, shifted = f"{called} is moved by {by} along axis {axis}", x.roll(by, axis)
            yield "position", text, shifted.clone()
            shifted.narrow(axis, 0 if by > 0 else size - 1, 1).zero_()
            yield "position", f"{text}, with zeros", shifted
    if x.dim() > 1 and x.shape[-1] == x.shape[-2]:
        yield "permuted", f"{called} is transposed", x.mT
    if x.dim() > 3:
        yield "permuted", f"{called} is reversed along its last two axes", x.flip(-1, -2)


def _tf32(x: Tensor) -> Tensor:
    bits = x.float().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).double()


def _rounded(node: Node, written: WrittenOut) -> Iterator[Mistake]:
    """A result that is rounded on the way."""
    value = written.values[node]
    if not isinstance(value, Tensor) or not value.is_floating_point() or op_name(node) in ("view", "expand", "t"):
        return
    for name, dtype in _ROUNDED.items():
        text = f"the result of {op_name(node)} is rounded to {name}"
        yield Mistake("precision", text, {node: _made(lambda v, d: v.to(d).double(), value, dtype)}, weight=1)
