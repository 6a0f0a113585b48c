"""The rules of functionalization, applied to the nodes of a traced graph: which ops stay, and which become others."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch._export.utils import _is_cia_op, _is_preservable_cia_op
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Min

aten = torch.ops.aten

_VIEWS = frozenset(
    {
        aten.alias.default,
        aten.detach.default,
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
        aten.view_as_complex.default,
        aten.view_as_real.default,
    }
)
_PARTS = frozenset({aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int})
_COMPOSED = frozenset(
    {aten.narrow.default, aten.expand_as.default, aten.mT.default, aten.numpy_T.default}
    | {aten.real.default, aten.imag.default}
)
_TURNED = frozenset({aten.alias.default, aten.detach.default, aten.t.default, aten.transpose.int})
"""Views that turn themselves back."""
_SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
"""View -> op that puts it back."""
_CONVERSIONS = frozenset({aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.contiguous.default})
_NUMBERS = frozenset({operator.add, operator.sub, operator.mul, operator.floordiv, operator.neg, aten.sym_size.int})
_LOGIC = {"__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor"}

_COPIED = ("nn_module_stack", "stack_trace", "torch_fn", "original_aten", "seq_nr", "custom")


class NoRule(Exception):
    """The graph holds something that has no rule here."""


@dataclass
class _Storage:
    """Memory that tensors share: its newest value, and how often it was written."""

    base: Node
    written: int = 0


@dataclass
class _Tensor:
    """A tensor of the traced graph: its newest value, and the views that lead to it from the memory it is in."""

    value: Node
    storage: _Storage
    views: tuple[_View, ...] = ()
    seen: int = 0  # of `storage.written`


@dataclass(frozen=True)
class _View:
    target: Any
    args: tuple[Any, ...]  # after the tensor, sizes as nodes of the new graph
    kwargs: Mapping[str, Any]
    part: int | None = None


@dataclass
class Rewriter:
    """One rewriting of the graph of `source`."""

    source: ExportedProgram
    graph: Graph = field(default_factory=Graph)
    tensors: dict[Node, Any] = field(default_factory=dict)
    """Node of the trace -> tensor, tensors of an op with several results, or node of a number."""
    inputs: dict[Node, _Tensor] = field(default_factory=dict)

    def run(self) -> tuple[Graph, list[OutputSpec]]:
        """Return the functional graph and what it returns.

        Raises:
            Unknown: The graph holds something that has no rule here.
        """
        for node in self.source.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "call_function":
                self.tensors[node] = self._call(node)
            elif node.op != "output":
                raise NoRule(node.op)
        return self._finished()

    def _placeholder(self, node: Node) -> None:
        new = self.graph.placeholder(node.name)
        new.name = node.name
        new.meta = copy.copy(node.meta)
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            if type(value) is not FakeTensor:
                raise NoRule(type(value).__name__)
            self.inputs[node] = self.tensors[node] = _Tensor(new, _Storage(new))
        else:
            self.tensors[node] = new

    def _call(self, node: Node) -> Any:
        target = node.target
        if target in _NUMBERS:
            if not isinstance(node.meta.get("val"), (int, torch.SymInt)):
                raise NoRule(str(target))
            return self._emit(node, target, self._args(node.args), self._args(node.kwargs), val=node.meta["val"])
        if target is operator.getitem:
            source, index = node.args
            return self.tensors[source][index]  # type: ignore[index]
        if not isinstance(target, torch._ops.OpOverload) or node.meta.get("unbacked_bindings"):
            raise NoRule(str(target))
        for tensor in self._tensors_of(node):
            self._renew(tensor, node)
        if target in _VIEWS:
            return self._view(node, target, node.args[1:], node.kwargs)
        if target in _COMPOSED:
            return self._composed(node)
        if target is aten.unsqueeze_.default:
            return self._changed_to(node, self._view(node, aten.unsqueeze.default, node.args[1:], node.kwargs))
        if target in _PARTS or target is aten.chunk.default:
            return self._parts(node)
        if target in _CONVERSIONS or target is aten.reshape.default or target is aten.flatten.using_ints:
            return self._perhaps_itself(node)
        if target is aten.dropout.default:
            return self._dropout(node)
        if target is aten.lift_fresh_copy.default:
            return self._copied(node, aten.clone.default, {})
        if target is aten.detach_.default:
            return self._first(node)
        if target is aten.batch_norm.default:
            return self._batch_norm(node)
        if target._schema.is_mutable:
            return self._in_place(node)
        if _stays(target):
            return self._fresh(node, target, self._args(node.args), self._args(node.kwargs), node.meta.get("val"))
        raise NoRule(str(target))

    # ---- nodes of the new graph

    def _emit(self, origin: Node, target: Any, args: Any, kwargs: Any, *, val: Any) -> Node:
        new = self.graph.call_function(target, *_normal(target, tuple(args), dict(kwargs)))
        new.meta = {key: origin.meta[key] for key in _COPIED if key in origin.meta}
        new.meta["val"] = val
        return new

    def _computed(self, origin: Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Node:
        """Emit an op that the trace did not have, and find what it returns."""
        given = map_arg((args, dict(kwargs)), lambda node: node.meta["val"])
        mode = next((v.fake_mode for v in pytree.tree_leaves(given) if isinstance(v, FakeTensor)), None)
        try:
            with mode or nullcontext():
                val = target(*given[0], **given[1])
        except (RuntimeError, ValueError) as error:  # a view of memory that is laid out otherwise since it was written
            raise NoRule(f"{target}: {error}") from error
        return self._emit(origin, target, args, kwargs, val=val)

    def _args(self, args: Any) -> Any:
        return map_arg(args, self._value)

    def _value(self, node: Node) -> Node:
        found = self.tensors[node]
        if isinstance(found, _Tensor):
            return found.value
        if isinstance(found, Node):
            return found
        raise NoRule("an op that takes several results at once")

    def _tensors_of(self, node: Node) -> Iterator[_Tensor]:
        for argument in node.all_input_nodes:
            found = self.tensors[argument]
            if isinstance(found, _Tensor):
                yield found

    def _renew(self, tensor: _Tensor, user: Node, *, is_written: bool = False) -> None:
        """Take the views of a tensor again whose memory was written since; `user` writes to it, or reads it."""
        if tensor.seen == tensor.storage.written:
            return
        line = {} if is_written else {"stack_trace": tensor.value.meta.get("stack_trace", "")}  # that of the first time
        value = tensor.storage.base
        for view in tensor.views:
            value = self._taken(user, view, value, line)
        tensor.value, tensor.seen = value, tensor.storage.written

    def _taken(self, origin: Node, view: _View, value: Node, meta: Mapping[str, Any] | None = None) -> Node:
        """Return a view of a value, for an op of the trace; `meta` takes the place of what that op has."""
        value = self._computed(origin, view.target, (value, *view.args), view.kwargs)
        value.meta |= meta or {}
        if view.part is not None:
            value = self._item(origin, value, view.part)
            value.meta |= meta or {}
        return value

    def _item(self, origin: Node, source: Node, index: int) -> Node:
        return self._emit(origin, operator.getitem, (source, index), {}, val=source.meta["val"][index])

    # ---- kinds of ops

    def _fresh(self, node: Node, target: Any, args: Any, kwargs: Any, val: Any) -> Any:
        new = self._emit(node, target, args, kwargs, val=val)
        if isinstance(val, (tuple, list)):
            items = [self._item(node, new, index) for index in range(len(val))]
            return [_Tensor(item, _Storage(item)) for item in items]
        return _Tensor(new, _Storage(new))

    def _view(self, node: Node, target: Any, rest: Any, kwargs: Any, *, is_new: bool = False) -> _Tensor:
        base = self._first(node)
        args = tuple(rest) if is_new else self._args(tuple(rest))
        view = _View(target, args, self._args(dict(kwargs)))
        if _is_simple(node.meta["val"]):
            value = self._emit(node, target, (base.value, *view.args), view.kwargs, val=node.meta["val"])
        else:
            value = self._computed(node, target, (base.value, *view.args), view.kwargs)
        return _Tensor(value, base.storage, (*base.views, view))

    def _changed_to(self, node: Node, view: _Tensor) -> _Tensor:
        """Let a tensor be a view of itself from now on."""
        tensor = self._first(node)
        tensor.value, tensor.views = view.value, view.views
        return tensor

    def _parts(self, node: Node) -> list[_Tensor]:
        base, target, rest = self._first(node), node.target, node.args[1:]
        if target is aten.chunk.default:
            # Its parts are as long as the first one, but the last.
            dim = int(rest[1]) if len(rest) > 1 else 0  # type: ignore[arg-type]
            length = node.meta["val"][0].shape[dim]
            if not isinstance(length, int) or not base.value.meta["val"].shape[dim]:
                raise NoRule("a chunk of a dynamic size")
            target, rest = aten.split.Tensor, (length, *rest[1:])
        args, kwargs = self._args(tuple(rest)), self._args(dict(node.kwargs))
        new = self._emit(node, target, (base.value, *args), kwargs, val=node.meta["val"])
        views = [_View(target, args, kwargs, part=index) for index in range(len(node.meta["val"]))]
        return [
            _Tensor(self._item(node, new, index), base.storage, (*base.views, view)) for index, view in enumerate(views)
        ]

    def _perhaps_itself(self, node: Node) -> _Tensor:
        base, target = self._first(node), node.target
        source, result = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        is_view = source.untyped_storage()._cdata == result.untyped_storage()._cdata
        if target in _CONVERSIONS:
            if is_view:
                return base
            if target is aten.contiguous.default:
                wanted = {"memory_format": node.kwargs.get("memory_format", torch.contiguous_format)}
                return self._copied(node, aten.clone.default, wanted)
            wanted = _conversion(node)
            if (source.dtype, source.device) == (result.dtype, result.device) and not wanted.get("copy"):
                if base.value.op == "placeholder":  # a constant, of which the trace has another fake
                    return base
                raise NoRule("a conversion to what a tensor is already")
            return self._copied(node, aten._to_copy.default, {k: v for k, v in wanted.items() if k != "copy"})
        if is_view and is_contiguous_or_false(source) and target is aten.reshape.default:
            return self._view(node, aten.view.default, node.args[1:], {})
        size: Any = [-1] * result.dim() if target is aten.flatten.using_ints else self._args(node.args[1])
        size = [found if given == -1 else given for given, found in zip(size, result.shape, strict=True)]
        if not all(isinstance(length, (int, Node)) for length in size):
            raise NoRule("a reshape to a dynamic size that it finds")
        if is_view:
            return self._view(node, aten.view.default, (size,), {}, is_new=True)
        if is_contiguous_or_false(source):
            raise NoRule("a reshape that copies what is contiguous")
        cloned = self._computed(node, aten.clone.default, (base.value,), {"memory_format": torch.contiguous_format})
        value = self._emit(node, aten._unsafe_view.default, (cloned, size), {}, val=result)
        return _Tensor(value, _Storage(value))

    def _copied(self, node: Node, target: Any, kwargs: Mapping[str, Any]) -> _Tensor:
        value = self._emit(node, target, (self._first(node).value,), kwargs, val=node.meta["val"])
        return _Tensor(value, _Storage(value))

    def _dropout(self, node: Node) -> _Tensor:
        if node.args[2] is not False:
            raise NoRule("a dropout in training")
        value = self._computed(node, aten.clone.default, (self._first(node).value,), {})
        return _Tensor(value, _Storage(value))

    def _batch_norm(self, node: Node) -> _Tensor:
        source, weight, bias, mean, variance, training, momentum, eps, _ = node.args
        if training is not False or mean is None or variance is None:
            raise NoRule("a batch norm in training")
        args = self._args((source, weight, bias, mean, variance, momentum, eps))
        new = self._computed(node, aten._native_batch_norm_legit_no_training.default, args, {})
        first = self._item(node, new, 0)
        return _Tensor(first, _Storage(first))

    def _composed(self, node: Node) -> _Tensor:
        """Take views as those that they are made of."""
        target, result, rest = node.target, node.meta["val"], node.args[1:]
        if target is aten.narrow.default:
            dim, start, length = rest
            if not (isinstance(start, int) and isinstance(length, int) and start >= 0):
                raise NoRule(f"{target} of a dynamic size")
            return self._view(node, aten.slice.Tensor, (dim, start, start + length), {}, is_new=True)
        if target is aten.expand_as.default:
            if not all(isinstance(length, int) for length in result.shape):
                raise NoRule(f"{target} of a dynamic size")
            return self._view(node, aten.expand.default, (list(result.shape),), {}, is_new=True)
        if target is aten.numpy_T.default:
            return self._view(node, aten.permute.default, (list(range(result.dim()))[::-1],), {}, is_new=True)
        if target is aten.mT.default:
            return self._view(node, aten.transpose.int, (-2, -1), {}, is_new=True)
        if not self._first(node).value.meta["val"].is_complex():
            raise NoRule(f"{target} of real numbers")
        pairs = _View(aten.view_as_real.default, (), {})
        part = _View(aten.select.int, (result.dim(), int(target is aten.imag.default)), {})
        base = self._first(node)
        value = self._taken(node, part, self._taken(node, pairs, base.value))
        return _Tensor(value, base.storage, (*base.views, pairs, part), base.storage.written)

    def _in_place(self, node: Node) -> _Tensor:
        target: Any = node.target
        packet = target._schema.name.removeprefix("aten::")
        functional = getattr(aten, _LOGIC.get(packet, packet.rstrip("_")), None)
        twin = getattr(functional, target._overloadname, None)
        written = [argument for argument in target._schema.arguments if argument.is_write]
        tensor, is_random = self._first(node), torch.Tag.nondeterministic_seeded in target.tags
        is_known = target.namespace == "aten" and twin is not None and _stays(twin) and not is_random
        if not is_known or len(written) != 1 or target._schema.arguments[0] != written[0]:
            raise NoRule(str(target))
        before = tensor.value.meta["val"]
        made = self._computed(node, twin, self._args(node.args), self._args(node.kwargs))
        if (made.meta["val"].dtype, made.meta["val"].shape) != (before.dtype, before.shape):
            raise NoRule(f"{target} changes the kind of its tensor")
        above = [tensor.storage.base]
        for view in tensor.views[:-1]:
            above.append(self._taken(node, view, above[-1]))
        for view, whole in zip(reversed(tensor.views), reversed(above), strict=False):
            made = self._put_back(node, view, whole, made)
        if str(made.meta["val"].stride()) != str(tensor.storage.base.meta["val"].stride()):
            raise NoRule(f"{target} lays its memory out otherwise")  # what reads it later does so as in the trace
        tensor.storage.base = made
        tensor.storage.written += 1
        if not tensor.views:
            tensor.value, tensor.seen = made, tensor.storage.written
        self._renew(tensor, node, is_written=True)
        return tensor

    def _put_back(self, node: Node, view: _View, whole: Node, part: Node) -> Node:
        """Return a tensor in which a view of it is another one."""
        rest, sizes = view.args, list(whole.meta["val"].shape)
        if view.target in _TURNED:
            return self._computed(node, view.target, (part, *rest), view.kwargs)
        if view.target in _SCATTERS and view.part is None:
            return self._computed(node, _SCATTERS[view.target], (whole, part, *rest), view.kwargs)
        if view.part is not None and not view.kwargs:
            dim = int(rest[-1] if len(rest) > (view.target is not aten.unbind.int) else 0) % len(sizes)
            if view.target is aten.unbind.int:
                return self._computed(node, aten.select_scatter.default, (whole, part, dim, view.part), {})
            lengths = rest[0] if isinstance(rest[0], (list, tuple)) else [rest[0]] * (view.part + 1)
            if isinstance(sizes[dim], int) and all(isinstance(length, int) for length in lengths):
                start = sum(lengths[: view.part])
                end = min(start + lengths[view.part], sizes[dim])
                return self._computed(node, aten.slice_scatter.default, (whole, part, dim, start, end), {})
        if view.target is aten.unsqueeze.default:
            return self._computed(node, aten.squeeze.dim, (part, *rest), view.kwargs)
        if view.target is aten.squeeze.dim and isinstance(sizes[rest[0]], int) and sizes[rest[0]] == 1:
            return self._computed(node, aten.unsqueeze.default, (part, rest[0] % len(sizes)), {})
        if view.target is aten.view.default and all(isinstance(size, int) for size in sizes):
            return self._computed(node, aten.view.default, (part, sizes), {})
        if view.target is aten.permute.default:
            order = [dim % len(sizes) for dim in rest[0]]
            back = [order.index(dim) for dim in range(len(order))]
            return self._computed(node, aten.permute.default, (part, back), {})
        raise NoRule(f"a write through {view.target}")

    def _first(self, node: Node) -> _Tensor:
        found = self.tensors[node.args[0]]  # type: ignore[index]
        if not isinstance(found, _Tensor):
            raise NoRule(f"{node.target} of a non-tensor")
        return found

    # ---- the end

    def _finished(self) -> tuple[Graph, list[OutputSpec]]:
        specs = self.source.graph_signature
        kinds = {spec.arg.name: spec for spec in specs.input_specs}
        changed = []
        for node, tensor in self.inputs.items():
            if tensor.storage.written:
                if kinds[node.name].kind is not InputKind.USER_INPUT:
                    raise NoRule("a buffer that is changed")
                changed.append((OutputKind.USER_INPUT_MUTATION, tensor.storage.base, node.name))
        given = self.source.graph.output_node().args[0]
        results: list[Any] = []
        for spec, result in zip(specs.output_specs, given, strict=True):
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise NoRule(str(spec.kind))
            if not isinstance(result, Node):
                results.append(result)
                continue
            tensor = self.tensors[result]
            if not isinstance(tensor, _Tensor) or tensor.seen != tensor.storage.written:
                raise NoRule("a result that is not a tensor, or is written to")
            if any(tensor.storage is held.storage for held in self.inputs.values()):
                raise NoRule("a result that is an input")
            results.append(tensor.value)
        self.graph.output((*(value for _, value, _ in changed), *results))
        self.graph.output_node().meta = copy.copy(self.source.graph.output_node().meta)
        self.graph.eliminate_dead_code()
        output_specs = [OutputSpec(kind, TensorArgument(value.name), name) for kind, value, name in changed]
        for spec, result in zip(specs.output_specs, results, strict=True):
            arg = TensorArgument(result.name) if isinstance(result, Node) else spec.arg
            output_specs.append(OutputSpec(spec.kind, arg, spec.target))
        return self.graph, output_specs


def _is_simple(value: torch.Tensor) -> bool:
    """Whether the trace found the strides of a view; it leaves bounds in them that are known to hold."""
    return not any(isinstance(s, torch.SymInt) and s.node.expr.has(sympy.Min, Min) for s in value.stride())


def _conversion(node: Node) -> dict[str, Any]:
    """Return what `_to_copy` is given for a call of `to`, and whether a copy was asked for."""
    schema: Any = node.target._schema  # type: ignore[union-attr]
    given = {argument.name: value for argument, value in zip(schema.arguments, node.args, strict=False)} | node.kwargs
    names = ("dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format", "copy")
    return {name: given[name] for name in names if given.get(name) not in (None, False)}


def _normal(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
def _stays(target: Any) -> bool:
    """Whether an op is the same in a functional graph: it neither writes nor returns what it was given."""
    schema = target._schema
    is_resized = target._overloadname == "vec" and "upsample" in schema.name
    if schema.name == "glass::mark" or target is aten._assert_tensor_metadata.default or is_resized:
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
