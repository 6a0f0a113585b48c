"""Observe what runs: an eager module by hooks and taps, a program node by node, the ranks of a stage side by side."""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg

from glassengine import spans
from glassengine.capture.observed_call import ObservedCall, out_of_reach
from glassengine.errors import IncomparableError, UsageError
from glassengine.program import load_model, made_up_inputs
from glassengine.program.kinds.causal_lm import is_pretrained
from glassengine.program.parallel.rewrite import is_collective, is_sum
from glassengine.program.representation.naming import of_any_layout
from glassengine.program.representation.program import Program
from glassengine.sites import ROOT, HasSites, port_leaves, port_site, tap_site, with_call
from glassengine.taps import tap, tap_sink

T = TypeVar("T")
Observe = Callable[[str, torch.Tensor], None]


@contextlib.contextmanager
def observing(module: nn.Module, observe: Observe, *, called_as: Mapping[str, str] | None = None) -> Iterator[None]:
    """Call `observe(site, tensor)` for every module output and tap of each forward of `module`, in execution order.

    The tensors are live: a later in-place op changes them, so an observer that keeps one must copy it. Call counts
    restart whenever `module` itself is entered; what runs outside of it (a submodule called by itself, activations
    computed again in a backward) is not observed.

    Args:
        module: Any module.
        observe: The observer.
        called_as: `Program.called_as`, where the names are to be those of a program. Hooks know a module with several
            aliases by its first one only.

    Raises:
        UsageError: A tap has the name of a submodule, or its name is used twice in one call of its module.
    """
    with _Calls(module, called_as or {}).listening(observe, observe):
        yield


def named_network_outputs(target: nn.Module | HasSites, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Iterate over (`<module path>.<name>`, value) of every tap (row A2).

    Args:
        target: A program or an engine, whose sites are given; or a module, which is run once on the other arguments,
            or on made-up ones where it needs some and has none, and whose tap values (copies) are given.
        *args: Arguments of the module.
        **kwargs: Keyword arguments of the module.

    Raises:
        UsageError: A tap has the name of a submodule, or its name is used twice in one call of its module; or `target`
            is something else, as what torch.export made, which knows no taps.
    """
    if isinstance(target, HasSites):
        return target.named_network_outputs()
    if not isinstance(target, nn.Module):
        raise UsageError(
            "taps are those of a module or a program",
            got=type(target).__name__,
            expected="a module, a program or an engine; torch.export leaves no taps in what it makes",
        )
    if not args and not kwargs and (is_pretrained(target) or not _needs_no_arguments(target)):
        kwargs = dict(made_up_inputs(load_model(target))[0])
    outputs: dict[str, torch.Tensor] = {}

    def keep(site: str, tensor: torch.Tensor) -> None:
        outputs[site] = tensor.detach().clone()

    with _Calls(target, {}).listening(None, keep):
        target(*args, **kwargs)
    return iter(outputs.items())


class NetworkOutputs:
    """Mixin that gives a ported module the methods `register_network_output` and `named_network_outputs`."""

    def register_network_output(self, name: str, value: T) -> T:
        """Name an intermediate tensor; see `tap`."""
        return tap(name, value)

    def named_network_outputs(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        """Run the module once and iterate over its taps; see the function of this name."""
        return named_network_outputs(self, *args, **kwargs)  # type: ignore[arg-type]  # a module, too


def _needs_no_arguments(module: nn.Module) -> bool:
    try:
        inspect.signature(module.forward).bind()
    except TypeError:
        return False
    return True


class _Calls:
    """The calls that are open in one forward of a module, and what was tapped in it."""

    def __init__(self, root: nn.Module, called_as: Mapping[str, str]) -> None:
        self._root = root
        self._paths = {submodule: name or ROOT for name, submodule in root.named_modules()}
        self._called_as = called_as
        self._num_calls: Counter[str] = Counter()
        self._open: list[tuple[nn.Module, str]] = []
        self._tapped: set[str] = set()

    @contextlib.contextmanager
    def listening(self, on_output: Observe | None, on_tap: Observe) -> Iterator[None]:
        """Install hooks and the tap sink."""

        def before(submodule: nn.Module, args: Any, kwargs: Any) -> None:
            if submodule is self._root:
                self._num_calls.clear()
                self._tapped.clear()
            elif not self._open:
                return
            path = self._paths[submodule]
            name = with_call(path, self._num_calls[path])
            self._num_calls[path] += 1
            self._open.append((submodule, self._called_as.get(name, name)))

        def after(submodule: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if not self._open:
                return
            _, where = self._open.pop()
            if on_output is not None:
                for port, tensor in port_leaves(":out", result):
                    on_output(port_site(where, port), tensor)

        def sink(name: str, tensor: torch.Tensor) -> None:
            if self._open:
                on_tap(self._tap_site(name), tensor)

        hidden = {part for submodule in self._paths for part in out_of_reach(submodule)}
        # What compiled code calls is a part of it: hooks inside would be compiled too.
        handles = [ObservedCall(submodule, before, after) for submodule in self._paths if submodule not in hidden]
        try:
            with tap_sink(sink):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _tap_site(self, name: str) -> str:
        submodule, where = self._open[-1]
        if name in dict(submodule.named_children()):
            raise UsageError(f"tap {name!r} has the name of a submodule of {where!r}", hint="give the tap another name")
        site = tap_site(where, name)
        if site in self._tapped:
            raise UsageError("a tap name is used twice in one call of its module", got=site, hint="rename one of them")
        self._tapped.add(site)
        return site


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
    results = program.interpreted(_Observing(program, observer, graft), inputs)
    return {name: results[node] for name, node in program.output_nodes.items()}


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda values: values.sum(0),
    "avg": lambda values: values.sum(0) / len(values),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
    "product": lambda values: values.prod(0),
}
RankObserver = Callable[[int, Node, Any], None]


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
