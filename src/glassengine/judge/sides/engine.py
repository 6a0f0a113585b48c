"""Runs an engine by its session, as `glass run` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from glassengine.engine.run.engine import Engine
from glassengine.engine.session.session import Session
from glassengine.judge.cases import Case, Given, StepInputs, by_name
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.protocol import Observed, Side
from glassengine.program.representation.program import Program


@dataclass
class EngineSide(Side):
    """An engine.

    Args:
        engine: With debug outputs, or (a release engine) without.
        nodes: Baseline node -> (name of the engine's output, the engine's own site, how they were paired).
        program: What it was built from.
        pairs: Of the baseline and `program`; empty for an engine that is judged at its results.
        replay: Replays ops of the baseline on this side's values; None where too few are observed (a release engine).
    """

    engine: Engine
    nodes: Mapping[str, tuple[str, str, str]]
    program: Program = field(kw_only=True)
    replay: Replay | None = field(default=None, kw_only=True)
    _session: Session | None = field(default=None, init=False)
    _case: Case | None = field(default=None, init=False)
    _prompt: Iterator[torch.Tensor] = field(default_factory=lambda: iter(()), init=False)
    _values: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    @property
    def backend(self) -> str | None:
        """The back-end that the engine was built by."""
        return self.engine.manifest.backend

    def countable(self, baseline: Program) -> set[str]:
        """Return the outputs of the engine that the baseline has."""
        return set(self.nodes)

    def begin(self, case: Case) -> None:
        """Open a session for the case."""
        if self.replay is not None:
            self.replay.begin()
        self._case = case
        self._session = None
        if case.input_ids is not None:
            pasts = list(self.engine.manifest.caches) if self.replay is not None else []
            constants = case.constants or None
            self._session = self.engine.session(case.batch, case.cache_length, debug=pasts, constants=constants)
            self._prompt = self._session.prefill_steps(case.input_ids, case.attention_mask)

    def step(self, inputs: Given) -> None:
        """Run one step."""
        assert self._case is not None
        names = {name for name, _, _ in self.nodes.values()}
        named = by_name(inputs)
        caches: Mapping[str, torch.Tensor] = {}
        if not isinstance(inputs, StepInputs):
            results = self.engine(**inputs)
            self._values = {name: results[name] for name in names}
        else:
            assert self._session is not None
            if next(self._prompt, None) is None:
                self._session.decode(inputs.input_ids)
            self._values = dict(self._session.read(names))
            if self.replay is not None:
                caches = self._session.read(self.engine.manifest.caches)
        self.arranged.begin_step(named)
        if self.replay is not None:
            values = {node: self.arranged(node, self._values[name]) for node, (name, _, _) in self.nodes.items()}
            self.replay.begin_step(inputs, values, caches)

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
