"""A record as candidate of a check: what another program wrote down, judged without running it.

Tensors pair by the names of results, sites and nodes of the baseline's program, or by a map. A record with op sites is
judged op by op, one of modules by segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from glassengine.compare.matching.assembling import assembled
from glassengine.compare.matching.maps import Rule, TensorMap, steps_of
from glassengine.compare.matching.rules import pair_names
from glassengine.errors import IncomparableError, UsageError
from glassengine.judge.cases import Case, StepInputs
from glassengine.judge.end_to_end import results_of
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.protocol import Observed, Place, Side
from glassengine.judge.sides.record_names import AMBIGUOUS, NamedResult, known_inputs, meaningless, named_results_of
from glassengine.judge.step_inputs import Given, by_name, empty_caches
from glassengine.program.representation.program import Program
from glassengine.recording.read.source import TensorSource
from glassengine.sites import Site, other_spellings

PARTIAL = "the record has it for some positions only"


class RecordedTensors:
    """The tensors of a record by the names of a program.

    `partial` are the sites that were found with fewer positions than the program has, `impossible` those that cannot be
    read, with the reason. `called` says what the record calls results, `unknown` which of its names mean nothing.

    Args:
        source: The record, of one process.
        program: The baseline's.
        rules: How else its tensors are called; layout operations of the candidate's side are allowed.
        instead: Tensor that a rule names -> the one that stands for it: what several nodes compute is in the last.

    Raises:
        IncomparableError: Nothing in it has a name that the program knows.
        UsageError: A rule changes the baseline's layout: what is replayed has the program's own.
    """

    def __init__(
        self,
        source: TensorSource,
        program: Program,
        rules: TensorMap | None = None,
        instead: Mapping[str, str] | None = None,
    ) -> None:
        self.source = source
        self._program = program
        self.partial: set[str] = set()
        self.impossible: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        names = dict.fromkeys(entry.site for entry in source.entries)
        self._by_name: dict[str, tuple[tuple[str, ...], Rule | None]] = {name: ((name,), None) for name in names}
        if rules is not None:
            if any(rule.baseline_ops for rule in rules.rules):
                raise UsageError(
                    "a map for a check has no baseline_ops", got="baseline_ops", expected="candidate_ops that undo them"
                )
            ours = dict.fromkeys(name for site in program.sites for name in (site.name, *site.aliases))
            pairs, _ = pair_names(rules.rules, ours, names)
            of = instead or {}
            self._by_name |= {
                pair.baseline: (tuple(of.get(name, name) for name in pair.candidates), pair.rule) for pair in pairs
            }
        self._places = {(entry.site, entry.step): entry for entry in source.entries}
        self.called = named_results_of(program, results_of(program), source.entries)
        for result, named in list(self.called.items()):
            sites = program.sites.by_node.get(program.output_nodes[result], ())
            if named.name not in {site.name for site in sites} | {site.node for site in sites}:
                del self._by_name[named.name]  # a node may be called so, too
            if named.method == AMBIGUOUS:
                self.unknown[named.name] = f"{named.name} names a module and a result: call the result out.{result}"
                del self.called[result]
            elif sites and not any(self.names(site) for site in sites):
                self._by_name[sites[-1].name] = ((named.name,), None)
        inputs = set(known_inputs(program, names).values())
        known = [(site, found[0]) for site in program.sites if (found := self.names(site)) is not None]
        self.kinds = {site.kind for site, found in known if site.op != "input" or not inputs.issuperset(found)}
        meant = inputs.union(*(found for _, found in known), (named.name for named in self.called.values()))
        self.unknown |= meaningless(
            [name for name in names if ":in" not in name and name not in self.unknown], meant, program
        )
        if not self.kinds and not self.called:
            raise IncomparableError(
                "nothing in the record has a name that the baseline's program knows",
                got=", ".join([*list(names)[:4], *(f"{one.site} ({one.reason})" for one in source.skipped[:4])]),
                expected=next(iter(self.unknown.values()), "results, or sites as `glass sites MODEL` prints them"),
                hint="name its tensors as `glass sites MODEL` does, or say which belong together: --map FILE",
            )

    def names(self, site: Site) -> tuple[tuple[str, ...], Rule | None] | None:
        """Return what the record calls a site; by its own name first, then by that of its node."""
        return next(
            (
                self._by_name[name]
                for name in (site.name, site.node, *other_spellings(site.name))
                if name in self._by_name
            ),
            None,
        )

    def has_rule(self, site: Site) -> bool:
        """Whether a rule names a site by its own name: what a module is given, say, whichever op has made it."""
        return self._by_name.get(site.name, ((), None))[1] is not None

    def read(self, site: Site, step: int, inputs: Given) -> Observed | None:
        """Return the value of a site in a step, None where there is none, or not of every position."""
        return self._aligned(self._read(site, step), site, inputs)

    def results(self, step: int, inputs: Given) -> dict[str, Tensor]:
        """Return the results of a step, perhaps of the last positions alone, as `generate` of transformers asks."""
        found = {}
        for result in results_of(self._program):
            sites = self._program.sites.by_node.get(self._program.output_nodes[result], ())
            entry = self._places.get((self.called[result].name, step)) if result in self.called else None
            read = [] if entry is not None else [one.tensor for site in sites if (one := self._read(site, step))]
            value = self.source.tensor(entry) if entry is not None else next(iter(read), None)
            if value is not None:
                is_flat = bool(sites) and isinstance(inputs, StepInputs)
                found[result] = _by_rows(value, sites[0], inputs) if is_flat else value  # type: ignore[arg-type]
        return found

    def _aligned(self, found: Observed | None, site: Site, inputs: Given) -> Observed | None:
        if found is None or not isinstance(inputs, StepInputs):
            return found
        value = _by_rows(found.tensor, site, inputs)
        at, cache = site.axes.get("sequence"), site.axes.get("cache")
        if at is not None and at < value.dim() and value.shape[at] != inputs.input_ids.shape[1]:
            # `generate` of transformers asks for the logits of the last position alone.
            self.partial.add(site.name)
            return None
        length = inputs.attention_mask.shape[1]
        if cache is not None and cache < value.dim() and value.shape[cache] > length:
            value = value.narrow(cache, 0, length)
        return Observed(value, found.site, found.method)

    def _read(self, site: Site, step: int) -> Observed | None:
        found = self.names(site)
        if found is None:
            return None
        names, rule = found
        if rule is None:
            entry = self._places.get((names[0], step))
            return None if entry is None else Observed(self.source.tensor(entry), names[0], "name")
        steps = steps_of(rule, step)
        places = [self._places.get((name, one)) for one in steps for name in names]
        entries = [entry for entry in places if entry is not None]
        if not entries or len(entries) != len(places):
            return None
        parts = [(self.source.tensor(entry), self._lookup(entry.step)) for entry in entries]
        try:
            return Observed(assembled(rule, parts), " + ".join(names), "map")
        except UsageError:
            if len(parts) > 1 or not rule.is_optional:
                raise
            # A rule of a table, for the sizes that the checkpoint says: a tensor of others is judged as it is.
            return Observed(parts[0][0], names[0], "map")

    def _lookup(self, step: int) -> Callable[[str], Tensor]:
        return lambda name: self.source.tensor(self._places[name, step])


def _by_rows(value: Tensor, site: Site, inputs: StepInputs) -> Tensor:
    """Return a tensor [batch, sequence, ...] of one with the tokens of all rows concatenated.

    Serving engines compute without padding; what is returned has zeros there, which are not judged.
    """
    is_flat = value.dim() == len(site.shape) - 1 and (site.axes.get("batch"), site.axes.get("sequence")) == (0, 1)
    mask = inputs.token_mask
    if is_flat and len(mask) == 1 and len(value) < int(mask.sum()):
        return value[None]
    if not is_flat or value.shape[0] != int(mask.sum()):
        return value
    rows = value.new_zeros((*mask.shape, *value.shape[1:]))
    rows[mask] = value
    return rows


@dataclass
class RecordedModules(ModuleSide):
    """A record of module outputs and taps."""

    tensors: RecordedTensors = field(kw_only=True)
    place: Place = field(default=Place.RECORD, kw_only=True)

    @property
    def called(self) -> Mapping[str, NamedResult]:
        """What the record calls results."""
        return self.tensors.called

    def _run(self, inputs: Given) -> None:
        for site in self.baseline.sites:
            if site.kind == "op" or ":in" in site.name:
                continue
            found = self.tensors.read(site, self._steps, inputs)
            if found is not None:
                self._values[f"node:{site.node}" if site.kind == "kv" else site.name] = found.tensor
        self._results = self.tensors.results(self._steps, inputs)

    def results(self) -> Mapping[str, Tensor]:
        """Return the results that were recorded."""
        return {**self.results_by_node(self.baseline), **self._results}


@dataclass
class RecordedOps(Side):
    """A record of op sites.

    Args:
        tensors: The record.
        baseline: Program of the baseline, by whose names it is read.
        replay: Judges each op whose inputs were recorded.
        by_case: Name of a case -> the record of it, where there is one for each.
    """

    tensors: RecordedTensors
    baseline: Program
    replay: Replay = field(kw_only=True)
    place: Place = field(default=Place.RECORD, kw_only=True)
    by_case: Mapping[str, RecordedTensors] = field(default_factory=dict, kw_only=True)
    _values: dict[str, Observed] = field(default_factory=dict, init=False)
    _caches: dict[str, Tensor] = field(default_factory=dict, init=False)
    _step: int = field(default=-1, init=False)
    _results: Mapping[str, Tensor] = field(default_factory=dict, init=False)

    @property
    def called(self) -> Mapping[str, NamedResult]:
        """What the record calls results."""
        return self.tensors.called

    def begin(self, case: Case) -> None:
        """Start with the first step and an empty cache."""
        self._step, self._caches = -1, {}
        self.tensors = self.by_case.get(case.name, self.tensors)
        self.replay.begin()

    def step(self, inputs: Given) -> None:
        """Read the next step."""
        self._step += 1
        named = by_name(inputs)
        if self._step == 0:
            self._caches = empty_caches(self.baseline, named)
        self._values = {}
        for site in self.baseline.sites:
            if site.node in self._values or (":in" in site.name and not self.tensors.has_rule(site)):
                continue
            found = self.tensors.read(site, self._step, inputs)
            if found is not None:
                self._values[site.node] = found
        self.replay.begin_step(inputs, {n: found.tensor for n, found in self._values.items()}, self._caches)
        self._results = self.tensors.results(self._step, inputs)
        presents = {past: self.baseline.output_nodes[present] for past, present in self.baseline.caches.items()}
        self._caches = {past: self._values[node].tensor for past, node in presents.items() if node in self._values}

    def observed(self, node: str) -> list[Observed]:
        """Return what was recorded of `node`."""
        return [self._values[node]] if node in self._values else []

    def results(self) -> Mapping[str, Tensor]:
        """Return the results that were recorded."""
        return self._results
