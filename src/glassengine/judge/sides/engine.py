"""Runs an engine: of one process by its session, as `glass run` does, or all ranks side by side in this process.

Each rank runs its own program. A tensor that is cut is put together from the parts of all ranks, one that is whole must
be the same on each of them. So every op of every rank is judged by the program of one process on what the ranks
themselves fed to it. Where an op is wrong, the part or the term that is not what it should be names the rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.capture.observers import run_ranks
from glassengine.engine.run.engine import Engine
from glassengine.engine.session.session import Session
from glassengine.errors import IncomparableError
from glassengine.judge.cases import Case, Given, StepInputs, by_name, empty_caches
from glassengine.judge.end_to_end import results_of
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.program import ProgramSide
from glassengine.judge.sides.protocol import Collective, Observed, Side
from glassengine.numerics.mask_values import same_where
from glassengine.program.parallel.placements import Placement, ShardPlacement, shard_of, whole_of
from glassengine.program.parallel.rewrite import Layout, is_sum
from glassengine.program.parallel.stages import HANDED
from glassengine.program.representation.program import Program
from glassengine.results import Hint, Kind

_FAR = 1e-3
"""Share of its size by which a part that a mistake was made in differs at least; rounding is far below."""


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
        super().begin(case)
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
            is_prompt = next(self._prompt, None) is not None
            if not is_prompt:
                self._session.decode(inputs.input_ids)
            self._values = dict(self._session.read(names))
            if is_prompt and self.replay is None and self.engine.makes_kept_logits and "logits" in names:
                self._values["logits"] = self._with_last_alone(self._values["logits"])
            if self.replay is not None:
                caches = self._session.read(self.engine.manifest.caches)
        self.arranged.begin_step(named)
        if self.replay is not None:
            values = {node: self.arranged(node, self._values[name]) for node, (name, _, _) in self.nodes.items()}
            self.replay.begin_step(inputs, values, caches)

    def _with_last_alone(self, logits: Tensor) -> Tensor:
        """Return the logits of a prompt, those of the last token of a run that makes no others, as in a generation."""
        case = self._case
        assert case is not None and case.input_ids is not None
        session = self.engine.session(case.batch, case.cache_length, constants=case.constants or None)
        last = session.prefill(case.input_ids, case.attention_mask, keep=False)
        return torch.cat([logits[:, :-1], last], dim=1)

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


@dataclass
class RanksSide(ProgramSide):
    """The programs of all ranks.

    Args:
        parts: By stage, then by place within it, with weights.
        layout: Where everything of `program` lies within a stage; None where each layer is on one rank.
    """

    parts: Sequence[Sequence[Program]] = field(kw_only=True)
    layout: Layout | None = field(kw_only=True)
    _own: dict[tuple[int, int], dict[str, Tensor]] = field(default_factory=dict, init=False)
    _seen: list[dict[str, Any]] = field(default_factory=list, init=False)
    _sums: dict[int, dict[str, list[Tensor]]] = field(default_factory=dict, init=False)

    @property
    def places(self) -> int:
        """Ranks that share a layer."""
        return len(self.parts[0])

    def begin(self, case: Any) -> None:
        """Start with empty caches on every rank."""
        super().begin(case)
        self._own = {}

    def step(self, inputs: Given) -> None:
        """Run one step on all ranks."""
        named = by_name(inputs)
        whole = self._caches or empty_caches(self.program, named)
        self._seen = [dict(named) | dict(whole) for _ in range(self.places)]
        handed: list[dict[str, Tensor]] = [{} for _ in range(self.places)]
        for stage, programs in enumerate(self.parts):
            fed = [self._fed(stage, place, programs[place], named, handed[place]) for place in range(self.places)]
            self._sums[stage] = {}
            outputs = run_ranks(programs, fed, partial(self._note, stage))
            for place, found in enumerate(outputs):
                own = programs[place].caches
                self._own[stage, place] = {past: found[present] for past, present in own.items()}
                handed[place] = found
        self._values = self._wholes({node: node for node in self._wanted})
        self.hand_over(inputs, {**named, **whole}, whole)
        nodes = self.program.output_nodes
        self._caches = self._wholes({past: nodes[present] for past, present in self.program.caches.items()})
        self._results = {name: handed[0][name] for name in results_of(self.program) if name in handed[0]}

    def _fed(
        self, stage: int, place: int, program: Program, named: Mapping[str, Tensor], handed: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        fed = {**named, **handed, **(self._own.get((stage, place)) or _empty(program, named))}
        missing = [port.name for port in program.inputs if port.name not in fed]
        if missing or (stage == 0 and any(port.name.startswith(HANDED) for port in program.inputs)):
            raise IncomparableError(
                f"rank {stage * self.places + place} holds the part of another stage",
                got=f"it reads {', '.join(missing)}, which no rank before it makes",
                expected="stages in the order of the layers",
                hint="build the engine again: glass build MODEL --overwrite",
            )
        return fed

    def _note(self, stage: int, place: int, node: Node, value: Any) -> None:
        if is_sum(node):
            self._sums[stage].setdefault(node.name, []).append(value)
        if node.name in self._wanted or node.name.endswith("_partial"):
            self._seen[place][node.name] = value

    def collectives(self) -> Sequence[Collective]:
        """Return the sums of the terms of ops that are shared."""
        ours = {own: node for node, own in self.counterparts.items()}
        found = []
        for stage, sums in self._sums.items():
            for name, results in sums.items():
                term = self.parts[stage][0].node(name).all_input_nodes[0].name
                terms = [seen[term] for seen in self._seen if term in seen]
                node = ours.get(term.removesuffix("_partial"))
                if node is not None and len(terms) == len(results) == self.places:
                    found.append(Collective(node, name, stage * self.places, terms, results))
        return found

    def _cut(self, node: str) -> Placement:
        found = None if self.layout is None else self.layout.placed.get(node)
        return found if isinstance(found, ShardPlacement) else None

    def _parts_of(self, node: str) -> list[Tensor]:
        return [seen[node] for seen in self._seen if isinstance(seen.get(node), Tensor)]

    def _wholes(self, named: Mapping[str, str]) -> dict[str, Tensor]:
        """Return by the same names what the ranks have of nodes, put together; without what cannot be."""
        wholes = ((name, self._together(node)) for name, node in named.items())
        return {name: whole for name, whole in wholes if whole is not None}

    def _together(self, node: str) -> Tensor | None:
        parts, cut = self._parts_of(node), self._cut(node)
        if len(parts) < self.places:
            return None
        try:
            return parts[0] if cut is None else whole_of(parts, cut)
        except RuntimeError:
            return None  # parts of impossible sizes: what reads them is judged

    def observed(self, node: str) -> list[Observed]:
        """Return the value of the op paired with `node`, and those of ranks that should have the same and do not."""
        found = super().observed(node)
        own = self.counterparts.get(node)
        if not found or own is None or self._cut(own) is not None:
            return found
        first, *others = self._parts_of(own)
        return [
            *found,
            *(
                Observed(self.arranged(node, value), f"rank {self._rank(own, place)}: {found[0].site}", found[0].method)
                for place, value in enumerate(others, 1)
                if not same_where(value, first, None)
            ),
        ]

    def _rank(self, node: str, place: int) -> int:
        stage = next((n for n, row in enumerate(self.parts) if node in row[0].nodes), 0)
        return stage * self.places + place

    def blamed(self, node: Node, observed: Observed, expected: Tensor) -> tuple[int | None, tuple[Hint, ...]]:
        """Return the rank whose part or term is wrong, and what would make it right."""
        own = self.counterparts.get(node.name)
        parts = [] if own is None else self._parts_of(own)
        if own is None or len(parts) < self.places or observed.tensor.shape != expected.shape:
            return None, ()
        cut, step = self._cut(own), None if self.layout is None else self.layout.locals.get(own)
        if self.places == 1:
            return self._rank(own, 0), ()
        hints = tuple(self._hints(node, parts, cut, expected))
        should = dict.fromkeys(range(self.places), expected)
        if cut is not None:
            should = {place: shard_of(expected, cut, self.places, place) for place in should}
        elif step is not None and step.partial:
            terms = [(self._seen[place].get(f"{own}_partial"), self._term(own, place)) for place in should]
            known = [(made, term) for made, term in terms if made is not None and term is not None]
            if len(known) == self.places and any(_differs(made, term) for made, term in known):
                parts, should = [made for made, _ in known], dict(enumerate(term for _, term in known))
        wrong = [place for place, part in enumerate(parts) if _differs(part, should[place])]
        return (self._rank(own, wrong[0]) if len(wrong) == 1 else None), hints

    def _term(self, own: str, place: int) -> Tensor | None:
        """Return the term of a sum that a rank should have made of its own inputs."""
        assert self.layout is not None
        step = self.layout.locals[own]
        node = self.program.node(own)
        assert step is not None
        weights = self.program.weights()

        def part(item: Node) -> Tensor:
            want = step.wants.get(item)
            if item.name in weights:
                value, lies = weights[item.name], None
            else:
                value, lies = self._seen[place][item.name], self._cut(item.name)
            return value if want is None or want == lies else shard_of(value, want, self.places, place)

        try:
            if step.offset:
                table, rows = node.args[:2]
                assert isinstance(table, Node) and isinstance(rows, Node)
                count = weights[table.name].shape[0] // self.places
                given = self._seen[place][rows.name]
                inside = (given >= place * count) & (given < (place + 1) * count)
                rows_here: Tensor = weights[table.name][given] * inside.unsqueeze(-1)
                return rows_here
            args = [part(a) if isinstance(a, Node) else a for a in node.args]
            if step.addend is not None:
                args[step.addend] = torch.zeros_like(args[step.addend])  # type: ignore[arg-type]
            target: Any = node.target
            found: Tensor = target(*args, **node.kwargs)
            return found
        except (KeyError, RuntimeError):
            return None

    def _hints(self, node: Node, parts: Sequence[Tensor], cut: Placement, expected: Tensor) -> Iterator[Hint]:
        """Yield which mistake in sharing makes exactly this."""
        ranks = self.places
        if cut is not None:
            for turn in range(1, ranks):
                turned = [parts[(place + turn) % ranks] for place in range(ranks)]
                if not _differs(whole_of(turned, cut), expected):
                    yield Hint("swapped", "ranks have parts of each other", 1.0, proven=True)
            return
        if not _differs(torch.stack(list(parts)).sum(0), expected):
            yield _said("other", "all-reduce missing", "each rank has its own term: their sum is what is expected")
        for times in {ranks, ranks * ranks}:
            if not _differs(parts[0] / times, expected):
                yield _said("scale", "all-reduce doubled", f"{times} times what is expected")
        weights = self.program.weights()
        for item in node.all_input_nodes:
            bias = weights.get(self.counterparts.get(item.name, item.name))
            if bias is None or bias.dim() != 1 or bias.shape[-1] != expected.shape[-1]:
                continue
            if not _differs(parts[0] - (ranks - 1) * bias, expected):
                yield _said("scale", "bias repeated", "the bias is added on each rank: as often as there are ranks")


def _said(kind: Kind, evidence: str, text: str) -> Hint:
    return Hint(kind, text, 1.0, evidence, proven=True)


def _empty(program: Program, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    sizes = dict(zip(("batch", "cache"), named["attention_mask"].shape, strict=True))
    return {
        port.name: torch.zeros(
            [size if isinstance(size, int) else sizes[size] for size in port.shape], dtype=getattr(torch, port.dtype)
        )
        for port in program.inputs
        if port.name in program.caches
    }


def _differs(part: Tensor, share: Tensor) -> bool:
    if part.shape != share.shape:
        return True
    if not part.is_floating_point():
        return not torch.equal(part, share.to(part.dtype))
    share = share.to(torch.float64)
    error = (part.to(torch.float64) - share).abs().nan_to_num(torch.inf)
    return float(error.max() if error.numel() else 0.0) > _FAR * float(share.abs().max() if share.numel() else 1.0)
