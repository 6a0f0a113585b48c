"""A record of a run of several processes as candidate of a check: its parts are put together, step by step.

What a tensor is a part of, the unchanged model's own tensor of the same step tells, as for a comparison with a
recording of one process. What is put together is then judged by segments: an error counts where it was made, and the
part that is not what its own inputs make of it names the rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from glassengine.compare.matching.sources import OfRank
from glassengine.compare.ranks.assembly import COPIES, EXPLAINED, error_of
from glassengine.compare.ranks.hints import of_parts
from glassengine.compare.ranks.ranks import AssembledRanks
from glassengine.errors import UsageError
from glassengine.judge.cases import Case, Given, StepInputs, by_name
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.program import SourceSide
from glassengine.judge.sides.protocol import Observed
from glassengine.judge.sides.recorded import RecordedModules, RecordedTensors
from glassengine.judge.site_pairs import walk
from glassengine.program.representation.program import Program
from glassengine.recording.layout.layout import Entry
from glassengine.recording.layout.tensors import dtype_name
from glassengine.recording.source import TensorSource
from glassengine.results import Hint, Skipped
from glassengine.sites import Site

_INPUT = ".:in"
_SEVERAL = torch.empty(0, 0)
"""In place of a tensor that is another one in each rank: nothing is computed from it."""
_LINEAR = (torch.ops.aten.linear.default,)
_ROUNDINGS = 64
"""Units of rounding by which copies of one tensor may differ."""


def first_rank(source: TensorSource) -> TensorSource:
    """Return what the first of several processes recorded; the source itself where there is one.

    Raises:
        UsageError: The record of several processes does not say what they were given.
    """
    ranks = sorted({entry.rank for entry in source.entries})
    if len(ranks) < 2:
        return source
    if not any(entry.site.startswith(_INPUT) for entry in source.entries):
        raise UsageError(
            "a record of several ranks is not judged with the model: it does not say what the ranks were given",
            got=f"{source.path}: ranks {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}",
            expected="what glass.record wrote in each rank, or a record of one process",
            hint="record the model in one process, and: glass compare THAT_RECORD THIS_ONE",
        )
    return OfRank(source, ranks[0])


@dataclass
class ModelStep:
    """What the unchanged model was given and made in the present step, as a source."""

    path: Path
    entries: Sequence[Entry] = ()
    values: Mapping[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    complete: bool = True
    skipped: Sequence[Skipped] = ()

    def begin(self, step: int, values: Mapping[str, Tensor]) -> None:
        """Go on to the next step."""
        self.values = values
        self.entries = tuple(
            Entry(site, step, 0, dtype_name(tensor.dtype), tuple(tensor.shape)) for site, tensor in values.items()
        )

    def tensor(self, entry: Entry) -> Tensor:
        """Return one of the present tensors."""
        return self.values[entry.site]


class TensorsOfRanks(RecordedTensors):
    """The tensors of a record of several processes, put together.

    Args:
        source: The record.
        program: The baseline's.
        model: The unchanged baseline, which runs each step ahead of the record.
        case: What is run.

    Attributes:
        impossible: Site -> why its parts are not put together.

    Raises:
        IncomparableError: Nothing in it has a name that the program knows.
        UsageError: The processes were given data of their own.
    """

    def __init__(self, source: TensorSource, program: Program, model: ModuleSide | SourceSide, case: Case) -> None:
        self._program, self._model = program, model
        self._whole = ModelStep(source.path)
        self.impossible: dict[str, str] = {}
        # Whether a node's parts are shares of a sum that is not made yet, and whether each rank has another one.
        self._standing: dict[tuple[int, str], tuple[bool, bool]] = {}
        inputs: Given = StepInputs.first(case) if case.input_ids is not None else case.steps[0]
        model.begin(case)
        model.step(inputs)
        self._whole.begin(0, self._made(inputs))
        self.together = AssembledRanks(source, self._whole)
        super().__init__(self.together, program)
        self.called = {}
        self._require_same_inputs(source)

    def begin_step(self, step: int, inputs: Given) -> None:
        """Take over a step that the unchanged model has just run."""
        self._whole.begin(step, self._made(inputs))
        wholes = {entry.site: entry for entry in self._whole.entries}
        for name in (name for name in wholes if name.startswith(_INPUT)):
            self._expect(name, step, wholes[name])
        for site in self._program.sites:
            found = self.names(site)
            if found is not None and site.name in wholes:
                self._expect(found[0][0], step, wholes[site.name])

    def results(self, step: int, inputs: Given) -> dict[str, Tensor]:
        """Return nothing: results of several ranks are put together like all their tensors."""
        return {}

    def _expect(self, name: str, step: int, whole: Entry) -> None:
        entry = self._places.get((name, step))
        if entry is not None:
            self.together.expect(entry, self._whole, whole)

    def _read(self, site: Site, step: int) -> Observed | None:
        entry = self._entry(site, step)
        if entry is None:
            return None
        if (reason := self.together.why_not(entry)) is not None:
            at = site.axes.get("sequence")
            whole = next((one.shape for one in self._whole.entries if one.site == site.name), ())
            if at is not None and len(whole) == len(entry.shape) > at and entry.shape[at] < whole[at]:
                self.partial.add(site.name)
            else:
                self.impossible[site.name] = reason
            return None
        return Observed(self.together.tensor(entry), entry.site, "name")

    def blamed(self, node: Node, site: Site, step: int, expected: Tensor) -> tuple[int | None, tuple[Hint, ...]]:
        """Return which rank has the tensor of a node wrong, and what explains it."""
        entry = self._entry(site, step)
        if entry is None or expected.shape != (made := self.together.tensor(entry)).shape:
            return None, ()
        rank, hints = of_parts(self.together, entry, expected)
        is_one = self.together.standing(entry)[1]
        if rank is None and is_one and (found := self._wrong_term(node, step, made, expected)) is not None:
            return found[0], (found[1], *hints)
        return rank, hints

    def is_split(self, entry: Entry) -> bool:
        """Whether ranks that should have the same tensor go on with others: what they make of it has no one cause."""
        assembly, _ = self.together.assembly(entry)
        if not assembly.differ or assembly.kind != COPIES:
            return False
        size = max(float(part.tensor.double().square().mean().sqrt()) for part in assembly.parts)
        eps = torch.finfo(assembly.parts[0].tensor.dtype).eps if assembly.parts[0].tensor.is_floating_point() else 0.0
        return any(
            error_of(assembly.parts[one].tensor, assembly.parts[other].tensor) > _ROUNDINGS * eps * size
            for cell in assembly.cells()
            for one, other in itertools.pairwise(cell)
        )

    def _wrong_term(self, node: Node, step: int, made: Tensor, expected: Tensor) -> tuple[int, Hint] | None:
        """Return the one rank whose term explains a wrong sum of a linear op, and what it did; None without one."""
        read, weight = (one.name if isinstance(one, Node) else "" for one in (*node.args, None, None)[:2])
        entries, table = self._entries(read, step), self._program.weights().get(weight)
        if node.target not in _LINEAR or table is None or not entries:
            return None
        # Rank -> its columns of what the op reads, in the order of the weight's.
        parts = {rank: tensor.double() for rank, tensor, _ in self.together.local_parts(entries[0])}
        if len(parts) < 2 or sum(part.shape[-1] for part in parts.values()) != table.shape[1]:
            return None
        wide = expected.double()
        error = error_of(made, wide)
        for rank, text, added in _changes(table.double(), parts):
            if error_of(made, wide + added) <= EXPLAINED * error:
                return rank, Hint("other", f"rank {rank} {text}: that makes this sum, in all ranks", 0.95, "rank")
        return None

    def _entry(self, site: Site, step: int) -> Entry | None:
        found = self.names(site)
        return None if found is None else self._places.get((found[0][0], step))

    def note(self, step: int, nodes: Iterable[str]) -> set[str]:
        """Note what ranks have of the tensors of some nodes; return those that are another one in each rank."""
        split = set()
        for node in nodes:
            entries = self._entries(node, step)
            is_split = any(self.is_split(entry) for entry in entries)
            is_open = not is_split and any(self.together.standing(entry)[0] for entry in entries)
            self._standing[step, node] = is_open, is_split
            if is_split:
                split.add(node)
        return split

    def reject_unmade(self) -> bool:
        """Note which parts are shares of a sum that no rank made before it was read; return whether there are any."""
        found = [
            (step, node)
            for (step, node), (is_open, _) in self._standing.items()
            if is_open and any(self._standing[step, user][1] for user in self._readers(step, self._program.node(node)))
        ]
        for step, node in found:
            for entry in self._entries(node, step):
                self.together.reject(entry)
        return bool(found)

    def _readers(self, step: int, node: Node) -> Iterator[str]:
        """Yield the nearest nodes below that were recorded."""

        def is_recorded(one: Node) -> bool:
            return one is not node and (step, one.name) in self._standing

        below = walk([node], lambda one: () if is_recorded(one) else one.users)
        return (one.name for one in below if is_recorded(one))

    def _entries(self, node: str, step: int) -> list[Entry]:
        found = (self._entry(site, step) for site in self._program.sites.by_node.get(node, ()))
        return [entry for entry in found if entry is not None and self.together.why_not(entry) is None]

    def _made(self, inputs: Given) -> dict[str, Tensor]:
        """Return what the model was given and made in the present step, by site."""
        named = by_name(inputs)
        tensors = {f"{_INPUT}.{name}": tensor for name, tensor in named.items()}
        tensors |= {f"{_INPUT}[{place}]": tensor for place, tensor in enumerate(named.values())}
        made = self._model.module_outputs()
        for site in self._program.sites:
            key = f"node:{site.node}" if site.kind == "kv" else site.name
            if site.kind != "op" and key in made:
                tensors[site.name] = made[key]
        return tensors

    def _require_same_inputs(self, source: TensorSource) -> None:
        for entry in self.together.entries:
            if not entry.site.startswith(_INPUT) or entry.step:
                continue
            parts = [tensor for _, tensor, _ in self.together.local_parts(entry)]
            if any(not torch.equal(part, parts[0]) for part in parts[1:]):
                raise UsageError(
                    "the ranks of a record were given data of their own: there is no one run of the model to judge",
                    got=f"{source.path}: {entry.site} is another one in another rank",
                    expected="ranks that share the model (tensor, sequence, expert, pipeline parallel)",
                    hint=f"judge each rank by itself (--candidate {source.path}/rank0), or: glass compare ONE RANKS",
                )


@dataclass
class RecordedRanks(RecordedModules):
    """A record of module outputs and taps of several processes."""

    tensors: TensorsOfRanks = field(kw_only=True)

    def _run(self, inputs: Given) -> None:
        self.tensors.begin_step(self._steps, inputs)
        super()._run(inputs)

    def _made(self) -> dict[str, Tensor]:
        made = super()._made()
        return made | dict.fromkeys(self.tensors.note(self._steps, made), _SEVERAL)

    def blamed(self, node: Node, observed: Observed, expected: Tensor) -> tuple[int | None, tuple[Hint, ...]]:
        """Return the rank whose part is wrong, and what explains it."""
        site = self.baseline.sites.get(observed.site)
        return (None, ()) if site is None else self.tensors.blamed(node, site, self._steps - 1, expected)


def _changes(weight: Tensor, parts: Mapping[int, Tensor]) -> Iterator[tuple[int, str, Tensor]]:
    """Yield rank, what it does, and by how much the sum is another one then."""
    columns = dict(zip(parts, torch.split(weight, [part.shape[-1] for part in parts.values()], 1), strict=True))
    for rank, part in parts.items():
        term = part @ columns[rank].T
        for other, theirs in columns.items():
            if other != rank and theirs.shape == columns[rank].shape:
                yield rank, f"has the shard of rank {other} of the weight", part @ theirs.T - term
        yield rank, "adds nothing", -term
        yield rank, "adds its term twice", term
