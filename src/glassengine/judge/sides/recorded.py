"""A record as candidate of a check: what another program wrote down, judged without running it.

Tensors pair by the names of sites and nodes of the baseline's program, or by a map. A record with op sites is judged op
by op, one of modules by segments. What it was run on comes from the record: the baseline is given the same tokens.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from glassengine.capture.runs.known_tokens import prompt_lengths
from glassengine.compare.matching.assembling import assembled
from glassengine.compare.matching.maps import Rule, TensorMap, steps_of
from glassengine.compare.matching.rules import pair_names
from glassengine.errors import IncomparableError, UsageError
from glassengine.judge.cases import Case, StepInputs
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.protocol import Observed, Place, Side
from glassengine.judge.step_inputs import Given, by_name, empty_caches
from glassengine.numerics.metrics.tolerance import is_inexact
from glassengine.program import LoadedModel
from glassengine.program.generation.generation import Generation
from glassengine.program.representation.program import Program
from glassengine.recording.read.source import TensorSource
from glassengine.sites import RETURNED, Site, other_spellings

PARTIAL = "the record has it for some positions only"


class RecordedTensors:
    """The tensors of a record by the names of a program.

    `partial` are the sites that were found with fewer positions than the program has, `impossible` those that cannot be
    read, with the reason.

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
        self.partial: set[str] = set()
        self.impossible: dict[str, str] = {}
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
        self.kinds = {site.kind for site in program.sites if self.names(site)}
        if not self.kinds:
            raise IncomparableError(
                "nothing in the record has a name that the baseline's program knows",
                got=", ".join(list(names)[:4]),
                expected="sites or nodes, as `glass sites MODEL` prints them",
                hint="say which names belong together: --map FILE",
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
        found = self._read(site, step)
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

    def _run(self, inputs: Given) -> None:
        for site in self.baseline.sites:
            if site.kind == "op" or ":in" in site.name:
                continue
            found = self.tensors.read(site, self._steps, inputs)
            if found is not None:
                self._values[f"node:{site.node}" if site.kind == "kv" else site.name] = found.tensor

    def results(self) -> Mapping[str, Tensor]:
        """Return the results that were recorded."""
        return self.results_by_node(self.baseline)


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
    _inputs: Given = field(default_factory=dict, init=False)

    def begin(self, case: Case) -> None:
        """Start with the first step and an empty cache."""
        self._step, self._caches = -1, {}
        self.tensors = self.by_case.get(case.name, self.tensors)
        self.replay.begin()

    def step(self, inputs: Given) -> None:
        """Read the next step."""
        self._step, self._inputs = self._step + 1, inputs
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
        presents = {past: self.baseline.output_nodes[present] for past, present in self.baseline.caches.items()}
        self._caches = {past: self._values[node].tensor for past, node in presents.items() if node in self._values}

    def observed(self, node: str) -> list[Observed]:
        """Return what was recorded of `node`."""
        return [self._values[node]] if node in self._values else []

    def results(self) -> Mapping[str, Tensor]:
        """Return the results that were recorded: what was returned, whichever op of the record is like the last one."""
        found = self.results_by_node(self.baseline)
        for site in self.baseline.sites:
            name = site.name.removeprefix(".:out.")
            if name != site.name and name in found:
                returned = replace(site, name=f"{RETURNED}{name}", node="")
                own = self.tensors.read(returned, self._step, self._inputs)
                own = own or self.tensors.read(replace(site, node=""), self._step, self._inputs)
                found[name] = found[name] if own is None else own.tensor
        return found


def case_of(source: TensorSource, generation: Generation) -> Case | None:
    """Return what a record was made with; None where a plain module's record does not say.

    Raises:
        IncomparableError: A language model's record does not say it: on other tokens everything is another.
    """
    case = recorded_case(source)
    if case is None and generation.decodes_tokens:
        raise IncomparableError(
            "the record does not say on which tokens it was made",
            got=f"{source.path}: no token ids of distinguishable rows",
            expected="a recording of a model that is given input_ids [batch, sequence], or those of one row",
            hint="give them: --inputs FILE; of a server: --layout vllm",
        )
    return case


def dtype_of(source: TensorSource) -> torch.dtype | None:
    """Return the floating dtype of a record: what it says, else that of most of its floating tensors."""
    known = str(source.metadata.get("dtype"))
    if not is_inexact(known):
        floating = Counter(entry.dtype for entry in source.entries if is_inexact(entry.dtype))
        known = floating.most_common(1)[0][0] if floating else known
    dtype: torch.dtype | None = getattr(torch, known, None)
    return dtype


def recorded_inputs(source: TensorSource, model: LoadedModel) -> list[dict[str, Any]] | None:
    """Return what a plain module was given in each step of a record; None where the record does not say all of it."""
    if model.generation.takes_tokens:
        return None
    if model.stored is not None:
        names = {port.name: True for port in model.stored.inputs}
    else:
        known = inspect.signature(model.module.forward).parameters.values()
        names = {one.name: one.default is one.empty for one in known if one.kind is one.POSITIONAL_OR_KEYWORD}
    places = {(entry.site, entry.step): entry for entry in source.entries}
    found = []
    for step in sorted({entry.step for entry in source.entries}):
        given: dict[str, Any] = {}
        for place, (name, is_required) in enumerate(names.items()):
            entry = places.get((f".:in.{name}", step)) or places.get((f".:in[{place}]", step))
            if entry is not None:
                given[name] = source.tensor(entry)
            elif is_required:
                return None
        found.append(given)
    return found if all(found) and found else None


def recorded_case(source: TensorSource) -> Case | None:
    """Return the prompts and tokens that a record of a language model was made with; None where it does not say.

    Raises:
        IncomparableError: The tokens of its steps are unknown.
    """
    rows = source.metadata.get("token_ids")
    steps = sorted({entry.step for entry in source.entries})
    lengths = prompt_lengths(source)
    if not rows or not lengths or len(rows) != len(lengths):
        return None
    if steps != list(range(len(steps))) or any(len(r) < n + len(steps) - 1 for r, n in zip(rows, lengths, strict=True)):
        raise IncomparableError(
            "the tokens of the record's steps are unknown",
            got=f"steps {steps[:8]}, rows of {[len(row) for row in rows]} tokens, prompts of {lengths}",
            expected="all steps from the prefill on",
        )
    longest = max(lengths)
    ids = torch.zeros((len(rows), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        ids[index, longest - length :] = torch.tensor(row[:length])
        mask[index, longest - length :] = 1
    following = [row[length : length + len(steps) - 1] for row, length in zip(rows, lengths, strict=True)]
    tokens = torch.tensor(following)
    return Case("recorded", len(steps), input_ids=ids, attention_mask=mask, tokens=tokens, origin="recorded")
