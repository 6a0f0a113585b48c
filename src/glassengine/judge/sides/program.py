"""Runs a program node by node: a candidate's own export, the baseline's after a pass, or a stored file as it is.

Nodes may be compiled alone (`OpByOpSide`), and tensors of the baseline may take the place of wrong ones (`Grafts`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node

from glassengine.backends.calibration import kernels_of
from glassengine.capture.observers import run_program
from glassengine.errors import BackendError, UnknownNameError, UsageError, first_line
from glassengine.frontends.eager_debug import OpRunner
from glassengine.judge.cases import Case, Given, StepInputs, by_name, empty_caches
from glassengine.judge.end_to_end import results_of
from glassengine.judge.pieces import AnyLayout, cut
from glassengine.judge.replay.replay import Cut, Replay
from glassengine.judge.sides.arguments import Arguments
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.protocol import RUNTIME, Arranged, Guarantee, Observed, Place, Side
from glassengine.judge.site_pairs import SitePair
from glassengine.numerics.float64 import Accumulation
from glassengine.program import LoadedModel
from glassengine.program.representation.program import Program

_WHILE = re.compile(r"While executing (%\w+)")
"""What torch.fx adds to an exception: the node."""


@dataclass
class ProgramSide(Side):
    """A program interpreted: the candidate's own export, or the baseline's after a pass.

    Args:
        program: With weights.
        pairs: Baseline node -> its counterpart in `program`.
        replay: Replays ops of the baseline on this side's values; None leaves the accumulated floor.
        grafts: Tensors of the baseline that take the place of its own; None for none.
        remembered: What its module remembered before the step, by baseline node, where the baseline's did the same.
    """

    program: Program = field()
    pairs: Mapping[str, SitePair] = field()
    replay: Replay | None = field(default=None, kw_only=True)
    remembered: Mapping[str, torch.Tensor] = field(default_factory=dict, kw_only=True)
    grafts: Grafts | None = field(default=None, kw_only=True)
    _values: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    _caches: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    _wanted: frozenset[str] = field(default=frozenset(), init=False)

    def begin(self, case: Case) -> None:
        """Start with an empty cache."""
        super().begin(case)
        self._values, self._caches = {}, {}
        self._wanted = self.observable()

    def observable(self) -> frozenset[str]:
        """Return the nodes of `program` whose values are kept."""
        return frozenset(self.counterparts.values())

    def step(self, inputs: Given) -> None:
        """Interpret one step."""
        named = by_name(inputs)
        self._caches = self._caches or empty_caches(self.program, named)
        fed = {**named, **self._caches}
        self._values = {}
        outputs = self.run(fed)
        self.hand_over(inputs, fed, self._caches)
        self._caches = {past: outputs[present] for past, present in self.program.caches.items()}
        self._results = {name: outputs[name] for name in results_of(self.program)}

    def hand_over(self, inputs: Given, fed: Mapping[str, torch.Tensor], caches: Mapping[str, torch.Tensor]) -> None:
        """Give what was made in a step, of inputs and caches, to the replay."""
        self.arranged.begin_step(fed)
        if self.replay is not None:
            made = ((ours, own) for ours, own in self.counterparts.items() if own in self._values)
            values = {ours: self.arranged(ours, self._values[own]) for ours, own in made}
            self.replay.begin_step(inputs, {**values, **self.remembered}, caches)

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one step, handing every computed node to `keep`; return the program's outputs by name."""
        if self.grafts is not None:
            return self.grafts.run(self.program, inputs, self.keep)
        try:
            return run_program(self.program, inputs, self.keep)
        except RuntimeError as error:
            if self.program.onnx is None:
                raise
            got = f"{first_line(error)}, {next(iter(_WHILE.findall(str(error))), '')}".rstrip(", ")
            raise BackendError(f"the graph of the {self.place} cannot run on these inputs", got=got) from error

    def keep(self, node: torch.fx.Node, value: Any) -> None:
        """Take note of the value of a node of this side's program."""
        if node.name in self._wanted:
            self._values[node.name] = value

    def observed(self, node: str) -> list[Observed]:
        """Return the value of the op paired with `node`."""
        pair = self.pairs.get(node)
        if pair is None or pair.candidate.node not in self._values:
            return []
        return [Observed(self.arranged(node, self._values[pair.candidate.node]), pair.candidate.name, pair.method)]


@dataclass
class OpByOpSide(ProgramSide):
    """The program, with the nodes of `alone` (None: all) compiled one by one by `runner`; only these are observed."""

    runner: OpRunner = field(kw_only=True)
    alone: frozenset[str] | None = field(kw_only=True)

    def observable(self) -> frozenset[str]:
        """Return the nodes that are compiled alone and have a counterpart."""
        known = super().observable()
        return known if self.alone is None else known & self.alone

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Interpret one step; see `ProgramSide.run`."""
        results = self.program.interpreted(_Alone(self), inputs)
        return {name: results[node] for name, node in self.program.output_nodes.items()}


class _Alone(AnyLayout):
    def __init__(self, side: OpByOpSide) -> None:
        super().__init__(side.program.exported.graph_module)
        self._side = side

    def run_node(self, n: Node) -> Any:
        side = self._side
        is_alone = side.alone is None or n.name in side.alone
        if n.op != "call_function" or not is_alone or not isinstance(n.target, torch._ops.OpOverload):
            value = super().run_node(n)
        else:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            value = side.runner.run(n.target, args, kwargs, n.meta)
        if n.op == "call_function":
            side.keep(n, value)
        return value


@dataclass
class SourceSide(Side):
    """A stored program as it is: an ONNX file run without optimization, or the graph of a .pt2 file.

    Args:
        module: Gives the values of a step by op site.
        program: The baseline program, which is this side's own as well.
        replay: Judges each op.
    """

    module: Any
    program: Program = field(kw_only=True)
    replay: Replay = field(kw_only=True)
    place: Place = field(default=Place.SOURCE, kw_only=True)
    _values: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    _returned: Mapping[str, torch.Tensor] = field(default_factory=dict, init=False)

    @cached_property
    def counterparts(self) -> Mapping[str, str]:
        """Every node is its own."""
        return {site.node: site.node for site in self.program.sites if site.kind == "op"}

    def chooser(self) -> ModuleSide:
        """Return a side of the same module, to be run without being judged."""
        return ModuleSide(self.module, self.program)

    def step(self, inputs: Given) -> None:
        """Run the file once."""
        assert not isinstance(inputs, StepInputs)
        with torch.no_grad():
            found = self.module.values(inputs)
            # Of an ONNX file as a user runs it: in a session of its own.
            self._returned = self.module.returned(inputs, found) if hasattr(self.module, "returned") else {}
        sites = self.program.sites
        self._values = {site.node: found[site.name] for site in sites if site.kind == "op" and site.name in found}
        self.replay.begin_step(inputs, self._values)

    def observed(self, node: str) -> list[Observed]:
        """Return the value of `node`."""
        if node not in self._values:
            return []
        return [Observed(self._values[node], self.program.sites.by_node[node][0].name, "name")]

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return the results of the file."""
        return {name: self._returned.get(name, one) for name, one in self.results_by_node(self.program).items()}


def untouched(model: LoadedModel, program: Program, arguments: Arguments | None = None) -> ModuleSide | SourceSide:
    """Return the side of the baseline itself.

    Args:
        model: The baseline.
        program: Its export, or the stored program.
        arguments: How inputs become arguments of a module's forward.
    """
    if model.stored is None:
        segments = Replay(program, cut=Cut.SEGMENT)
        return ModuleSide(model.module, program, replay=segments, state=model.state, arguments=arguments)
    if program.onnx is not None:  # run by kernels of its own
        accumulation = Accumulation(kernels=kernels_of(RUNTIME))
        replay = Replay(program, compiled=True, wide_operands="products", accumulation=accumulation)
        return SourceSide(model.module, program=program, replay=replay)
    return SourceSide(model.module, program=program, replay=Replay(program), guarantee=Guarantee.STORED_OPS)


class Grafts:
    """Grafted tensors of a candidate's program.

    Args:
        baseline: The baseline's program.
        pairs: Baseline node -> its counterpart in the candidate.
        arranged: Arranges the candidate's tensors as the baseline has them.
        sites: Sites of the baseline or of the candidate.

    Raises:
        UnknownNameError: A site is of no op that both have.
        UsageError: The candidate has the tensor in other dimensions.
    """

    def __init__(
        self, baseline: Program, pairs: Mapping[str, SitePair], arranged: Arranged, sites: Collection[str]
    ) -> None:
        self._baseline, self._pairs, self._arranged = baseline, pairs, arranged
        ours = {site.name: node for node in pairs for site in baseline.sites.by_node.get(node, ())}
        theirs = {pair.candidate.name: node for node, pair in pairs.items()}
        self._grafted: dict[str, Node] = {}
        for site in sites:
            node = ours.get(site, theirs.get(site))
            if node is None:
                raise UnknownNameError("op of both sides", site, [*ours, *theirs], hint="--graft SITE=baseline")
            if arranged.is_arranged(node):
                raise UsageError(
                    "a tensor in other dimensions cannot be grafted", got=site, hint="graft an op below it"
                )
            self._grafted[pairs[node].candidate.node] = baseline.node(node)

    def run(
        self, program: Program, inputs: Mapping[str, torch.Tensor], keep: Callable[[Node, Any], None]
    ) -> dict[str, torch.Tensor]:
        """Interpret a step of the candidate, with the grafts; arguments are those of `run_program`."""
        wanted = {pair.candidate.node: node for node, pair in self._pairs.items()}
        weights = self._baseline.weights()
        known: dict[str, Any] = {port.node: inputs[port.name] for port in self._baseline.inputs if port.name in inputs}

        def graft(node: Node, value: Any) -> Any:
            if node.name in self._grafted:
                values = {**weights, **known}
                piece = cut([self._grafted[node.name]], values, values.keys())
                made = None if piece is None else piece.run()[0]
                if isinstance(made, torch.Tensor) and isinstance(value, torch.Tensor) and made.shape == value.shape:
                    value = made.to(value.dtype)
            if node.name in wanted and isinstance(value, torch.Tensor):
                known[wanted[node.name]] = self._arranged(wanted[node.name], value)
            return value

        self._arranged.begin_step(inputs)
        return run_program(program, inputs, keep, graft)
