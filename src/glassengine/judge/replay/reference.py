"""The noise floor: one program in float64, in its own dtype, and twice with Monte-Carlo rounding, in lockstep.

All lanes advance node by node, so that only live values are held and a node's weights are in float64 only while it is
computed. After each node the observer gets a `Reference` that can judge any other implementation of that tensor.
float64 is real: dtypes written into the graph (`.to(float32)`, `softmax(dtype=...)`) are retargeted.

Every op in a recurrence, a branch, a loop or a function of an ONNX model rounds as it would alone. The bound of such a
function is worked out from samples: it has none in closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.judge.exclusions.exactness import Exactness, keeps_whole_numbers
from glassengine.judge.exclusions.masked import HiddenValues
from glassengine.judge.exclusions.sources import Excluded, Exclusions, sources_of
from glassengine.judge.exclusions.ties import settled_sources
from glassengine.numerics.activations import Read
from glassengine.numerics.float64 import (
    FLOAT32_SUMS,
    Accumulation,
    double,
    in_double,
    is_real,
    retarget,
    retargeted,
    target_of,
)
from glassengine.numerics.judgement import smallest_precise, unit_roundoff
from glassengine.numerics.kinds import KnownValues
from glassengine.numerics.noise import ExactProduct, disturbed, noisy, rounded, rounds, uniform
from glassengine.numerics.verdict import Reference
from glassengine.ops.traits import traits_of
from glassengine.program.onnx.function import Composite, Each
from glassengine.program.representation.naming import is_tensor_node
from glassengine.program.representation.outputs import last_uses, weight_only_nodes
from glassengine.program.representation.program import Program
from glassengine.writing import crc32

NUM_RUNS = 6
_OF_ELEMENT = 4.0
_OF_ROW = 6.0
"""Of the largest error that an element, or on average the elements of its row, had in some run."""


def sampled(
    generator: torch.Generator, dtype_of: Callable[[Node, Tensor], torch.dtype], how: Accumulation = FLOAT32_SUMS
) -> Each:
    """Return what rounds the float64 results of a node, given its float64 arguments.

    Args:
        generator: Source of the noise.
        dtype_of: Returns the floating dtype in which a result is rounded.
        how: How products are summed.
    """

    def each(node: Node, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def one(result: Any) -> Any:
            if not is_real(result):
                return result
            dtype = dtype_of(node, result)
            u, tiny = unit_roundoff(dtype), smallest_precise(dtype)
            return noisy(node, result.double(), args, kwargs, u, generator, how, tiny)

        if not rounds(node):
            return value
        return one(value) if isinstance(value, Tensor) else pytree.tree_map(one, value)

    return each


def bound_of(exact: Tensor, runs: Sequence[Tensor]) -> Tensor:
    """Return how far rounding may lead from `exact`, element by element, of runs that were rounded inside."""
    errors = torch.stack([(run - exact).abs().nan_to_num(0.0, 0.0, 0.0) for run in runs]).amax(0)
    row = errors.square().mean(-1, keepdim=True).sqrt() if errors.dim() else errors
    return _OF_ELEMENT * errors + _OF_ROW * row


_FACTORS = 3
"""Arguments of an op that are multiplied or added; a mask comes after them."""


@dataclass(frozen=True)
class CoarseArithmetic:
    """Node -> what is coarse there; what is not named is computed in float32.

    Attributes:
        operands: What an op reads of its activations.
        summed: How a product is summed.
        rounded: Dtype of a table from which results are read.
        words: What that is, as the engine's makers call it.
    """

    operands: Mapping[str, Callable[[torch.Tensor], Read]] = field(default_factory=dict)
    summed: Mapping[str, Accumulation] = field(default_factory=dict)
    rounded: Mapping[str, torch.dtype] = field(default_factory=dict)
    words: tuple[str, ...] = ()

    def joined(self, other: CoarseArithmetic) -> CoarseArithmetic:
        """Return what is coarse in one of two; of a node that both have, the other's counts."""
        return CoarseArithmetic(
            {**self.operands, **other.operands},
            {**self.summed, **other.summed},
            {**self.rounded, **other.rounded},
            tuple(dict.fromkeys([*self.words, *other.words])),
        )

    def read(
        self, node: Node, args: tuple[Any, ...], generator: torch.Generator, weights: set[Node]
    ) -> tuple[Any, ...]:
        """Return arguments that are as far from `args` as what the engine reads, with signs of their own in each lane.

        Args:
            node: The op.
            args: In float64.
            generator: Of the lane.
            weights: Nodes that depend on weights alone.
        """
        reader = self.operands.get(node.name)
        if reader is None:
            return args

        def one(source: Any, value: Any) -> Any:
            if not isinstance(source, Node) or source in weights or not is_real(value):
                return value
            apart = (reader(value.float()).values.double() - value).abs()
            return value + torch.copysign(apart, uniform(value.shape, generator).double())

        read = [one(source, value) for source, value in zip(node.args[:_FACTORS], args, strict=False)]
        return (*read, *args[_FACTORS:])


PLAIN = CoarseArithmetic()


NUM_NOISE_RUNS = 2
_SEED = 0

Observer = Callable[[Node, Reference], None]
Taken = Callable[[Node, torch.Size], torch.Tensor | None]


class ReferenceRun:
    """Runs the lanes of one program over the steps of one case, each lane with its own cache.

    Args:
        program: The program, with weights.
        coarsest: Dtype of the coarsest candidate; None for the program's own. Noise is that of the coarser of the two,
            and weights are disturbed by its rounding when it is coarser than theirs.
        accumulation: How the candidates' products are summed.
        arithmetic: What candidates compute more coarsely; noisy lanes do so, too.
    """

    def __init__(
        self,
        program: Program,
        *,
        coarsest: torch.dtype | None = None,
        accumulation: Accumulation = FLOAT32_SUMS,
        arithmetic: CoarseArithmetic = PLAIN,
    ) -> None:
        self._program = program
        self._arithmetic = arithmetic
        self._of_weights = weight_only_nodes(program) if arithmetic.operands else set()
        self._coarsest = coarsest
        self._accumulation = accumulation
        self._steps = 0
        # Node -> largest relative floor so far, of the outputs of the program and of what anybody judged.
        self.relative_floors: dict[str, float] = {}
        self._weights = program.weights()
        self._in_double = {node: retargeted((node.args, node.kwargs)) for node in program.graph.nodes}
        called = {node: target_of(node) for node in program.graph.nodes if node.op == "call_function"}
        self._targets = {node: (target, in_double(node, target)) for node, target in called.items()}
        self._last_use = last_uses(program)
        self._exactness = Exactness(self._weights, coarsest, accumulation)
        self._hidden = HiddenValues(program.graph, self._exactness)
        self._outputs = set(program.graph.output_node().all_input_nodes)
        # Lane 0 is exact, lane 1 the program's own dtype, the rest are noisy.
        self._caches: list[dict[str, torch.Tensor]] = [{} for _ in range(2 + NUM_NOISE_RUNS)]
        self._excluded_caches: dict[str, Any] = {}

    def step(
        self,
        inputs: Mapping[str, torch.Tensor],
        observe: Observer,
        valid: Callable[[Node, torch.Tensor], torch.Tensor | None],
    ) -> None:
        """Advance all lanes by one step; caches given in `inputs` are used in the first step only.

        Args:
            inputs: Tensors by input name.
            observe: Called with (node, reference) for every tensor the graph computes, in graph order.
            valid: Gives the mask of elements other than padding, for a node and its value.
        """
        for node, reference in self.walk(inputs, valid):
            observe(node, reference)

    @property
    def caches(self) -> Mapping[str, torch.Tensor]:
        """Caches after the last step in the program's own dtype, by the name of their input; none before the first."""
        return self._caches[1]

    def walk(
        self,
        inputs: Mapping[str, torch.Tensor],
        valid: Callable[[Node, torch.Tensor], torch.Tensor | None],
        taken: Taken = lambda *_: None,
    ) -> Generator[tuple[Node, Reference], torch.Tensor | None, None]:
        """Advance all lanes by one step and yield (node, reference) for every tensor, as `step` calls `observe`.

        A tensor that is sent back takes the place of the value in every lane: teacher forcing.

        Args:
            inputs: As for `step`.
            valid: As for `step`.
            taken: Gives the value of a product with a weight, for its node and shape, where that is known beforehand
                and its reference is not asked for: it is not computed, nor yielded.
        """
        generators = [_generator(_SEED, self._steps, lane) for lane in self._lanes]
        env: dict[Node, list[Any]] = {}
        # With a layout, the masks of the inputs say which rows are padding.
        sources = sources_of(self._hidden.places if self._program.layout is None else None)
        self._exactness.begin_step()
        self._hidden.begin_step()
        exclusions = Exclusions(sources, partial(self._recomputed, env))
        names = {port.node: port.name for port in self._program.inputs}
        for node in self._program.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                env[node] = self._given(node, names, inputs)
                exclusions.carry(node, self._excluded_caches.get(names.get(node.name, ""), {}))
                if not self._steps or names.get(node.name) not in self._program.caches:
                    self._exactness.take(node, env[node][1])
                self._hidden.visit(node, env[node][0], env)
            elif node.op == "call_function" and "_assert" not in str(node.target):
                known = self._taken(node, env, taken)
                env[node] = self._evaluate(node, env, generators) if known is None else known
                self._hidden.visit(node, env[node][0], env)
                exclusions.visit(node, env)
                if known is not None:
                    exclusions.force(node)
                elif is_tensor_node(node):
                    exact = env[node][0]
                    excluded = exclusions.of(node, env, valid(node, exact), self._dtype(node, exact))
                    forced = yield node, self._reference(node, env, excluded)
                    if forced is not None:
                        exclusions.force(node)
                        self._exactness.forced(node, forced, exact)
                        own = env[node][1].dtype
                        env[node] = [forced.to(own) if lane == 1 else double(forced) for lane in self._lanes]
            for dead in self._last_use.get(node, ()):
                env.pop(dead, None)
                exclusions.settle(dead)
                self._hidden.settle(dead)
        by_name = {node.name: node for node in env}
        presents = {past: by_name[self._program.output_nodes[name]] for past, name in self._program.caches.items()}
        for past, node in presents.items():
            for lane in self._lanes:
                self._caches[lane][past] = env[node][lane]
        self._excluded_caches = {past: exclusions.carried(node) for past, node in presents.items()}
        self._steps += 1

    @property
    def _lanes(self) -> range:
        return range(len(self._caches))

    def _given(self, node: Node, names: Mapping[str, str], inputs: Mapping[str, torch.Tensor]) -> list[Any]:
        """Return the lanes of what the graph does not compute."""
        name = names.get(node.name)
        if node.op == "get_attr":
            return [getattr(self._program.exported.graph_module, str(node.target))] * len(self._lanes)
        if name is None:
            return [self._weights.get(node.name)] * len(self._lanes)
        if self._steps and name in self._program.caches:
            return [self._caches[lane][name] for lane in self._lanes]
        return [inputs[name] if lane == 1 else double(inputs[name]) for lane in self._lanes]

    def _taken(self, node: Node, env: Mapping[Node, list[Any]], taken: Taken) -> list[Any] | None:
        """Return the lanes of a product whose value is known beforehand; None where it is to be computed."""
        has_weight = any(source.name in self._weights for source in node.all_input_nodes)
        if not has_weight or not traits_of(node).reads_memory or not is_tensor_node(node):
            return None
        args, kwargs = torch.fx.node.map_arg(
            (node.args, node.kwargs), lambda source: pytree.tree_map(_without_values, env[source][1])
        )
        made = self._targets[node][0](*args, **kwargs)
        value = taken(node, made.shape)
        if value is None:
            return None
        wide = double(value)
        return [value.to(made.dtype) if lane == 1 else wide for lane in self._lanes]

    def _evaluate(self, node: Node, env: Mapping[Node, list[Any]], generators: list[torch.Generator]) -> list[Any]:
        target, target_in_double = self._targets[node]
        doubles: dict[Node, Any] = {}

        def argument(source: Node, lane: int) -> Any:
            value = env[source][lane]
            if lane == 1 or isinstance(value, (int, float, torch.SymInt)):
                return value
            if not isinstance(value, torch.Tensor):
                return pytree.tree_map(retarget, value)
            if source.name not in self._weights or not value.is_floating_point():
                return double(value)
            if source not in doubles:
                doubles[source] = value.double()
            return self._disturbed(source, doubles[source], value.dtype, lane)

        results: list[Any] = []
        product: ExactProduct | None = None
        summed_as = self._arithmetic.summed.get(node.name, self._accumulation)
        exact_arguments: tuple[Any, Any] = ((), {})
        is_rounded = rounds(node)
        for lane in self._lanes:
            if lane == 2 and self._exactness.finds(node, *exact_arguments, *results):
                return [*results, *([results[0]] * (len(self._lanes) - 2))]
            written = (node.args, node.kwargs) if lane == 1 else self._in_double[node]
            args, kwargs = torch.fx.node.map_arg(written, partial(argument, lane=lane))
            if lane == 1:
                results.append(target(*args, **kwargs))
                continue
            if lane == 0:
                exact_arguments = args, kwargs
            if lane > 1:
                args = self._arithmetic.read(node, args, generators[lane], self._of_weights)
            if lane > 1 and product is not None:
                dtype = self._dtype(node, results[0])
                u = unit_roundoff(dtype)
                summed = product.sums(args, kwargs, u, generators[lane], summed_as)
                if summed is not None:
                    results.append(rounded(results[0], u, generators[lane], summed, smallest_precise(dtype)))
                    continue
            if lane > 1 and isinstance(node.target, Composite):
                results.append(self._rounded_inside(node, args, kwargs, generators[lane]))
                continue
            value = target_in_double(*args, **kwargs)
            if lane == 0 and self._is_of_whole_numbers(node, args, kwargs, value):
                is_rounded = False
            if lane == 0 and is_rounded and is_real(value) and traits_of(node).multiplies:
                product = ExactProduct(node, value, args, kwargs, self._stored(node))
            if lane > 1 and is_rounded:
                value = sampled(generators[lane], self._dtype, summed_as)(node, value, args, kwargs)
            if lane > 1 and node.name in self._arithmetic.rounded:
                value = value.to(self._arithmetic.rounded[node.name]).double()
            results.append(value)
        return results

    def _is_of_whole_numbers(self, node: Node, args: Any, kwargs: Any, value: Any) -> bool:
        if not is_real(value):
            return False
        kept = node.meta.get("val")
        own = kept.dtype if isinstance(kept, torch.Tensor) else value.dtype
        return keeps_whole_numbers(node, args, kwargs, value, self._exactness.unit(traits_of(node), own))

    def _recomputed(self, env: Mapping[Node, list[Any]], node: Node, other_values: Mapping[Node, Any]) -> Any:
        """Compute the exact lane of a node once more, from other values of what it reads."""
        written = self._in_double[node]
        args, kwargs = torch.fx.node.map_arg(
            # An allocation keeps the program's dtype in this lane; what is written to it must not be rounded to that.
            written,
            lambda source: pytree.tree_map(
                retarget, other_values[source] if source in other_values else env[source][0]
            ),
        )
        return self._targets[node][1](*args, **kwargs)

    def _stored(self, node: Node) -> dict[int, torch.Tensor]:
        """Weights among the arguments of `node` as they are stored, by position."""
        leaves = enumerate(pytree.tree_leaves(node.args))
        return {
            i: self._weights[leaf.name] for i, leaf in leaves if isinstance(leaf, Node) and leaf.name in self._weights
        }

    def _rounded_inside(
        self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], generator: torch.Generator
    ) -> Any:
        """The results of a function that is made of ops, each of which rounds."""
        assert isinstance(node.target, Composite)
        floats = [value for value in pytree.tree_leaves(node.meta["val"]) if value.is_floating_point()]
        dtype = self._dtype(node, floats[0]) if floats else torch.float32
        return node.target.rounded(sampled(generator, lambda *_: dtype, self._accumulation))(*args, **kwargs)

    def _disturbed(self, source: Node, value: torch.Tensor, dtype: torch.dtype, lane: int) -> torch.Tensor:
        """Weights of a noisy lane carry the rounding of a coarser candidate's weights, the same in every step."""
        if lane < 2 or self._coarsest is None or torch.finfo(self._coarsest).eps <= torch.finfo(dtype).eps:
            return value
        generator = _generator(_SEED, source.name, lane)
        return disturbed(value, unit_roundoff(self._coarsest), generator, smallest_precise(self._coarsest))

    def _dtype(self, node: Node, value: torch.Tensor) -> torch.dtype:
        """Floating dtype in which the candidates round `value`, a result of this node."""
        kept = node.meta["val"]
        results = [kept] if isinstance(kept, torch.Tensor) else list(kept)
        # Of several results the first that rounds: a quantized tensor comes with its scale.
        own: torch.dtype = next((one.dtype for one in results if one.is_floating_point()), results[0].dtype)
        if self._coarsest is None or not value.is_floating_point():
            return own
        return max((own, self._coarsest), key=lambda dtype: torch.finfo(dtype).eps)

    def _reference(self, node: Node, env: Mapping[Node, list[Any]], excluded: Excluded) -> Reference:
        lanes = env[node]
        reference = Reference(
            lanes[0],
            lanes[1],
            lanes[2:],
            dtype=self._dtype(node, lanes[0]),
            valid=excluded.valid,
            tied=excluded.tied,
            known=KnownValues(
                excluded.by_reason, self._hidden.of(node), node in self._exactness, settled_sources(node, env)
            ),
            relative_floor=self.relative_floors.get(node.name, 0.0),
            remember=partial(self.relative_floors.__setitem__, node.name),
        )
        if node in self._outputs:
            reference.measure_floor()
        return reference


def _without_values(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _generator(*key: object) -> torch.Generator:
    """Noise of one place; the same in every process, unlike `hash` of a string."""
    return torch.Generator().manual_seed(crc32(repr(key).encode()))
