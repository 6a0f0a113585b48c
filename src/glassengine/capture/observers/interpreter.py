"""Runs a program node by node, observing any of them; or the programs of all ranks of one stage side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from glassengine import spans
from glassengine.errors import IncomparableError, UsageError
from glassengine.program.parallel.rewrite import is_collective, is_sum
from glassengine.program.representation.naming import of_any_layout
from glassengine.program.representation.program import Program

Observer = Callable[[Node, Any], None]
Graft = Callable[[Node, Any], Any]


class _Observing(torch.fx.Interpreter):
    def __init__(self, program: Program, observer: Observer | None, graft: Graft | None) -> None:
        super().__init__(program.exported.graph_module)
        self._graft = graft
        self._observer = observer
        self._sites = program.sites.by_node if spans.is_recording() else {}

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(of_any_layout(target), args, kwargs)

    def run_node(self, n: Node) -> Any:
        if n.name in self._sites:
            with spans.span("op", self._sites[n.name][0].name):
                value = super().run_node(n)
        else:
            value = super().run_node(n)
        if self._graft is not None and n.op == "call_function":
            value = self._graft(n, value)
        if self._observer is not None and n.op == "call_function":
            self._observer(n, value)
        return value


def run_program(
    program: Program,
    inputs: Mapping[str, torch.Tensor],
    observer: Observer | None = None,
    graft: Graft | None = None,
) -> dict[str, torch.Tensor]:
    """Interpret one step; inputs are not changed, updated caches come back as `present_*`.

    Args:
        program: The program, with weights.
        inputs: Tensors by input name.
        observer: Called with (node, value) after each computed node; must not change the value.
        graft: Called with (node, value) before that; returns the value that the program goes on with.
    """
    missing = [port.name for port in program.inputs if port.name not in inputs]
    if missing:
        raise UsageError("inputs are missing", got=", ".join(inputs), expected=", ".join(missing))
    by_node = {port.node: inputs[port.name] for port in program.inputs} | program.weights()
    placeholders = [n.name for n in program.graph.nodes if n.op == "placeholder"]
    specs: Any = program.exported.graph_signature.output_specs
    with torch.no_grad():
        results = _Observing(program, observer, graft).run(
            *(by_node.get(name) for name in placeholders), enable_io_processing=False
        )
    by_output = {spec.arg.name: value for spec, value in zip(specs, results, strict=True)}
    return {name: by_output[node] for name, node in program.output_nodes.items()}


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda values: values.sum(0),
    "avg": lambda values: values.sum(0) / len(values),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
    "product": lambda values: values.prod(0),
}
RankObserver = Callable[[int, Node, Any], None]
_Step = Iterator[Any]


def run_ranks(
    programs: Sequence[Program], inputs: Sequence[Mapping[str, torch.Tensor]], observer: RankObserver | None = None
) -> list[dict[str, torch.Tensor]]:
    """Interpret one step on every rank; return the outputs of each by name.

    Args:
        programs: Of the ranks of one stage.
        inputs: Of each, by input name; not changed.
        observer: Called with (rank, node, value) after each computed node; must not change the value.
    """
    found: list[dict[str, torch.Tensor]] = [{} for _ in programs]
    runs = [_run(*each, observer) for each in zip(range(len(programs)), programs, inputs, found, strict=True)]
    with torch.no_grad():
        calls = [next(run, None) for run in runs]
        while any(call is not None for call in calls):
            answers = _meet(calls)
            calls = [_sent(run, answer) for run, answer in zip(runs, answers, strict=True)]
    return found


def _sent(run: Any, answer: torch.Tensor) -> Any:
    try:
        return run.send(answer)
    except StopIteration:
        return None


def _meet(calls: Sequence[Any]) -> list[torch.Tensor]:
    met = [None if call is None else (call[0].target, call[1].shape, call[1].dtype) for call in calls]
    odd = next((rank for rank, one in enumerate(met) if one != met[0]), None)
    if odd is not None:
        raise IncomparableError(
            "ranks call collectives in another order, and would wait for ever",
            got=f"rank {odd}: {_spelled(calls[odd])}",
            expected=f"rank 0: {_spelled(calls[0])}",
            hint="the programs of all ranks must meet in the same collectives, with tensors of the same shape",
        )
    values = [call[1] for call in calls]
    if is_sum(calls[0][0]):
        together, how = torch.stack(values), {call[0].args[1] for call in calls}
        if len(how) > 1 or not how <= _REDUCTIONS.keys():
            raise IncomparableError(
                "ranks reduce in another way",
                got=", ".join(sorted(how)),
                expected=f"the same on all ranks: {', '.join(_REDUCTIONS)}",
            )
        total = _REDUCTIONS[how.pop()](together)
        return [total.clone() for _ in values]
    rows = torch.cat(values)
    return [rows.clone() for _ in values]


def _spelled(call: Any) -> str:
    return "none" if call is None else f"{call[0].name} of {list(call[1].shape)}"


def _run(
    rank: int,
    program: Program,
    inputs: Mapping[str, torch.Tensor],
    observed: dict[str, torch.Tensor],
    observer: RankObserver | None,
) -> Any:
    given = {port.node: inputs[port.name] for port in program.inputs} | program.weights()
    last = {item: node for node in program.graph.nodes for item in node.all_input_nodes}
    gone: dict[Node, list[Node]] = {}
    for item, node in last.items():
        gone.setdefault(node, []).append(item)
    values: dict[Node, Any] = {}
    specs = program.exported.graph_signature.output_specs
    for node in program.graph.nodes:
        if node.op == "placeholder":
            values[node] = given.get(node.name)
        elif node.op == "call_function":
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if is_collective(node):
                value = yield node, args[0]
            elif "wait_tensor" in str(node.target):
                value = args[0]
            else:
                value = of_any_layout(node.target)(*args, **kwargs)
            values[node] = value
            if observer is not None:
                observer(rank, node, value)
        else:
            by_output = {spec.arg.name: values[item] for spec, item in zip(specs, node.args[0], strict=True)}
            observed.update({name: by_output[own] for name, own in program.output_nodes.items()})
        for item in gone.get(node, ()):
            del values[item]
