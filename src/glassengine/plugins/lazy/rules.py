"""Rules for each operation: how a call of it is recorded, and what it returns, inferred without computing it."""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from glassengine.frontends.eager_graph import Place, examine, silent
from glassengine.ops.traits import traits_of_target
from glassengine.plugins.lazy.values import NUMBER_DTYPES, LazyCall, LazyOperation, LazySpec, spec_of

aten = torch.ops.aten


class CallKind(enum.Enum):
    """What becomes of a call."""

    COMPUTE = "it is recorded"
    RESHAPE = "it is recorded as a view, which takes the place of its first argument"
    VIEW = "it is recorded, and shares the memory of its first argument"
    WRITE = "its functional twin is recorded, and the argument written to holds the result from then on"
    COPY = "the argument written to holds the other one from then on"
    DRAW = "its random numbers are drawn at once, in the order of the user's code, and are an input of the graph"
    NORMALIZE = "it is recorded; in training its functional twin, whose statistics are held from then on"
    NUMBER = "the graph of its argument runs, and it returns a number"
    ATEN = "the graphs of its arguments run, and ATen computes it at once"


@dataclass(frozen=True)
class CallRule:
    """What becomes of calls of one operation.

    Attributes:
        target: The operation.
        kind: What becomes of a call.
        numeric: Names and positions of arguments in which a number is a value, and no choice such as a dimension.
        twin: Of WRITE: what computes the result.
        written: Of WRITE and COPY: name and position of the argument that is written to.
        indices: Name and position of indices that give the result a shape that depends on values if one is a mask.
        dropout: Name and position of the probability without which a call has nothing random about it.
        reason: Of ATEN: why.
    """

    target: OpOverload
    kind: CallKind
    numeric: frozenset[Place]
    twin: OpOverload | None = None
    written: tuple[str, int] | None = None
    indices: tuple[str, int] | None = None
    dropout: tuple[str, int] | None = None
    reason: str = ""


_DRAWS = frozenset({
    "bernoulli.p", "bernoulli_.float", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_",
    "rand_like", "randint_like", "randn_like", "uniform_",
})  # fmt: skip
"""Random operations that read nothing of their argument but its kind."""

_SHARING = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}
"""Operations whose results share memory with their argument, which their schema leaves out: the view each is."""

_READ_AS = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}
"""Views that hold the same numbers conjugated or negated, by a flag of the tensor: what reads them without a flag."""

_NO_DRAWS = frozenset({"normal.Tensor_float", "normal.float_Tensor", "normal.Tensor_Tensor", "bernoulli_.Tensor"})


@functools.cache
def rule_of(target: OpOverload) -> CallRule:
    """Return the rule for an operation."""
    target = _SHARING.get(target, target)
    schema = examine(target)
    packet = target._overloadpacket.__name__
    name = f"{packet}.{target._overloadname}"

    def rule(kind: CallKind, **facts: object) -> CallRule:
        facts = {"indices": schema.indices, "dropout": schema.dropout} | facts
        return CallRule(target, kind, schema.numeric, **facts)  # type: ignore[arg-type]

    if target is aten._local_scalar_dense.default:
        return rule(CallKind.NUMBER)
    if target is aten.copy_.default:
        return rule(CallKind.COPY, written=("self", 0))
    if packet == "multilabel_margin_loss_forward":
        return rule(CallKind.ATEN, reason="torch foresees another shape of its result than it has")
    if target is aten.native_batch_norm.default:
        return rule(CallKind.NORMALIZE)
    if target is aten.mkldnn_rnn_layer.default:
        return rule(CallKind.ATEN, reason="its result depends on whether gradients are wanted")
    if target in _READ_AS:
        return CallRule(_READ_AS[target], CallKind.VIEW, schema.numeric)
    if torch.Tag.nondeterministic_seeded in target.tags and schema.dropout is None:
        if name not in _NO_DRAWS and (packet in _DRAWS or name in _DRAWS):
            return rule(CallKind.DRAW)
        return rule(CallKind.ATEN, reason="what it draws depends on values")
    if target.namespace not in ("aten", "prims"):
        functional = not target._schema.is_mutable and target.namespace not in ("profiler", "c10d", "_c10d_functional")
        return rule(CallKind.COMPUTE if functional else CallKind.ATEN, reason="it is no operation of ATen")
    if torch.Tag.inplace_view in target.tags and (twin := _twin(target, of_view=True)) is not None:
        return rule(CallKind.RESHAPE, twin=twin)
    if torch.Tag.inplace_view in target.tags or packet in ("resize_", "set_", "set", "resize_as_"):
        return rule(CallKind.ATEN, reason="it gives an argument another shape")
    if target.is_view:
        return rule(CallKind.VIEW)
    if not target._schema.returns:
        return rule(CallKind.ATEN, reason="it returns nothing")
    if target._schema.is_mutable:
        twin = _twin(target)
        place = next(
            (
                (argument.name, index)
                for index, argument in enumerate(target._schema.arguments)
                if _is_written(argument)
            ),
            None,
        )
        if twin is None or place is None:
            return rule(
                CallKind.ATEN, reason="it writes to its arguments, and there is no such operation that does not"
            )
        return rule(CallKind.WRITE, twin=twin, written=place)
    if schema.obstacle or traits_of_target(target).is_unwritten:
        return rule(CallKind.ATEN if schema.obstacle else CallKind.COMPUTE, reason=schema.obstacle)
    return rule(CallKind.COMPUTE)


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _twin(target: OpOverload, *, of_view: bool = False) -> OpOverload | None:
    """Return the operation that returns what `target` makes of its only written argument; a view where one is asked."""
    arguments = target._schema.arguments
    written = [argument for argument in arguments if _is_written(argument)]
    if len(written) != 1:
        return None
    packet: Any = target._overloadpacket
    name = packet.__name__
    if written[0].kwarg_only:  # out=
        wanted = [(argument.name, str(argument.type)) for argument in arguments if argument is not written[0]]
    elif name.endswith("_") and not name.endswith("__"):
        packet = getattr(getattr(torch.ops, target.namespace), name[:-1], None)
        wanted = [(argument.name, str(argument.type)) for argument in arguments]
    else:
        return None
    for overload in packet.overloads() if packet is not None else ():
        candidate: OpOverload = getattr(packet, overload)
        given = [(argument.name, str(argument.type)) for argument in candidate._schema.arguments]
        if given == wanted and not candidate._schema.is_mutable and candidate.is_view == of_view:
            return candidate
    return None


_lock = threading.RLock()
"""Of the mode, in which tensors change their device while an operation runs: threads wait for each other."""


class NotRecordableError(Exception):
    """What a call returns depends on values, or is nothing that a graph can hold, or the arguments do not fit."""


def infer_outputs(
    target: OpOverload,
    kinds: Sequence[LazySpec],
    numbers: Sequence[float],
    template: tuple[tuple[Any, ...], Mapping[str, Any]],
) -> LazyOperation:
    """Return the kind of a call.

    Args:
        target: What is called.
        kinds: Of the tensors it reads.
        numbers: Those among its arguments; results are of one kind for all numbers of the same types.
        template: Its arguments with places for both.

    Raises:
        NotRecordableError: There is none.
    """
    args, kwargs = template
    operation = LazyOperation(target, args, kwargs, (), is_list=False, is_tuple=False)
    try:
        with _lock, silent(), _disable_current_modes(), torch._C._DisableAutocast(), torch.no_grad(), _mode():
            fakes = [_fake(kind) for kind in kinds]
            outcome = target(*(made := operation.arguments(fakes.__getitem__, numbers.__getitem__))[0], **made[1])
            several = isinstance(outcome, (list, tuple))
            results = tuple(map(_kind, outcome if several else (outcome,)))
    except NotRecordableError:
        raise
    except Exception as error:
        raise NotRecordableError(f"{type(error).__name__}: {error}".partition("\n")[0]) from error
    operation.results = results
    operation.is_list = isinstance(outcome, list)
    operation.is_tuple = isinstance(outcome, tuple)
    return operation


def takes_any_number(call: LazyCall, decompositions: Mapping[Any, Callable[..., Any]]) -> bool:
    """Return whether a call can be decomposed without knowing its numbers."""
    operation = call.operation

    def compute(*given: torch.Tensor) -> Any:
        tensors, numbers = given[: len(call.reads)], given[len(call.reads) :]
        items = [torch.ops.aten._local_scalar_dense.default(number) for number in numbers]
        args, kwargs = operation.arguments(tensors.__getitem__, items.__getitem__)
        return operation.target(*args, **kwargs)

    mode = FakeTensorMode(shape_env=ShapeEnv())
    with _disable_current_modes(), torch.no_grad():
        tensors = [value.spec.flat.empty() for value in call.reads]
        tensors += [torch.tensor(number, dtype=NUMBER_DTYPES[type(number)]) for number in call.numbers]
        try:
            with silent(), mode:
                fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]
                make_fx(compute, dict(decompositions))(*fakes)
        except Exception:  # whatever it is, the number is a constant then, which is always right
            return False
    return True


def _kind(result: Any) -> LazySpec | None:
    if result is None:
        return None
    if not isinstance(result, torch.Tensor):
        raise NotRecordableError("its result is a plain value")
    if result.layout is not torch.strided or result.is_quantized or result.is_conj() or result.is_neg():
        raise NotRecordableError("its result is no plain tensor")
    if result.is_meta:
        raise NotRecordableError("its result has no values")
    return spec_of(result)


@functools.cache
def _mode() -> FakeTensorMode:
    return FakeTensorMode()


@functools.lru_cache(1024)
def _fake(kind: LazySpec) -> torch.Tensor:
    """Return a tensor of a kind without data; called within the mode."""
    if not kind.offset:
        return kind.empty()
    size = kind.offset + 1 + sum((size - 1) * step for size, step in zip(kind.shape, kind.stride, strict=True))
    memory = torch.empty(max(size, 0), dtype=kind.dtype, device=kind.device)
    return memory.as_strided(kind.shape, kind.stride, kind.offset)
