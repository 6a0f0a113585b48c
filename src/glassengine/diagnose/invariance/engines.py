"""Runs an engine in different ways; what rounding does to it comes from its own program, interpreted."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from glassengine.capture.observers import run_program
from glassengine.diagnose.invariance.rows import PartMapping, same_under
from glassengine.diagnose.invariance.subjects import NUM_ROWS, InvarianceSubject, Results, differences, more_rows
from glassengine.diagnose.invariance.trace import TracedOp
from glassengine.diagnose.invariance.ways import SPARE, Way
from glassengine.diagnose.noise_floor import otherwise
from glassengine.engine.run.engine import Engine
from glassengine.engine.run.load import load
from glassengine.engine.session.loaded import LoadedEngine
from glassengine.engine.session.session import Session
from glassengine.errors import UsageError
from glassengine.executable.run.executable import Executable
from glassengine.program import load_inputs
from glassengine.results.without_tensors import BatchProof, What

_LENGTH = 37
_PRIMES = (7, 5, 3)
_FIXED = "the engine runs as it was built"


class EngineSubject(InvarianceSubject):
    """An engine of one process.

    Its operations are seen where they are outputs.

    Args:
        engine: Loaded.
        inputs: Keyword arguments of a call, or `input_ids`; None draws tokens for an engine that generates.
    """

    in_torch = False
    unseen = "build it with --add-output '*' to see which operation it is"

    def __init__(self, engine: Engine, inputs: Mapping[str, Any] | None) -> None:
        manifest = engine.manifest
        self.name, self._engine = str(engine.directory), engine
        self.decodes = manifest.generates
        self.refusals: Mapping[What, str] = dict.fromkeys(("compile", "attention", "threads", "world"), _FIXED)
        self.most_rows = int(manifest.max_batch_size or NUM_ROWS)
        self.prime = next((one for one in _PRIMES if one <= self.most_rows), 1)
        if self.decodes:
            self._tokens = self._drawn(inputs)
            self.length = self._tokens.shape[1]
            return
        if inputs is None:
            raise UsageError("the engine needs inputs", got=self.name, hint="--inputs FILE")
        self.refusals = {**self.refusals, **dict.fromkeys(("length", "padding"), "the engine does not generate")}
        self._pool = {name: more_rows(name, one) for name, one in inputs.items() if isinstance(one, Tensor)}
        try:
            self.run(Way())
        except UsageError:  # a size of 1 was never traced
            self.least_rows = 2

    def _drawn(self, inputs: Mapping[str, Any] | None) -> Tensor:
        if inputs is not None and isinstance(inputs.get("input_ids"), Tensor):
            return more_rows("input_ids", inputs["input_ids"].long())
        manifest = self._engine.manifest
        length = min(_LENGTH, int(manifest.max_seq_len or _LENGTH) - 25)
        generator = torch.Generator().manual_seed(0)
        return torch.randint(3, int(manifest.vocab_size or 0), (NUM_ROWS, length), generator=generator)

    def refusal(self, way: Way) -> str | None:
        """Return why rows cannot be run one way."""
        if len(way.rows) > self.most_rows:
            return f"batches of more than {self.most_rows} rows: the engine was built for no more"
        if way.right:
            return "padding on the right: an engine takes it on the left alone"
        return "the prefix of another request: an engine reuses none" if way.earlier == "prefix" else None

    def run(self, way: Way) -> Results:
        """Run rows one way."""
        return self._run(self._engine, way)[0]

    def noise(self, way: Way, seed: int) -> Results:
        """Return what rounding alone does to the results of the engine's program."""
        program = self._engine.program
        executable = Executable("interpreted", lambda inputs: run_program(program, inputs))
        twin = LoadedEngine(self._engine.directory, self._engine.manifest, executable, self._engine.sites)
        twin.program, twin.added_outputs = program, {}
        with otherwise(seed):
            noisy = self._run(twin, way)[0]
        return differences(noisy, self._run(twin, way)[0])

    def traced(self, way: Way, *, modules_only: bool, noise: int | None = None) -> tuple[Results, list[TracedOp]]:
        """Run rows, and return the outputs that were added, as operations."""
        return self._run(self._engine, way)

    def _run(self, engine: LoadedEngine, way: Way) -> tuple[Results, list[TracedOp]]:
        with way.settings():
            if way.earlier:
                self._run(engine, Way(rows=(3, 4), cuts=way.cuts))
            return self._generated(engine, way) if self.decodes else self._called(engine, way)

    def _called(self, engine: LoadedEngine, way: Way) -> tuple[Results, list[TracedOp]]:
        found = engine(**{name: one[list(way.rows)] for name, one in self._pool.items()})
        results = {name: one.clone() for name, one in found.items() if name not in self._engine.added_outputs}
        return [results], self._ops(engine, 0, found)

    def _generated(self, engine: LoadedEngine, way: Way) -> tuple[Results, list[TracedOp]]:
        tokens = nn.functional.pad(self._tokens[list(way.rows)], (way.left, 0), value=way.filler)
        mask = torch.ones_like(tokens)
        mask[:, : way.left] = 0
        session = Session(engine, len(tokens), tokens.shape[1], debug=sorted(engine.added_outputs) or False)
        first, *rest = way.cuts
        steps = [first + way.left]
        while rest and rest[0] > 1:
            steps.append(rest.pop(0))
        new = sum(steps)
        chunk = steps[0] if len(steps) > 1 else None
        session.prefill(tokens[:, :new], mask[:, :new], chunk=chunk)
        logits = session.read(["logits"])["logits"].clone()
        results: Results = [{"logits": one} for one in torch.split(logits, steps, dim=1)]
        ops = self._ops(engine, 0, session.debug_buffers) if chunk is None else []
        for i in range(len(rest)):
            results.append({"logits": session.decode(tokens[:, new + i]).clone()})
            ops += self._ops(engine, len(results) - 1, session.debug_buffers)
        return results, ops

    def _ops(self, engine: LoadedEngine, call: int, outputs: Mapping[str, Tensor]) -> list[TracedOp]:
        """Return the added outputs of a call, in the order of the program."""
        added = {one.site: one.name for one in engine.added_outputs.values() if one.name in outputs}
        sites = [site for site in engine.sites if site.name in added]
        return [
            TracedOp(call, site.name, site.op, _line(site.source), 0, outputs=[outputs[added[site.name]].clone()])
            for site in sites
        ]


def prove_batch_invariant(
    directory: str | Path, inputs: str | Mapping[str, Any] | None = None, *, num_batches: int = 200, seed: int = 0
) -> BatchProof:
    """Compare every row of random batches, in random order, with the row alone, bit for bit.

    Args:
        directory: Of an engine.
        inputs: As for `check_invariant`.
        num_batches: How many batches are drawn.
        seed: Of the draw.
    """
    given = load_inputs(inputs)[0] if isinstance(inputs, str) else inputs
    subject = EngineSubject(load(directory), given)
    draw = random.Random(seed)  # noqa: S311 - no secret
    cuts = (subject.length - 2, 1, 1) if subject.decodes else (1,)
    others = tuple(range(SPARE, SPARE + subject.least_rows - 1))
    alone = {row: subject.run(Way(rows=(row, *others), cuts=cuts)) for row in range(SPARE)}
    num_rows = 0
    for number in range(num_batches):
        size = draw.randint(subject.least_rows, min(subject.most_rows, SPARE))
        rows = tuple(draw.sample(range(SPARE), size))
        together = subject.run(Way(rows=rows, cuts=cuts))
        for place, row in enumerate(rows):
            view = PartMapping((1 + len(others), size), ((0,), (place,)))
            if not all(same_under(view, *calls) for calls in zip(alone[row], together, strict=True)):
                return BatchProof(False, number + 1, num_rows, f"row {row} at place {place} of {size}")
            num_rows += 1
    return BatchProof(True, num_batches, num_rows)


def _line(source: str | None) -> str | None:
    """Return file and line of a source, without the code that is there."""
    return None if source is None else source.split(maxsplit=1)[0].rstrip(":")
