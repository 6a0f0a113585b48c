"""The interface of a back-end: availability, capabilities, build, load; options and network where it has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from glassengine.errors import logger
from glassengine.executable.cache import CompilerCache
from glassengine.numerics.noise import WideOperands
from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of
from glassengine.program.representation.listing import list_nodes, stage_of
from glassengine.program.representation.program import Program

LARGEST = "largest"
"""Key of a program's metadata while it is built: dynamic size -> the largest that the engine will be given.

Only back-ends that plan for it need to look."""
BATCH_INVARIANT = "batch_invariant"
"""Key of a program's metadata while it is built: whether no row may depend on the rest of its batch."""

Run = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
Weights = Mapping[str, torch.Tensor]
GraphFunction = Callable[[list[Any]], Any]
"""Takes the inputs of a graph as a list, which it empties, and returns its outputs as a sequence."""
_STANDARD = frozenset({"aten", "prim", "prims", "higher_order"})


@dataclass(frozen=True)
class Capabilities:
    """What a back-end can do.

    Attributes:
        dtypes: Floating dtypes of models it can build, torch names.
        kv: "mutated" when it writes the cache inputs in place, "functional" when it returns `present_*` outputs, "own"
            when it keeps the caches of each session itself (`KeepingCaches`), and they are neither inputs nor outputs.
        portable: Whether the built files run on another CPU.
        wide_operands: Which products of half-precision models may read float32 registers where the output of the op
            before them is rounded: "none", "thin products" (batched, of one row or column), or all "products".
        devices: What it can build for. The first is the default; any other must be available.
        own_kernels: Whether its elementwise kernels may be less accurate than rounding, so that they are measured
            (see `calibration`).
        native_code: Whether loading what it built runs code of it. Such an engine is loaded only where its user built
            it, or says that he trusts it.
        compiles_slowly: Whether to compile takes longer than to start a process that compiles.
        collectives: Whether a program may have collectives of torch among its ops, which ranks of an engine meet in.
        batch_invariant: Whether it can build so that no row depends on the rest of its batch (`BATCH_INVARIANT`).
    """

    dtypes: tuple[str, ...]
    kv: str
    portable: bool
    wide_operands: WideOperands = "thin products"
    devices: tuple[str, ...] = ("cpu",)
    own_kernels: bool = False
    native_code: bool = True
    compiles_slowly: bool = False
    collectives: bool = False
    batch_invariant: bool = False


@dataclass(frozen=True)
class Availability:
    """Whether a back-end can be used here; `reason` and `install` are empty when it can."""

    available: bool
    reason: str = ""
    install: str = ""


@dataclass(frozen=True)
class NetworkTensor:
    """A tensor of a back-end's network; dtype and shape as text, "" where the back-end does not say."""

    name: str
    dtype: str = ""
    shape: str = ""


@dataclass(frozen=True)
class Layer:
    """One operation of a back-end's network.

    Attributes:
        name: Its name. Where the layer is all of an FX node, or ends it, this is the name of the node; a layer within
            the expansion of a node is called `<node>/<operation>_<n>`.
        operation: What the back-end calls it, e.g. "MatMul".
        nodes: FX nodes that it computes, or is a part of.
        inputs: Names of the tensors it reads.
        outputs: The tensors it writes.
        attributes: Its settings.
        is_plugin: Whether it is fused or custom: no plain operation of the back-end's standard set.
    """

    name: str
    operation: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[NetworkTensor, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    is_plugin: bool = False


@dataclass(frozen=True)
class Network:
    """What a back-end made of a program.

    Attributes:
        layers: In execution order.
        inputs: Inputs of the network, weights excluded.
        outputs: Names of its outputs.
        note: One sentence: which form of the network this is.
        sources: File name -> text of code that the back-end generated.
        optimized: The same network after fusions, where the back-end tells what it runs in the end.
    """

    layers: tuple[Layer, ...]
    inputs: tuple[NetworkTensor, ...]
    outputs: tuple[str, ...]
    note: str
    sources: dict[str, str] = field(default_factory=dict)
    optimized: Network | None = None


@runtime_checkable
class Describing(Protocol):
    """A back-end that can show what it builds; a third party may leave this out."""

    def options(self, program: Program) -> dict[str, Any]:
        """Return every option in effect for `program`, as JSON values."""

    def network(self, program: Program, directory: Path) -> Network:
        """Return what `build` made of `program` in `directory`."""


@runtime_checkable
class TakingOnnx(Protocol):
    """A back-end that builds programs that are ONNX graphs (`Program.onnx`); a third party may leave this out."""

    takes_onnx: bool


@runtime_checkable
class NamingKernels(Protocol):
    """A back-end whose kernels show as spans in a profile; a third party may leave this out."""

    def kernels(self, directory: Path) -> list[tuple[str, tuple[str, ...]]]:
        """Return (name of a kernel's span, nodes that it computes) in the order of execution."""


@runtime_checkable
class Preparing(Protocol):
    """A back-end that can do ahead what the first build of a process takes; a third party may leave this out."""

    def prepare(self) -> None:
        """Import, and find out about this machine, what a build needs."""


@runtime_checkable
class CompilingGraphs(Protocol):
    """A back-end that can compile a graph in memory, for `torch.compile`; a third party may leave this out."""

    name: str

    def compile_graph(self, module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> GraphFunction:
        """Compile a flat ATen graph, which must not be changed.

        Args:
            module: Its results are a flat tuple of tensors, numbers and None; it may write to its inputs.
            example_inputs: Fake tensors, whose sizes may be symbols, and numbers; in the order of the placeholders.
        """


@runtime_checkable
class DecomposingGraphs(Protocol):
    """A back-end that wants the graphs of `torch.compile` traced through decompositions of its own.

    One whose results have other strides than the decomposed operation would have must do so: strides of what a forward
    graph saves are built into the backward graph.
    """

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Return operation -> decomposition."""


@runtime_checkable
class CachingGraphs(Protocol):
    """A back-end whose `compile_graph` can find again what it compiled in another process."""

    def graph_cache(self) -> CompilerCache:
        """Return its option for the directory of its products."""


def taking_list(function: Callable[..., Any]) -> GraphFunction:
    """Return a function of a list of inputs, which it empties before `function` runs on them."""

    def run(arguments: list[Any]) -> Any:
        values = tuple(arguments)
        arguments.clear()
        return function(*values)

    return run


def describe_network(backend: Backend, program: Program, directory: Path) -> Network:
    """Return the network of a back-end; the program's own graph, with the reason, where it cannot show one.

    A listing is there to be read: one that fails must not take the engine with it.
    """
    reason = "it has no listing"
    if isinstance(backend, Describing):
        try:
            return backend.network(program, directory)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("the network of back-end %s cannot be listed: %s", backend.name, reason)
    return program_network(program, f"this is the graph it was given, not its own network ({reason}).")


@runtime_checkable
class TakingModels(Protocol):
    """A back-end that writes a model by its configuration and parameters, rather than its graph."""

    quantizations: Sequence[str]
    """Types that matrices can be rounded to when they are written."""

    def require(self, module: torch.nn.Module, quantize: str | None, length: int | None) -> None:
        """Refuse what cannot be written, before anything slow.

        Args:
            module: With its configuration.
            quantize: One of `quantizations`.
            length: Most tokens of a sequence.
        """

    def build_model(
        self, module: torch.nn.Module, directory: Path, quantize: str | None, tokenizer: str | None
    ) -> None:
        """Write a model into the empty `directory`; `tokenizer` is where that of the checkpoint is."""

    def served(self, directory: Path) -> str:
        """Return what it wrote as a candidate of a check, by kind and place."""


@runtime_checkable
class KeepingCaches(Protocol):
    """What `load` returns of a back-end that keeps the caches of each session itself."""

    def open(self, batch_size: int, length: int) -> tuple[Run, Callable[[], None]]:
        """Return what runs the steps of a session, without caches among inputs and results, and what ends it."""


class Backend(Protocol):
    """A back-end. Third parties register a class under the entry-point group `glassengine.backends`."""

    name: str
    capabilities: Capabilities

    def available(self) -> Availability:
        """Say whether this back-end can build and run on this machine."""

    def keeps_weights(self, program: Program) -> bool:
        """Whether the built files hold the weights; if not, `load` is given them."""

    def build(self, program: Program, directory: Path) -> None:
        """Compile `program`, its outputs included and caches as input mutations, into the empty `directory`."""

    def load(self, directory: Path, weights: Weights | None) -> Run:
        """Load `directory`. The result maps inputs by name to outputs by name.

        Args:
            directory: What `build` wrote.
            weights: Qualified name -> tensor where `keeps_weights` is false; must stay alive as long as the result.
        """


def is_custom(node: torch.fx.Node) -> bool:
    """Whether a node is a fused operation (attention) or an op that no part of torch defines."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target.namespace not in _STANDARD or traits_of(node).rounding is Rounding.ATTENTION


def program_network(program: Program, note: str) -> Network:
    """Return the graph of a program as a network of one layer per node."""
    lines = {line.name: line for line in list_nodes(stage_of(program, ""))}
    by_node = {node: name for name, node in program.output_nodes.items()}
    layers = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        line = lines[node.name]
        result = NetworkTensor(node.name, line.dtype, line.shape)
        arguments = {"arguments": line.args}
        layers.append(Layer(node.name, line.target, (node.name,), line.inputs, (result,), arguments, is_custom(node)))
    inputs = tuple(NetworkTensor(p.node, p.dtype, f"[{', '.join(map(str, p.shape))}]") for p in program.inputs)
    return Network(tuple(layers), inputs, tuple(by_node), note)
