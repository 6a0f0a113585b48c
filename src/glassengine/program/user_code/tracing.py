"""Traces: fast ones, those that hold for the given inputs alone, and the marks that a trace keeps.

A trace allocates millions of small objects and frees few, so that the garbage collector walks them again and again. The
cache of fake tensors proves for each result that its strides are those of an earlier one; with symbolic sizes that
proof costs more than to compute the result again (a decoder of eight layers: 3.7 s in place of 5.0), with fixed sizes
less. A trace looks up the lines of a hundred frames for each op, which are the same few thousand: a sixth of its time.

Some code reads values, which an exporter does not have: a branch on a tensor, a loop as long as a tensor says, rows
that a mask picks. With real values beside the symbolic ones the exporter goes the way that these inputs go. What it
cannot follow at all (gradients inside of a forward, arrays of NumPy) is run once, and the ops of torch are written
down.

While a model is traced, hooks on every module and the tap sink call `glass::mark(tensor, port)`. The op is registered
as side-effecting, or dead-code elimination would drop it silently; it never feeds anything. After functionalisation
the graph is in SSA form: `collect_marks` reads which node each mark points at and erases it. The path and call index of
a mark come from its own `nn_module_stack`, because hooks run inside the call of their module.

Of the frames that made an op, `torch.export` keeps those of functions called `forward`. A model that is written with
methods and functions has one line there for all of them, so the frames that the innermost `forward` called are kept
too, as far as they are of its folder: what a library makes of a call is not where the user wrote it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import sys
import traceback
import types
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses import meta_utils
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.proxy import TracerBase
from torch.jit._fuser import optimized_execution
from torch.utils import _pytree as pytree
from torch.utils import _traceback

from glassengine.program.user_code.module_state import weights_of
from glassengine.sites import port_leaves
from glassengine.taps import tap_sink
from glassengine.torch_versions import tracing_real_tensors


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Keep the garbage collector from running, where it was on."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def fast_tracing(dynamic: Any) -> Iterator[None]:
    """Trace and decompose without collections, and without the cache of fake tensors where sizes are symbolic.

    Each pass of torch leaves a graph: only those that are called get code, 4 of 27.

    Args:
        dynamic: The dynamic dimensions, in the form that `torch.export.export` takes.
    """
    import torch._dynamo.config as config  # torch.export needs it, too, and it takes long to import

    is_symbolic = any(leaf is not None for leaf in pytree.tree_leaves(dynamic))
    caching = config.fake_tensor_cache_enabled and not is_symbolic
    patched = torch._dynamo.config.patch(fake_tensor_cache_enabled=caching)
    with without_collections(), patched, _frames_once(), _use_lazy_graph_module(True):
        yield


@contextlib.contextmanager
def _frames_once() -> Iterator[None]:
    """Look up the line of each frame once."""
    frame = functools.lru_cache(maxsize=None)(traceback.FrameSummary)

    def extracted(symbolized: Any, skip: int) -> traceback.StackSummary:
        found = traceback.StackSummary()
        found.extend(frame(f["filename"], f["line"], f["name"]) for f in reversed(symbolized[skip:]))
        return found

    with mock.patch.object(_traceback, "_extract_symbolized_tb", extracted):
        yield


@contextlib.contextmanager
def fast_reading() -> Iterator[None]:
    """Read stored programs without collections; each expression of sizes and each type of the format is read once."""
    from torch._export.serde import serialize

    parse: Any = serialize.GraphModuleDeserializer._parse_sym_expr
    parsed: dict[Any, Any] = {}  # holds the readers, too, so that no two of them have one identity

    def parse_once(self: Any, text: str, hint: Any = None) -> Any:
        key = (id(self), text, type(hint), hint)
        if key not in parsed:
            parsed[key] = self, parse(self, text, hint)
        return parsed[key][1]

    hints = functools.lru_cache(maxsize=None)(lambda cls: typing.get_type_hints(cls, vars(vars(serialize)["schema"])))
    own = types.SimpleNamespace(**vars(typing))
    own.get_type_hints = lambda cls, globalns=None: hints(cls)
    with (
        without_collections(),
        mock.patch.object(serialize.GraphModuleDeserializer, "_parse_sym_expr", parse_once),
        mock.patch.object(serialize, "typing", own),
    ):
        yield


@contextlib.contextmanager
def fast_writing() -> Iterator[None]:
    """Store programs without collections, and without torch's trial of a canonical form, which it makes and drops.

    That trial copies the whole description of a graph: a third of the time of `torch.export.save`.
    """
    from torch._export.serde import serialize

    with without_collections(), mock.patch.object(serialize, "canonicalize", lambda *given: None):
        yield


SPECIALIZED = "specialized"
"""Key of the metadata: how a program was traced that holds for the inputs of one step."""
WITH_VALUES = "exported with the values of its inputs"
WRITTEN_DOWN = "run once, and its ops written down"

_ASSERTIONS = frozenset({"_assert_scalar", "_assert_async", "_assert_tensor_metadata"})


@contextlib.contextmanager
def real_values() -> Iterator[None]:
    """Let what is exported in the block see the values of its inputs."""
    import torch._functorch.config as config
    import torch.fx.experimental._config as symbols

    # Rows that a mask picks make a symbol for their number, which is known here and in no result.
    known = mock.patch.object(symbols, "soft_pending_unbacked_not_found_error", True)
    options: dict[str, Any] = {
        "fake_tensor_propagate_real_tensors": True,
        "generate_fake_kernels_from_real_mismatches": True,
    }
    with contextlib.ExitStack() as stack:
        for name in ("torch.fx.experimental.symbolic_shapes", "torch._export"):
            stack.enter_context(mock.patch.object(logging.getLogger(name), "disabled", True))
        for context in (
            config.patch(options),
            known,
            _python_values(),
            _no_tensor_where_none_is(),
            _as_uncompiled(),
            mock.patch.object(meta_utils, "_safe_copy", _copy),
        ):
            stack.enter_context(context)
        yield


def _copy(made: torch.Tensor, source: torch.Tensor | None) -> None:
    """Fill the value of a fake tensor; torch leaves that of a parameter uninitialized."""
    if type(source) in (torch.Tensor, nn.Parameter):
        made.copy_(source)  # type: ignore[arg-type]


@contextlib.contextmanager
def _python_values() -> Iterator[None]:
    """Let `tensor.item()`, `torch.equal` and `torch.allclose` return their values during a trace.

    A symbol in place of a value would go on into shapes, of which nothing is known.
    """
    aten = torch.ops.aten
    before = {
        op: op_implementations_dict.get(op)
        for op in (aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default)
    }
    for op, fake in before.items():
        op_implementations_dict[op] = functools.partial(_of_real_tensors, fake)
    try:
        yield
    finally:
        for op, fake in before.items():
            if fake is None:
                del op_implementations_dict[op]
            else:
                op_implementations_dict[op] = fake


def _of_real_tensors(fake: Callable[..., Any] | None, mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    real = [getattr(arg, "real_tensor", None) if isinstance(arg, torch.Tensor) else arg for arg in args]
    if any(value is None for value in real):
        return NotImplemented if fake is None else fake(mode, func, *args, **kwargs)
    return func(*real, **kwargs)


def _as_uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Let code that is not torch's take the branch that it takes when it is run: what is run is judged."""
    own = torch.compiler.is_compiling

    def is_compiling() -> bool:
        asking = str(sys._getframe(1).f_globals.get("__name__"))
        return asking.partition(".")[0] == "torch" and own()

    return mock.patch.object(torch.compiler, "is_compiling", is_compiling)


def _no_tensor_where_none_is() -> contextlib.AbstractContextManager[Any]:
    """Let an op that has fewer results than its fake (the workspace of a recurrence) have as many as it has."""
    own = FakeTensorMode._maybe_infer_fake

    def inferred(self: Any, func: Any, path: Any, fake: Any, real: Any) -> tuple[Any, bool]:
        return (None, fake is not None) if real is None else own(self, func, path, fake, real)

    return mock.patch.object(FakeTensorMode, "_maybe_infer_fake", inferred)


def without_assertions(exported: ExportedProgram) -> ExportedProgram:
    """Erase what a graph asserts of values, and what only that needs or numbers that are known: it is run on these."""
    graph = exported.graph
    read: set[torch.fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        name = getattr(node.target, "_opname", "")
        is_number = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))
        is_needless = name in _ASSERTIONS or is_number or name == "_local_scalar_dense" or node in read
        if node.op == "call_function" and not node.users and is_needless:
            read.update(node.all_input_nodes)
            graph.erase_node(node)
    exported.graph_module.recompile()
    return exported


def written_down(module: nn.Module, inputs: Mapping[str, Any]) -> nn.Module:
    """Run a module once and return one with its weights, under the same names, that repeats the ops of that run."""
    scripted = [
        f"{path}." * bool(path) for path, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)
    ]
    weights = {name: tensor for name, tensor in weights_of(module).items() if not name.startswith(tuple(scripted))}
    leaves, spec = pytree.tree_flatten(dict(inputs))

    calls: OrderedDict[str, tuple[str, Any]] = OrderedDict()

    def run(given: dict[str, torch.Tensor], tensors: list[torch.Tensor]) -> Any:
        if (mode := get_proxy_mode()) is not None:
            mode.tracer.module_stack = calls
        fresh = iter(tensors)
        filled = [next(fresh) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        arguments = pytree.tree_unflatten(filled, spec)
        results = torch.func.functional_call(module, given, (), arguments) if given else module(**arguments)
        return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, torch.Tensor) else None, results)

    trace = make_fx(run, tracing_mode="real", _error_on_data_dependent_ops=False, record_stack_traces=True)
    with tracing_real_tensors(), optimized_execution(False), helper_lines(), _calls_in(module, calls):
        graph_module = trace(weights, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
    return _Repeated(module, graph_module, tuple(weights))


@contextlib.contextmanager
def _calls_in(module: nn.Module, calls: dict[str, tuple[str, Any]]) -> Iterator[None]:
    """Hold in `calls` the modules that are being called, outermost first."""
    numbers = itertools.count()
    with contextlib.ExitStack() as hooks:
        for path, part in module.named_modules():
            if not path or isinstance(part, torch.jit.ScriptModule):
                continue

            def before(part: nn.Module, _: Any, path: str = path) -> None:
                calls[f"{path}@{next(numbers)}"] = (path, type(part))

            hooks.enter_context(part.register_forward_pre_hook(before))
            hooks.enter_context(part.register_forward_hook(lambda *_: calls.popitem() and None, always_call=True))
        yield


class _Repeated(nn.Module):
    """Repeats a graph; weights that TorchScript holds are constants of the graph, which stand for those of a name."""

    def __init__(self, module: nn.Module, graph_module: Any, names: Sequence[str]) -> None:
        super().__init__()
        self._graph = (graph_module,)  # no submodule: its ops are those of the root
        self._names = names
        known = {id(tensor): name for name, tensor in weights_of(module).items()}
        targets = {node.target for node in graph_module.graph.find_nodes(op="get_attr")}
        constants = {target: known.get(id(getattr(graph_module, target))) for target in targets}
        self._constants = {target: name for target, name in constants.items() if name is not None}
        for target in self._constants:
            delattr(graph_module, target)
        for path in (path for path, _ in module.named_modules() if path):
            owner, _, name = path.rpartition(".")
            self.get_submodule(owner).add_module(name, nn.Module())  # names the ops of a call
        for name, tensor in weights_of(module).items():
            owner, _, last = name.rpartition(".")
            part: Any = self.get_submodule(owner)
            if isinstance(tensor, nn.Parameter):
                part.register_parameter(last, tensor)
            else:
                part.register_buffer(last, tensor)

    def forward(self, **by_name: Any) -> Any:  # "inputs" may be the name of one of them
        weights = {name: self._weight(name) for name in self._names}
        for target, name in self._constants.items():
            self._graph[0].__dict__[target] = self._weight(name)
        tensors = [leaf for leaf in pytree.tree_leaves(by_name) if isinstance(leaf, torch.Tensor)]
        with torch.fx.traceback.preserve_node_meta():  # the user's lines
            return torch.fx.Interpreter(self._graph[0]).run(weights, tensors)

    def _weight(self, name: str) -> Any:
        path, _, last = name.rpartition(".")
        return getattr(self.get_submodule(path), last)


_LIBRARY = torch.library.Library("glass", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("mark(Tensor x, str port) -> ()")  # type: ignore[no-untyped-call]
_LIBRARY.impl("mark", lambda x, port: None, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
# Without a result there is nothing to infer, to wrap or to differentiate.
MARK = torch.ops.glass.mark.default
torch.fx.node.has_side_effect(MARK)


@dataclass(frozen=True)
class Mark:
    """One erased mark: `node` holds the value of `port` (":out[0]", ":in.x", ".tap") of the module of `stack`."""

    node: torch.fx.Node
    port: str
    stack: dict[str, tuple[str, Any]]


def _mark(tensor: torch.Tensor, port: str) -> None:
    """Mark a tensor; inside of `torch.vmap` there is none: one element of a batch is no tensor of the graph.

    Writes the node directly. A call of the op would infer a result and collect stack lines, a third of a trace.
    """
    if torch._C._functorch.is_batchedtensor(tensor):
        return
    mode = get_proxy_mode()
    proxy = None if mode is None else get_proxy_slot(tensor, mode.tracer, None, lambda slot: slot.proxy)
    if mode is None or proxy is None:
        MARK(tensor, port)
        return
    tracer, records = mode.tracer, mode.tracer.record_stack_traces
    tracer.record_stack_traces = False
    try:
        tracer.create_proxy("call_function", MARK, (proxy, port), {}, name="mark")
    finally:
        tracer.record_stack_traces = records


@contextlib.contextmanager
def marking(module: nn.Module) -> Iterator[None]:
    """Insert marks for the inputs and outputs of every submodule of `module`, and for taps, while it is traced."""

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        for port, tensor in (*port_leaves(":in", args), *port_leaves(":in", kwargs)):
            _mark(tensor, port)

    def after(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        for port, tensor in port_leaves(":out", result):
            _mark(tensor, port)

    with contextlib.ExitStack() as hooks:
        for submodule in module.modules():
            hooks.enter_context(submodule.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(submodule.register_forward_hook(after, with_kwargs=True))
        hooks.enter_context(tap_sink(lambda name, tensor: _mark(tensor, f".{name}")))
        yield


def collect_marks(graph: torch.fx.Graph) -> list[Mark]:
    """Erase every mark of a functional graph and return what they named, in graph order."""
    found = []
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is MARK:
            source, port = node.args
            found.append(Mark(source, port, node.meta.get("nn_module_stack", {})))
            graph.erase_node(node)  # nothing uses it
    return found


_PACKAGES = ("/site-packages/", "/dist-packages/", f"{Path(torch.__file__).parent.parent}/")
_OF_OPS = ("torch", "einops")
"""Packages whose modules do one op each; what is wrong is where they are called."""
NOT_THE_USERS = (
    "/glassengine/program/",
    "<eval_with_key>",
    *(f"{folder}{name}/" for folder in _PACKAGES for name in _OF_OPS),
)
_INSTALLED = ("/glassengine/", "/site-packages/", "/dist-packages/", "/lib/python", "<")


def is_users(file: str) -> bool:
    """Whether a frame of `file` is the user's: neither of a package of ops nor of an export."""
    return not any(part in file for part in NOT_THE_USERS)


def with_helpers(kept: traceback.StackSummary, frames: traceback.StackSummary) -> traceback.StackSummary:
    """Return the frames `kept` of `frames`, outermost first, with the helpers of each `forward`."""
    known, found, forward = set(map(id, kept)), [], None
    for frame in frames:
        forward = frame if frame.name == "forward" and is_users(frame.filename) else forward
        if id(frame) in known or (forward is not None and _is_helper(frame.filename, forward.filename)):
            found.append(frame)
    return traceback.StackSummary.from_list(found)


def _is_helper(file: str, forward: str) -> bool:
    """Whether a frame that a `forward` calls is of the same author: of its folder, or of no installed package."""
    return _folder(file) == _folder(forward) or not any(part in file for part in _INSTALLED)


@functools.lru_cache(maxsize=4096)
def _folder(file: str) -> Path:
    return Path(file).parent


def helper_lines() -> contextlib.AbstractContextManager[Any]:
    """Let what is traced in the block keep the lines of helpers."""
    # One step of export takes that from its tracer alone, without an option.
    own = TracerBase._filter_traceback_frames

    def kept(self: TracerBase, frames: traceback.StackSummary) -> traceback.StackSummary:
        return with_helpers(own(self, frames), frames)

    return mock.patch.object(TracerBase, "_filter_traceback_frames", kept)


def remove_dead_nodes(graph: Graph, marks: Iterable[Mark]) -> list[Mark]:
    """Erase what no result depends on, and return the marks of what is left.

    Args:
        graph: Functional and free of marks.
        marks: What the erased marks named.
    """
    for node in reversed(list(graph.nodes)):
        # Inputs are part of the signature. Assertions have no result, so that all that they read would stay.
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
    left = set(graph.nodes)
    return [mark for mark in marks if mark.node in left]
