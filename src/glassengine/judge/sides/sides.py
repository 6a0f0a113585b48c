"""Implementations under judgement. A side runs the steps of a case and gives the values of a step by baseline node."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch import nn

from glassengine.capture.observers.hooks import observing
from glassengine.capture.observers.interpreter import run_program
from glassengine.engine.run.engine import Engine
from glassengine.engine.run.session import Session
from glassengine.errors import GlassError, IncomparableError
from glassengine.judge.cases import Case, StepInputs, taken_by
from glassengine.judge.end_to_end import results_of
from glassengine.judge.exclusions.padding import valid_in_step
from glassengine.judge.graphs.by_name import SitePair
from glassengine.judge.replay.op import Replay
from glassengine.judge.replay.region import RegionReplay
from glassengine.judge.replay.segment import SegmentReplay
from glassengine.judge.sides.arguments import Arguments
from glassengine.judge.sides.arranged import Arranged
from glassengine.judge.sides.until_here import until_here
from glassengine.program.export.export import named_inputs
from glassengine.program.kinds.causal_lm import accepted, cache_argument, expert_modules
from glassengine.program.kinds.states import cache_tensors, forget
from glassengine.program.representation.program import Program
from glassengine.program.representation.signature import named_results
from glassengine.program.user_code.module_state import ModuleState, run_with
from glassengine.program.user_code.raised import described, raised_in

Level = Literal["op", "segment", "result"]
"""What a side was observed at: every op that it has, module outputs, or results alone."""


@dataclass(frozen=True)
class Observed:
    """One value of a side: the tensor, the side's own site for it, and how it was paired."""

    tensor: torch.Tensor
    site: str
    method: str


class Side(Protocol):
    """One implementation. `rung` names it on screen; `guarantee` says in words what its verdicts can promise."""

    rung: str
    guarantee: str
    level: Level

    def begin(self, case: Case) -> None:
        """Forget everything of an earlier case."""

    def step(self, inputs: StepInputs | Mapping[str, Any]) -> None:
        """Run one step; afterwards `observed` answers for it."""

    def observed(self, node: str) -> list[Observed]:
        """Return this side's values of the baseline program's `node` in the current step.

        Several, where a module passes on what another one made and both were observed; none, where it has no such
        tensor.
        """

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return what came out of the current step, by this side's own names and in its order, caches left out."""


@dataclass
class ModuleSide:
    """A user's module, untouched: transformers' own cache and masks; observed at module outputs and taps.

    Args:
        module: In evaluation mode.
        program: Baseline program, whose sites say which node a module output is.
        rung: Name on screen.
        replay: Judges the segments between module outputs; None leaves the accumulated floor.
        beside: Of a candidate: the untouched baseline, which runs each step before it.
        arguments: How inputs become arguments of its forward; None where they have the same names.
        state: What it remembers before a step, where a forward changes that.

    Attributes:
        logits: Of the last step, [B, S, V].
        reordered: Path prefixes that are left out: inside of experts, which the program computes in another order.
    """

    module: nn.Module
    program: Program
    rung: str = "program"
    replay: SegmentReplay | None = None
    guarantee: str = "judged by segments"
    beside: ModuleSide | None = None
    arguments: Arguments | None = None
    state: ModuleState | None = None
    logits: torch.Tensor | None = None
    level: Level = field(default="segment", kw_only=True)
    _results: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _values: dict[str, torch.Tensor] = field(default_factory=dict)
    _cache: Any = None
    _steps: int = 0

    def begin(self, case: Case) -> None:
        """Start with an empty cache."""
        self._cache = None
        self._values, self._results = {}, {}
        self._steps = 0
        if self.replay is not None:
            self.replay.begin()

    def step(self, inputs: StepInputs | Mapping[str, Any]) -> None:
        """Run one forward, as `generate()` would.

        Raises:
            IncomparableError: The forward raised.
        """
        self._values, self._results = {}, {}
        try:
            self._run(inputs)
        except GlassError:
            raise
        except Exception as error:
            self._raise(error)
        if self.replay is not None:
            named = inputs.named() if isinstance(inputs, StepInputs) else named_inputs(inputs)
            if self.program.layout is not None and self._steps == 0:
                named |= empty_caches(self.program, named)
            # What is left of this step is run when the next one begins, and stands on tensors of this one.
            self.replay.begin_step(named, copy.copy(self)._last, partial(valid_in_step, self.program, inputs))
        self._steps += 1

    def _raise(self, error: Exception) -> NoReturn:
        """Say where a forward raised, and how far it was right."""
        path = raised_in(error, self.module)
        if path is None:
            raise error
        who = "baseline" if self.beside is None else "candidate"
        raise IncomparableError(
            f"the {who} cannot run: its forward raised in {path or type(self.module).__name__}, in {self._where()}",
            got=described(error),
            hint=None if self.beside is None else until_here(self._values, self.beside._values),
        ) from error

    def _where(self) -> str:
        if self.program.kind != "causal_lm":
            return f"step {self._steps}"
        return f"decode step {self._steps}" if self._steps else "step 0 (prefill)"

    def _last(self, node: str) -> torch.Tensor | None:
        found = self.observed(node)
        return found[-1].tensor if found else None

    def _run(self, inputs: StepInputs | Mapping[str, Any]) -> None:
        with torch.no_grad(), observing(self.module, self._keep, called_as=self.program.called_as):
            if not isinstance(inputs, StepInputs):
                self._results = named_results(self.forward(inputs))
                return
            seen = int(inputs.cache_position[-1]) + 1
            self.logits, caches = self.decode(inputs, seen)
            self._results = {"logits": self.logits}
        for past, tensor in cache_tensors(caches).items():
            present = self.program.caches.get(past)
            # A window that slides holds the newest slots only.
            if present is not None and (tensor.shape[-2] == seen or not past.startswith(("past_key", "past_value"))):
                self._values[f"node:{self.program.output_nodes[present]}"] = tensor

    def forward(self, inputs: Mapping[str, Any]) -> Any:
        """Run a forward that nothing follows, and return what it returns."""
        given = taken_by(self.module, inputs) if self.arguments is None else self.arguments.of(inputs)
        return run_with(self.module, self.state, given)

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return what the forward returned."""
        return self._results

    def decode(self, inputs: StepInputs, seen: int) -> tuple[torch.Tensor, Any]:
        """Run one step with transformers' own cache.

        Args:
            inputs: Of the step.
            seen: Slots of the cache in use.

        Returns:
            Logits [B, S, V], and the cache of the decoder after it.
        """
        from transformers import DynamicCache

        if self._cache is None:
            self._cache = DynamicCache(config=self.module.config.get_text_config(decoder=True))  # type: ignore[union-attr, operator]
        assert self.program.layout is not None
        # To a recurrence padding is a token like any other: a row begins when its first real token comes.
        forget(self._cache, ~inputs.attention_mask[:, : seen - 1].any(1))
        arguments = {
            "input_ids": inputs.input_ids,
            "attention_mask": inputs.attention_mask[:, :seen] if self.program.layout.attention_layers else None,
            "position_ids": inputs.position_ids,
            cache_argument(self.module): self._cache,
            "use_cache": True,
        }
        return self.module(**accepted(self.module, arguments)).logits, self._cache

    def __post_init__(self) -> None:
        self.reordered = tuple(f"{path}." for path in expert_modules(self.module))

    def _keep(self, site: str, tensor: torch.Tensor) -> None:
        if not site.startswith(self.reordered):
            self._values[site] = tensor.clone()

    def observed(self, node: str) -> list[Observed]:
        """Return the values of all module outputs and taps that name `node`."""
        found = []
        for site in self.program.sites.by_node.get(node, ()):
            key = f"node:{node}" if site.kind == "kv" else site.name
            if site.kind != "op" and key in self._values:
                found.append(Observed(self._values[key], site.name, "name"))
        return found


@dataclass
class ProgramSide:
    """A program interpreted: the candidate's own export, or the baseline's after a pass.

    Args:
        program: With weights.
        pairs: Baseline node -> pair.
        rung: Name on screen.
        replay: Replays ops of the baseline on this side's values; None when the two sides differ in dtype.
        counterparts: Baseline node -> node of `program`, where `pairs` are a part of them.
        arranged: Gives tensors the baseline's dimensions.
    """

    program: Program
    pairs: Mapping[str, SitePair]
    rung: str
    replay: Replay | None = None
    guarantee: str = "judged op by op"
    counterparts: Mapping[str, str] = field(default_factory=dict)
    level: Level = field(default="op", kw_only=True)
    arranged: Arranged = field(default_factory=Arranged, kw_only=True)
    _values: dict[str, torch.Tensor] = field(default_factory=dict)
    _results: Mapping[str, torch.Tensor] = field(default_factory=dict)
    _caches: dict[str, torch.Tensor] = field(default_factory=dict)
    _wanted: set[str] = field(default_factory=set)

    def begin(self, case: Case) -> None:
        """Start with an empty cache."""
        self._values, self._caches = {}, {}
        if isinstance(self.replay, RegionReplay):
            self.replay.begin()

    def step(self, inputs: StepInputs | Mapping[str, Any]) -> None:
        """Interpret one step."""
        named = inputs.named() if isinstance(inputs, StepInputs) else named_inputs(inputs)
        if self.program.layout is not None and not self._caches:
            self._caches = empty_caches(self.program, named)
        self._values = {}
        self._wanted = {pair.candidate.node for pair in self.pairs.values()}
        outputs = self.run({**named, **self._caches})
        self.arranged.begin_step({**named, **self._caches})
        if self.replay is not None:
            by_node = {node: pair.candidate.node for node, pair in self.pairs.items()}
            values = {
                ours: self.arranged(ours, self._values[own]) for ours, own in by_node.items() if own in self._values
            }
            self.replay.begin_step({**named, **self._caches}, values)
            _begin_regions(self.replay, inputs, named)
        self._caches = {past: outputs[present] for past, present in self.program.caches.items()}
        self._results = {name: outputs[name] for name in results_of(self.program)}

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return what the program returned."""
        return self._results

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one step, handing every computed node to `keep`; return the program's outputs by name."""
        return run_program(self.program, inputs, self.keep)

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
class EngineSide:
    """An engine, driven by its session as `glass run` drives it.

    Args:
        engine: With debug outputs, or (a release engine) without.
        nodes: Baseline node -> (name of the engine's output, the engine's own site, how they were paired).
        rung: Name on screen.
        guarantee: Likewise.
        replay: Replays ops of the baseline on this side's values; None where too few are observed (a release engine).
        counterparts: Baseline node -> node of the engine's program, observed or not.
        arranged: Gives tensors the baseline's dimensions.
    """

    engine: Engine
    nodes: Mapping[str, tuple[str, str, str]]
    rung: str
    guarantee: str = "judged op by op"
    replay: Replay | None = None
    counterparts: Mapping[str, str] = field(default_factory=dict)
    level: Level = field(default="op", kw_only=True)
    arranged: Arranged = field(default_factory=Arranged, kw_only=True)
    _session: Session | None = None
    _case: Case | None = None
    _prompt: Iterator[torch.Tensor] = field(default_factory=lambda: iter(()))
    _values: dict[str, torch.Tensor] = field(default_factory=dict)

    def begin(self, case: Case) -> None:
        """Open a session for the case."""
        if isinstance(self.replay, RegionReplay):
            self.replay.begin()
        self._case = case
        self._session = None
        if case.input_ids is not None:
            pasts = list(self.engine.manifest.caches) if self.replay is not None else []
            constants = case.constants or None
            self._session = self.engine.session(case.batch, case.cache_length, debug=pasts, constants=constants)
            self._prompt = self._session.prefill_steps(case.input_ids, case.attention_mask)

    def step(self, inputs: StepInputs | Mapping[str, Any]) -> None:
        """Run one step."""
        assert self._case is not None
        names = {name for name, _, _ in self.nodes.values()}
        if not isinstance(inputs, StepInputs):
            results = self.engine(**inputs)
            self._values = {name: results[name] for name in names}
            self.arranged.begin_step(named_inputs(inputs))
            self._replay_from(named_inputs(inputs), {}, inputs)
            return
        assert self._session is not None
        if next(self._prompt, None) is None:
            self._session.decode(inputs.input_ids)
        self._values = dict(self._session.read(names))
        self.arranged.begin_step(inputs.named())
        if self.replay is not None:
            self._replay_from(inputs.named(), self._session.read(self.engine.manifest.caches), inputs)

    def _replay_from(
        self, named: Mapping[str, Any], caches: Mapping[str, Any], inputs: StepInputs | Mapping[str, Any]
    ) -> None:
        if self.replay is not None:
            values = {node: self.arranged(node, self._values[name]) for node, (name, _, _) in self.nodes.items()}
            self.replay.begin_step({**named, **caches}, values)
            _begin_regions(self.replay, inputs, named)

    def observed(self, node: str) -> list[Observed]:
        """Return the engine's tensor for `node`."""
        if node not in self.nodes:
            return []
        name, site, method = self.nodes[node]
        return [Observed(self.arranged(node, self._values[name]), site, method)]

    def results(self) -> Mapping[str, torch.Tensor]:
        """Return those results of the engine that were read."""
        manifest = self.engine.manifest
        caches = set(manifest.caches.values())
        # A result may have been read as the debug output that it is as well.
        added = {entry.node: entry.name for entry in manifest.added_outputs}
        names = {e.name: (e.name, added.get(e.node, e.name)) for e in manifest.outputs if e.name not in caches}
        read = {name: next((own for own in owns if own in self._values), None) for name, owns in names.items()}
        return {name: self._values[own] for name, own in read.items() if own is not None}


def by_node(side: Side, program: Program) -> dict[str, torch.Tensor]:
    """Return the results of a side that is observed by the names of the baseline's own nodes."""
    found = {name: side.observed(program.output_nodes[name]) for name in results_of(program)}
    return {name: several[-1].tensor for name, several in found.items() if several}


def _begin_regions(replay: Replay, inputs: StepInputs | Mapping[str, Any], named: Mapping[str, Any]) -> None:
    """Let a replay that knows regions take over a step, too; `named` are the inputs by name, without caches."""
    if isinstance(replay, RegionReplay):
        ours = replay.program
        caches = empty_caches(ours, named) if ours.layout is not None else {}
        replay.begin_region_step({**named, **caches}, partial(valid_in_step, ours, inputs))


def empty_caches(program: Program, named: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return zeroed caches for the batch and cache length of `named`."""
    assert program.layout is not None
    dtype = next(getattr(torch, port.dtype) for port in program.inputs if port.name in program.caches)
    batch, length = named["attention_mask"].shape
    return program.layout.allocate(batch, length, dtype)
