"""A record as candidate of a check: what another program wrote down, judged without running it.

Tensors pair by the names of results, sites and nodes of the baseline's program, or by a map. A record with op sites is
judged op by op, one of modules by segments. Dumps of other programs call an input by its name and a result by its key
or its place; a tensor of an unknown name is a result only where no other tensor of the record has that shape. The
tokens or tensors that the record was made on become the inputs of the baseline: nothing is made up.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glassengine.capture.target import prompt_lengths
from glassengine.compare.loader import assembled
from glassengine.compare.matching.maps import MapRule, TensorMap, steps_of
from glassengine.compare.matching.matching import pair_names
from glassengine.errors import IncomparableError, UsageError, nearest
from glassengine.judge.cases import Case, Given, Inputs, StepInputs, by_name, empty_caches, padded_case
from glassengine.judge.end_to_end import results_of
from glassengine.judge.replay.replay import Replay
from glassengine.judge.sides.module import ModuleSide
from glassengine.judge.sides.protocol import Observed, Place, Side
from glassengine.numerics.tolerance import is_inexact, precision_of
from glassengine.program import LoadedModel
from glassengine.program.generation import GenerationKind
from glassengine.program.inputs.modules import inputs_in_file
from glassengine.program.representation.program import Program
from glassengine.recording.layout.layout import Entry
from glassengine.recording.source import TensorSource
from glassengine.sites import RETURNED, Site, other_spellings

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
        self._by_name: dict[str, tuple[tuple[str, ...], MapRule | None]] = {name: ((name,), None) for name in names}
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

    def names(self, site: Site) -> tuple[tuple[str, ...], MapRule | None] | None:
        """Return what the record calls a site; by its own name first, then by that of its node."""
        spellings = (site.name, site.node, *other_spellings(site.name))
        return next((self._by_name[name] for name in spellings if name in self._by_name), None)

    def has_rule(self, site: Site) -> bool:
        """Whether a rule names a site by its own name: what a module is given, say, whichever op has made it."""
        return self._by_name.get(site.name, ((), None))[1] is not None

    def read(self, site: Site, step: int, inputs: Given) -> Observed | None:
        """Return the value of a site in a step, None where there is none, or not of every position."""
        found = self._read(site, step)
        value = None if found is None else self._aligned(found.tensor, site, inputs)
        return None if found is None or value is None else replace(found, tensor=value)

    def results(self, step: int, inputs: Given) -> dict[str, Tensor]:
        """Return the results of a step, perhaps of the last positions alone, as `generate` of transformers asks."""
        results = {}
        for result in results_of(self._program):
            sites = self._program.sites.by_node.get(self._program.output_nodes[result], ())
            entry = self._places.get((self.called[result].name, step)) if result in self.called else None
            read = (one.tensor for site in sites if (one := self._read(site, step)) is not None)
            value = next(read, None) if entry is None else self.source.tensor(entry)
            if value is not None:
                is_flat = bool(sites) and isinstance(inputs, StepInputs)
                results[result] = _by_rows(value, sites[0], inputs) if is_flat else value  # type: ignore[arg-type]
        return results

    def _aligned(self, value: Tensor, site: Site, inputs: Given) -> Tensor | None:
        value = _by_tokens(value, site)
        if not isinstance(inputs, StepInputs):
            return value
        value = _by_rows(value, site, inputs)
        at, cache = site.axes.get("sequence"), site.axes.get("cache")
        if at is not None and at < value.dim() and value.shape[at] != inputs.input_ids.shape[1]:
            # `generate` of transformers asks for the logits of the last position alone.
            self.partial.add(site.name)
            return None
        length = inputs.attention_mask.shape[1]
        if cache is not None and cache < value.dim() and value.shape[cache] > length:
            value = value.narrow(cache, 0, length)
        return value

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


def _by_tokens(value: Tensor, site: Site) -> Tensor:
    """Return a tensor [batch, sequence, ...] as [tokens, ...] where the baseline's router or experts merge both."""
    if value.dim() < 3 or len(site.shape) != value.dim() - 1 or site.axes.get("batch") == 0:
        return value
    merged = value.flatten(0, 1)
    return merged if _fits(merged.shape, site.shape) else value


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

    @property
    def called(self) -> Mapping[str, NamedResult]:
        """What the record calls results."""
        return self.tensors.called

    def begin(self, case: Case) -> None:
        """Start with the first step and an empty cache."""
        super().begin(case)
        self._step, self._caches = -1, {}
        self.tensors = self.by_case.get(case.name, self.tensors)

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


_PORT = r"(?:\.?:)?(?:{})[\s._:/\[\]'\"]*(.*?)['\"\]]*"
_KINDS = "inputs?|in|args?", f"outputs?|out|results?|{RETURNED.rstrip('/')}"
_INPUT, _RESULT = (re.compile(_PORT.format(kind)) for kind in _KINDS)

BESIDE_TOKENS = ("input_ids", "attention_mask", "position_ids", "cache_position", "positions")
"""Inputs of language models, which no one has to compare."""


AMBIGUOUS = "ambiguous"


class NamedResult(NamedTuple):
    """What a record calls a result, and how that was found: "name", "shape" or `AMBIGUOUS`."""

    name: str
    method: str


def named_inputs_of(names: Collection[str], inputs: Sequence[str]) -> dict[str, str]:
    """Return input -> what a record calls it: by name, or by its place ("input_0", "in[0]")."""
    return dict(_ports(names, inputs, _INPUT))


def named_results_of(program: Program, results: Sequence[str], entries: Sequence[Entry]) -> dict[str, NamedResult]:
    """Return result -> what a record calls it, where that is no tensor inside of the program."""
    shapes = {entry.site: tuple(entry.shape) for entry in reversed(entries)}
    made = {program.output_nodes[result] for result in results}
    # "." of a recording may be what another model returns, around or inside of the baseline.
    own = [n for n in shapes if not n.startswith(".") or ((s := program.sites.get(n)) is not None and s.node in made)]
    ports = dict(_ports(own, results, _RESULT))
    taken = {*known_inputs(program, shapes).values(), *ports.values()}
    named: dict[str, NamedResult] = {}
    for result, name in ports.items():
        site = program.sites.get(name)
        # A module may have the name of a result: which of the two is meant, nothing says beside other tensors.
        is_clear = site is None or site.node == program.output_nodes[result] or taken.issuperset(shapes)
        named[result] = NamedResult(name, "name" if is_clear else AMBIGUOUS)
    known = {site.name for site in program.sites} | {site.node for site in program.sites}
    free = {name: shape for name, shape in shapes.items() if name not in taken}
    for result in results:
        node = program.output_nodes[result]
        if result in named or any(site.name in shapes for site in program.sites.by_node.get(node, ())):
            continue
        wanted = tuple(getattr(program.node(node).meta.get("val"), "shape", ()))
        alike = [name for name, shape in free.items() if wanted and _fits(shape, wanted)]
        if len(alike) == 1 and alike[0] not in known:
            named[result] = NamedResult(alike[0], "shape")
    return named


def known_inputs(program: Program, names: Collection[str]) -> dict[str, str]:
    """Return input of a program, or of any language model -> what a record calls it."""
    ports = [port.name for port in program.inputs if port.name not in program.caches]
    return {name: name for name in BESIDE_TOKENS if name in names} | named_inputs_of(names, ports)


def meaningless(names: Collection[str], known: Collection[str], program: Program) -> dict[str, str]:
    """Return the names of a record that mean nothing -> why they are not judged, with the nearest that would."""
    free = [site.name for site in program.sites if site.kind != "op" and ":in" not in site.name]
    free = [name for name in free if name not in known] or [site.name for site in program.sites]
    reasons = {}
    for name in names:
        if name not in known:
            close = nearest(name, free, limit=1)
            reasons[name] = f"{name} names nothing in the baseline{f' (nearest: {close[0]})' if close else ''}"
    return reasons


def _ports(names: Collection[str], ports: Sequence[str], spelled: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    """Yield port -> the name that means it: that of a recording, its own, or with what it is, or its place."""
    rests = {name: found[1] for name in names if (found := spelled.fullmatch(name))}
    if spelled is _RESULT:
        rests |= {name: "" for name in (".", "") if name in names}  # what a module itself returns
    for place, port in enumerate(ports):
        wanted = {port, str(place)} | ({""} if len(ports) == 1 else set())
        known = [name for name, rest in rests.items() if rest in wanted or name == port]
        known += [port] if port in names else []
        if known:
            yield (
                port,
                min(known, key=lambda name: (not name.startswith(RETURNED), not name.startswith("."), name != port)),
            )


def _fits(shape: tuple[int, ...], wanted: Sequence[object]) -> bool:
    """Whether a tensor may be one of the sizes of a program; those that are dynamic may be any."""
    alike = (not isinstance(size, int) or size == own for own, size in zip(shape, wanted, strict=False))
    return len(shape) == len(wanted) and all(alike)


_MOST_READ = 64
"""Tensors of a record whose values are asked in which dtype they were computed."""


def case_of(source: TensorSource, generation: GenerationKind, given: Inputs = None) -> Case | None:
    """Return what a record was made with beside inputs that are given; None where it does not say.

    Raises:
        IncomparableError: A language model's record does not say it, and nothing is given: on other tokens everything
            is another. Or it was made with others than those that are given.
    """
    case = recorded_case(source) if given is None or generation.decodes_tokens else None
    require_own(source, given, case)
    if given is None and case is None and generation.decodes_tokens:
        raise IncomparableError(
            "the record does not say on which tokens it was made",
            got=f"{source.path}: no token ids of distinguishable rows",
            expected="input_ids [batch, sequence] among its tensors, or a recording of a model that is given them",
            hint="give them: --inputs FILE; of a server: --layout vllm",
        )
    return case


def dtype_of(source: TensorSource, *, by_values: bool = True) -> torch.dtype | None:
    """Return the floating dtype of a record: what it says, else that of the values of most of its floating tensors.

    Args:
        source: The record.
        by_values: False for ranks, whose tensors are put together by what they are compared with: not before that.
    """
    known = str(source.metadata.get("dtype"))
    if not is_inexact(known):
        entries = [entry for entry in source.entries if is_inexact(entry.dtype)]
        if by_values:
            floating = Counter(precision_of(source.tensor(entry)) for entry in entries[:_MOST_READ])
        else:
            floating = Counter(entry.dtype for entry in entries)
        known = floating.most_common(1)[0][0] if floating else known
    dtype: torch.dtype | None = getattr(torch, known, None)
    return dtype


def recorded_inputs(source: TensorSource, model: LoadedModel) -> list[dict[str, Any]] | None:
    """Return what a plain module was given in each step of a record, or the inputs that the model's file keeps.

    Raises:
        IncomparableError: Neither says it: on other inputs everything is another.
    """
    if not source.entries:
        raise IncomparableError(
            "the record holds no tensors",
            got=", ".join([str(source.path), *(f"{one.site}: {one.reason}" for one in source.skipped[:4])]),
            hint="save arrays of numbers by name, half precision as float32: numpy.savez(FILE, **tensors)",
        )
    if model.generation.takes_tokens:
        return None
    if model.stored is not None:
        names = {port.name: True for port in model.stored.inputs}
    else:
        known = inspect.signature(model.module.forward).parameters.values()
        names = {one.name: one.default is one.empty for one in known if one.kind is one.POSITIONAL_OR_KEYWORD}
    found: list[dict[str, Any]] = []
    for step, there in sorted(_by_step(source).items()):
        called = named_inputs_of(there, list(names))
        missing = [name for name, is_required in names.items() if is_required and name not in called]
        if missing or not called:
            kept = inputs_in_file(model.module)
            if kept is not None and len(called) == len(found) == 0:
                return kept
            raise IncomparableError(
                "the record does not say on which inputs it was made",
                got=f"{source.path}: no {', '.join(missing or names)} in step {step}",
                expected=f"the inputs beside the tensors, by name: {', '.join(names)}",
                hint="give what it was made on: --inputs FILE",
            )
        found.append({name: source.tensor(there[own]) for name, own in called.items()})
    return found


def require_own(source: TensorSource, given: Inputs, own: Case | None = None) -> None:
    """Refuse inputs that are not those which a record has.

    Args:
        source: The record.
        given: What `--inputs` names.
        own: What a record of a language model knows to have been made with.

    Raises:
        IncomparableError: The record has another tensor of that name.
    """
    steps = _by_step(source)
    for step, values in enumerate(() if given is None or isinstance(given, str) else given):
        there = steps.get(step, {})
        ours = {name: source.tensor(there[own]) for name, own in named_inputs_of(there, list(values)).items()}
        ours |= {} if own is None or own.input_ids is None else {"input_ids": own.input_ids}
        for name, tensor in ours.items():
            wanted = values.get(name)
            if not isinstance(wanted, torch.Tensor) or wanted.shape != tensor.shape:
                continue
            if not torch.allclose(wanted.double(), tensor.double(), rtol=1e-2, equal_nan=True):
                raise IncomparableError(
                    "the record was made on other inputs than those given",
                    got=f"{source.path}: another {name} in step {step}",
                    hint="leave out --inputs: the record has its own",
                )


def recorded_case(source: TensorSource) -> Case | None:
    """Return the prompts and tokens that a record of a language model was made with; None where it does not say.

    Raises:
        IncomparableError: The tokens of its steps are unknown.
    """
    rows = source.metadata.get("token_ids") or _token_rows(source)
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
    prompts = [torch.tensor(row[:length]) for row, length in zip(rows, lengths, strict=True)]
    following = [row[length : length + len(steps) - 1] for row, length in zip(rows, lengths, strict=True)]
    case = padded_case("recorded", prompts, len(steps) - 1)
    return replace(case, tokens=torch.tensor(following), origin="recorded")


def _by_step(source: TensorSource) -> dict[int, dict[str, Entry]]:
    """Return step -> name -> entry."""
    by_step: dict[int, dict[str, Entry]] = {}
    for entry in source.entries:
        by_step.setdefault(entry.step, {})[entry.site] = entry
    return by_step


def _token_rows(source: TensorSource) -> list[list[int]]:
    """Return the tokens of each row without padding, of a dump that has them as tensors in each step."""
    steps = _by_step(source)
    found = [there.get("input_ids") for _, there in sorted(steps.items())]
    if None in found or any(entry is not None and len(entry.shape) != 2 for entry in found):
        return []
    ids = [source.tensor(entry) for entry in found if entry is not None]
    mask = steps.get(0, {}).get("attention_mask")
    real = torch.ones_like(ids[0]) if mask is None else source.tensor(mask)
    if len({len(one) for one in (real, *ids)}) > 1 or real.shape != ids[0].shape:
        return []
    rows = zip(ids[0], real.bool(), torch.cat([ids[0][:, :0], *ids[1:]], 1), strict=True)
    return [[*prompt[valid].tolist(), *following.tolist()] for prompt, valid, following in rows]
