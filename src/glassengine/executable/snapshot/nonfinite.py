"""Values that are not finite: whether there are any, and which op made the first of them.

A sum is a cheap probe: one that is finite proves that every element is. One that is not is confirmed exactly, because
a sum may overflow. Where an op made a NaN or an infinity follows from running the graph again, node by node:

- a NaN is made by the first op that has one in its result and none in its arguments;
- so is an infinity, unless a literal argument or a constant of the graph has it: masks are filled with -inf on
  purpose;
- -inf that came in with an input is a mask, too, unless the input is a parameter or a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from glassengine.errors import GlassError
from glassengine.executable.graph import CapturedGraph, module_path, written_placeholders
from glassengine.executable.snapshot.tensors import obstacle
from glassengine.ops.traits import named
from glassengine.program.kinds.causal_lm import USER_MODULE
from glassengine.program.representation.naming import source_line

_NEVER_MASKS = frozenset({"parameter", "tangent"})


class Kinds(NamedTuple):
    """Which values that are not finite a tensor holds."""

    nan: bool = False
    positive: bool = False
    negative: bool = False

    def __str__(self) -> str:
        found = zip(("NaN", "inf", "-inf"), self, strict=True)
        return " and ".join(name for name, there in found if there) or "finite values"


FINITE = Kinds()


class NonFiniteError(GlassError):
    """An execution made a NaN or an infinity.

    Attributes:
        snapshot: Where the snapshot is; None where none could be written.
        origin: The op that made the first of them; None where no op of the graph does so when it is run alone.
    """

    snapshot: Path | None = None
    origin: NonFiniteOrigin | None = None


@dataclass(frozen=True)
class NonFiniteOrigin:
    """The op that made the first value that is not finite, of those that reached an output.

    Attributes:
        op: What was called, e.g. "aten.log.default"; "input" where the value came in with an input.
        node: Name of the node in the graph, or of the input.
        module: Path of the module it belongs to; "" for the root, or where unknown.
        source: "file:line: code" of the user; None where unknown.
        kinds: "NaN", "inf", "-inf", or several of them.
        num_elements: How many elements are not finite.
        total_elements: Elements of its result.
    """

    op: str
    node: str
    module: str
    source: str | None
    kinds: str
    num_elements: int
    total_elements: int

    def __str__(self) -> str:
        if self.op == "input":
            return f"input {self.node!r} already holds {self.kinds}"
        place = f" in module {self.module!r}" if self.module else ""
        where = f" ({self.source})" if self.source else ""
        count = f"{self.num_elements} of {self.total_elements} elements"
        return f"{self.op}{place}{where} made {self.kinds}: {count} of {self.node}"


def probe(values: Iterable[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
    """Return the tensors among `values` that may hold something that is not finite: whose sum is not.

    Costs one pass over each floating tensor, and one wait for each device and dtype.
    """
    sums: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor, Tensor]]] = {}
    for name, value in values:
        if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
            continue
        if value.numel() == 0 or obstacle(value) is not None:
            continue
        total = (value.float() if value.element_size() == 1 else value).detach().sum()
        sums.setdefault((total.device, total.dtype), []).append((name, value, total))
    found: list[tuple[str, Tensor]] = []
    for group in sums.values():
        # One wait for all of them together; each alone only where that says that there is something.
        if len(group) > 1 and _is_finite(torch.stack([total for _, _, total in group]).sum()):
            continue
        found += [(name, value) for name, value, total in group if not _is_finite(total)]
    return found


def kinds_of(tensor: Tensor) -> Kinds:
    """Return exactly which values that are not finite a floating or complex tensor holds."""
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    tensor = tensor.float() if tensor.element_size() == 1 else tensor
    if tensor.numel() == 0:
        return FINITE
    low, high = (float(end) for end in torch.aminmax(tensor))
    if math.isnan(low):
        low, high = (float(end) for end in torch.aminmax(torch.nan_to_num(tensor, 0.0, math.inf, -math.inf)))
        return Kinds(True, high == math.inf, low == -math.inf)
    return Kinds(False, high == math.inf, low == -math.inf)


@dataclass(frozen=True)
class NonFiniteFinding:
    """What running a graph again shows.

    Attributes:
        origin: What made the first value that is not finite and that no mask explains; None where masks explain all.
        is_reproduced: Whether any of the outputs asked for is not finite again.
        is_random: Whether the graph draws random numbers, which compiled code may draw otherwise.
    """

    origin: NonFiniteOrigin | None
    is_reproduced: bool
    is_random: bool

    def __str__(self) -> str:
        if self.origin is not None:
            return str(self.origin)
        if self.is_reproduced:
            return "they are in memory that the graph never writes to (torch.empty)"
        made = "run node by node, the same graph gives finite values: the compiled code made them"
        return f"{made}, or it drew other random numbers" if self.is_random else made


def find_origin(graph: CapturedGraph, arguments: Sequence[Any], outputs: Iterable[str]) -> NonFiniteFinding:
    """Run a graph node by node and say where what is not finite in `outputs` comes from.

    Args:
        graph: What was executed.
        arguments: Its inputs as they were before the run, in order; a graph that writes to its inputs changes them.
        outputs: Names of outputs, or of inputs that the graph writes to, that are not finite.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    names = {spec.name: node for spec, node in zip(graph.inputs, placeholders, strict=True)}
    kinds = {node: spec.kind for spec, node in zip(graph.inputs, placeholders, strict=True)}
    run = _Watching(graph, kinds)
    with torch.no_grad():
        run.run(*arguments)
    result = graph.module.graph.output_node()
    results = dict(zip(graph.output_names, result.args[0], strict=True))  # type: ignore[arg-type]
    wanted = [results.get(name, names.get(name)) for name in outputs]
    # What writes to an input returns it, so the node that wrote last stands for the input after the run.
    ends = [run.written.get(node, node) for node in wanted if isinstance(node, Node)]
    guilty = run.first_guilty([node for node in ends if node in run.found])
    is_reproduced = any(any(run.found.get(node, FINITE)) for node in ends)
    return NonFiniteFinding(
        None if guilty is None else run.origin(guilty), is_reproduced, any(map(_is_random, graph.nodes))
    )


class _Watching(Interpreter):
    """Runs a graph and keeps, for each node, what is not finite in its result and whether the node made it.

    Attributes:
        found: Nodes whose result is not finite.
        guilty: Those that made it.
        written: Placeholder -> the last node that wrote to it.
    """

    def __init__(self, graph: CapturedGraph, kinds: Mapping[Node, str]) -> None:
        super().__init__(graph.module)
        self._graph = graph
        self._kinds = kinds
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        self._counts: dict[Node, tuple[int, int]] = {}
        self._is_explained: dict[Node, bool] = {}
        self.found: dict[Node, Kinds] = {}
        self.guilty: set[Node] = set()
        self.written: dict[Node, Node] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op == "output":
            return value
        tensors = [item for item in torch.utils._pytree.tree_leaves(value) if isinstance(item, Tensor)]
        suspects = [tensor for _, tensor in probe(("", tensor) for tensor in tensors)]
        found = Kinds(*map(any, zip(FINITE, *map(kinds_of, suspects), strict=True)))
        for written in written_placeholders(n):
            self.written[written] = n
        if any(found):
            self._judge(n, found)
            self._counts[n] = _count(tensors)
        return value

    def first_guilty(self, ends: Sequence[Node]) -> Node | None:
        """Return the first node that made something which reached `ends` through values that are not finite."""
        waiting, seen, makers = list(ends), set(ends), []
        while waiting:
            node = waiting.pop()
            if node in self.guilty:
                makers.append(node)
                continue
            for source in _sources(node, self.written, self._order):
                if source in self.found and not self._is_explained[source] and source not in seen:
                    seen.add(source)
                    waiting.append(source)
        return min(makers, key=self._order.__getitem__, default=None)

    def origin(self, node: Node) -> NonFiniteOrigin:
        """Describe a guilty node."""
        module = module_path(node)
        tops = {module_path(other).partition(".")[0] for other in self._order}
        if self._graph.kind == "engine" and tops <= {"", USER_MODULE}:  # what wraps a language model is not the user's
            module = module.removeprefix(USER_MODULE).removeprefix(".")
        count, total = self._counts[node]
        op, name = str(node.target), node.name
        if node.op == "placeholder":
            specs = zip(self._graph.inputs, (n for n in self._graph.nodes if n.op == "placeholder"), strict=True)
            op, name = "input", next(spec.name for spec, placeholder in specs if placeholder is node)
        return NonFiniteOrigin(op, name, module, source_line(node), str(self.found[node]), count, total)

    def _judge(self, node: Node, found: Kinds) -> None:
        self.found[node] = found
        sources = [source for source in _sources(node, self.written, self._order) if source in self.found]
        if node.op == "placeholder":
            explained = found == Kinds(negative=True) and self._kinds.get(node) not in _NEVER_MASKS
        elif node.op == "get_attr":
            explained = not found.nan
        elif named(_op_name(node)).is_unwritten:
            explained = True
        elif found.nan:
            # What was never initialized may hold anything, and so may a copy of it.
            explained = any(self.found[source].nan and self._is_explained[source] for source in sources)
        else:
            explained = _has_infinite_literal(node) or bool(sources)
            explained &= all(self._is_explained[source] for source in sources)
        self._is_explained[node] = explained
        if not explained and all(self._is_explained[source] for source in sources):
            self.guilty.add(node)


def _sources(node: Node, written: Mapping[Node, Node], order: Mapping[Node, int]) -> list[Node]:
    """Return what a node reads; of an input that was written to before it, the node that wrote."""
    found = []
    for source in node.all_input_nodes:
        writer = written.get(source)
        found.append(writer if writer is not None and order[writer] < order[node] else source)
    return found


def _has_infinite_literal(node: Node) -> bool:
    literals = torch.utils._pytree.tree_leaves((node.args, node.kwargs))
    return any(isinstance(literal, float) and math.isinf(literal) for literal in literals)


def _is_random(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _op_name(node: Node) -> str:
    return node.target._schema.name.rpartition("::")[2] if isinstance(node.target, torch._ops.OpOverload) else ""


def _count(tensors: Iterable[Tensor]) -> tuple[int, int]:
    floating = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return sum(int((~torch.isfinite(t)).sum()) for t in floating), sum(t.numel() for t in floating)


def _is_finite(total: Tensor) -> bool:
    value = total.item()
    return math.isfinite(value.real) and math.isfinite(value.imag)
