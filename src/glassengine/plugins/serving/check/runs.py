"""Runs of a serving engine and their recordings: by level and prompt, and by the names of a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import Node

from glassengine.backends.calibration import of_any_runtime
from glassengine.diagnose.ladder.levels import arguments_of
from glassengine.errors import BackendError, UsageError
from glassengine.judge.cases import Case, Inputs, causal_cases, module_cases, read_inputs
from glassengine.judge.replay.reference import CoarseArithmetic
from glassengine.judge.sides.protocol import Place
from glassengine.judge.sides.recorded import RecordedTensors, case_of, recorded_case
from glassengine.numerics.activations import READERS, ROUNDOFF, Read
from glassengine.numerics.float64 import Accumulation
from glassengine.numerics.judgement import unit_roundoff
from glassengine.ops.traits import traits_of
from glassengine.plugins.serving.alignment import numbers_of, table_of
from glassengine.plugins.serving.ggml.types import READ_AS
from glassengine.plugins.serving.ggml.write import ARCHITECTURES
from glassengine.plugins.serving.recorded_engine import RecordedEngine
from glassengine.plugins.serving.requests import Forwards, of_ranks
from glassengine.program import LoadedModel
from glassengine.program.representation.naming import op_name
from glassengine.program.representation.outputs import is_view, weight_only_nodes
from glassengine.program.representation.program import Program
from glassengine.recording.formats.folders import ranks_of
from glassengine.recording.source import TensorSource, open_source
from glassengine.results import Skipped
from glassengine.serving.protocol import Served, ServedOnce, ServedTogether, ServingRun
from glassengine.sites import matches

DEPLOYED = "as deployed"


@dataclass(frozen=True)
class Runs:
    """What was recorded.

    Attributes:
        cases: Prompts with the tokens that follow.
        records: Level -> name of a case -> recording.
        skipped: Prompts that were not run.
    """

    cases: list[Case]
    records: dict[str, dict[str, TensorSource]]
    skipped: list[Skipped]


def runs_of(served: Served, model: LoadedModel, inputs: Inputs, steps: int, folder: Path) -> Runs:
    """Run an engine on prompts: as exactly as it can, then on the same tokens as deployed.

    Args:
        served: What is run; a recording is taken as it is.
        model: The baseline; its tokenizer encodes text.
        inputs: As for `check`; each prompt is run alone, of the built-in ones the first. Of a dump of one forward that
            does not have its token ids: what it was given.
        steps: Decode steps after the prefill.
        folder: For the recordings.

    Raises:
        UsageError: There is no prompt of one row.
        IncomparableError: A recording does not say on which tokens it was made.
    """
    if isinstance(served, RecordedEngine):
        level = DEPLOYED if served.source.metadata.get("as_deployed") else Place.RECORD.value
        if "forwards" in served.source.metadata:
            return _of_requests(served.source, level, model)
        one = _given(served.source, model, inputs) or case_of(served.source, model.generation)
        assert one is not None
        return Runs([one], {level: {one.name: served.source}}, [])
    given, skipped = _cases(model, inputs, steps, alone=not isinstance(served, ServedTogether))
    records: dict[str, dict[str, TensorSource]] = {Place.RECORD.value: {}, DEPLOYED: {}}
    cases = []
    numbers = numbers_of(getattr(model.module, "config", None))
    if isinstance(served, ServedTogether):
        return _together(served, model, given, steps, folder, skipped)
    for number, case in enumerate(given):
        run = ServingRun(_prompt(case), steps, numbers=numbers)
        served.record(run, folder / f"ops-{number}")
        ops = open_source(folder / f"ops-{number}")
        made = case_of(ops, model.generation)
        assert made is not None and made.tokens is not None
        cases.append(replace(made, name=case.name, origin=case.origin, recipes=case.recipes))
        records[Place.RECORD.value][case.name] = ops
        if isinstance(served, ServedOnce):
            continue
        following = made.tokens[0].tolist()
        deployed = replace(run, following=following, as_deployed=True)
        served.record(deployed, folder / f"deployed-{number}")
        records[DEPLOYED][case.name] = open_source(folder / f"deployed-{number}")
    return Runs(cases, {level: found for level, found in records.items() if found}, skipped)


def _given(source: TensorSource, model: LoadedModel, inputs: Inputs) -> Case | None:
    """Return the prompt of a dump of one forward that does not say it; of more, the later tokens are unknown."""
    if inputs is None or recorded_case(source) is not None or len({entry.step for entry in source.entries}) > 1:
        return None
    cases, _ = _cases(model, inputs, 0, alone=True)
    return cases[0]


def _of_requests(source: TensorSource, level: str, model: LoadedModel) -> Runs:
    """Return what a server computed, a case for each request."""
    cases: list[Case] = []
    records: dict[str, TensorSource] = {}
    skipped: list[Skipped] = []
    for one in _ranks(source, model):
        requests, lost = Forwards(one).requests()
        skipped += [item for item in lost if item not in skipped]
        of_rank = f", rank {one.metadata['rank']}" if one.metadata.get("rank") else ""
        for number, request in enumerate(requests):
            made = case_of(request, model.generation)
            assert made is not None
            case = replace(made, name=f"request {number}{of_rank}")
            cases.append(case)
            records[case.name] = request
    if not cases:
        raise UsageError(
            "no request of the recording is whole",
            got=f"{source.path}: {skipped[0].site}: {skipped[0].reason}" if skipped else str(source.path),
            expected="at least one whose prompt was read while it was recorded",
        )
    return Runs(cases, {level: records}, skipped)


def _ranks(source: TensorSource, model: LoadedModel) -> list[TensorSource]:
    """Return what the ranks of a server have, put together."""
    ranks = ranks_of(source)
    if len(ranks) == 1:
        return ranks
    numbers = numbers_of(getattr(model.module, "config", None))
    return of_ranks(ranks, table_of("vllm", str(source.metadata.get("architecture")), numbers).ranks, numbers)


def _together(
    served: ServedTogether,
    model: LoadedModel,
    given: list[Case],
    steps: int,
    folder: Path,
    skipped: list[Skipped],
) -> Runs:
    """Run prompts alone, then all of them at once, on the same tokens."""
    numbers = numbers_of(getattr(model.module, "config", None))
    runs = [ServingRun(_prompt(case), steps, numbers=numbers) for case in given]
    ways = {Place.RECORD.value: "alone", DEPLOYED: "together"}
    sources = served.record_together(runs, folder, list(ways.values()))
    records: dict[str, dict[str, TensorSource]] = {}
    cases: list[Case] = []
    for level, way in ways.items():
        found, lost = Forwards(sources[way]).requests()
        skipped = skipped + lost
        records[level] = {}
        for number, (case, run) in enumerate(zip(given, runs, strict=True)):
            # The last one of this prompt: what ran before it has only filled the prefix cache.
            one = next((one for one in reversed(found) if one.prompt == tuple(run.prompt)), None)
            if one is None:
                raise BackendError(f"{served.spec} has not answered a prompt", got=f"{case.name}, {way}")
            records[level][case.name] = one
            if level == Place.RECORD.value:
                made = case_of(one, model.generation)
                assert made is not None
                cases.append(replace(made, name=case.name, origin=case.origin, recipes=case.recipes))
            elif one.metadata["token_ids"] != records[Place.RECORD.value][case.name].metadata["token_ids"]:
                raise BackendError(f"{served.spec} was not given the same tokens", got=f"prompt {number}, {way}")
    return Runs(cases, records, skipped)


def run_of_encoder(served: Served, model: LoadedModel, inputs: Inputs, folder: Path) -> Runs:
    """Run an encoder on the first row of what the baseline is given, as exactly as it can and as deployed.

    Raises:
        UsageError: There are no token ids.
    """
    given = arguments_of(model, read_inputs(inputs))[0]
    if "input_ids" not in given:
        raise UsageError("an encoder is given token ids", got=", ".join(given), expected="input_ids [1, tokens]")
    ids = torch.as_tensor(given["input_ids"])[:1]
    (case,) = module_cases([{"input_ids": ids}])
    records: dict[str, dict[str, TensorSource]] = {}
    for level, is_deployed in ((Place.RECORD.value, False), (DEPLOYED, True)):
        path = folder / f"encoder-{int(is_deployed)}"
        served.record(ServingRun([int(token) for token in ids[0]], 0, as_deployed=is_deployed), path)
        records[level] = {case.name: open_source(path)}
    return Runs([case], records, [])


def _cases(model: LoadedModel, inputs: Inputs, steps: int, *, alone: bool) -> tuple[list[Case], list[Skipped]]:
    given = causal_cases(model, read_inputs(inputs), steps)
    rows = [case for case in given if case.batch == 1]
    cases = rows[:1] if inputs is None and alone else rows
    if not cases:
        raise UsageError("a serving engine is given prompts of one row", got=f"{given[0].batch} rows in a batch")
    why = "a serving engine is given rows without padding"
    if alone:
        why = "the engine is run on the first built-in prompt" if inputs is None else "prompts are run one at a time"
    return cases, [Skipped(case.name, "both", why) for case in given if case not in cases]


def _prompt(case: Case) -> list[int]:
    assert case.input_ids is not None and case.attention_mask is not None
    return [int(token) for token in case.input_ids[0][case.attention_mask[0].bool()]]


class Alignment:
    """Recordings of one engine whose layout has tables.

    Args:
        sources: Case -> recording; its metadata name layout and architecture.
        program: The baseline's.
        config: The checkpoint's.
        layout: In place of the one that the recording names.

    Raises:
        UsageError: No layout is known.
    """

    def __init__(
        self, sources: Mapping[str, TensorSource], program: Program, config: Any, layout: str | None = None
    ) -> None:
        source = next(iter(sources.values()))
        layout = layout or source.metadata.get("layout")
        if layout is None:
            raise UsageError("the recording names no layout", got=str(source.path), hint="--layout ggml, or --map FILE")
        self.source = source
        architecture = source.metadata.get("architecture") or _architecture(layout, config)
        self.table = table_of(layout, str(architecture), numbers_of(config))
        self.by_case = {
            case: RecordedTensors(one, program, self.table.rules, _with_biases(one)) for case, one in sources.items()
        }
        self.tensors = next(iter(self.by_case.values()))
        self.kernels = of_any_runtime()
        self.rounded: dict[str, torch.dtype] = {
            site.node: getattr(torch, dtype)
            for site in program.sites
            for pattern, dtype in self.table.rounded.items()
            if matches(pattern, site.name)
        }


def _with_biases(source: TensorSource) -> dict[str, str]:
    """Return products of a recording -> the sums in which a bias is added to them: a layer's result is the sum."""
    graph = source.metadata.get("graph") or {}
    sums = {}
    for site, node in graph.items():
        product, *others = node.get("sources") or [""]
        is_sum = site.rpartition("/")[2].startswith("add.") and "/mul_mat." in product
        if is_sum and len(others) == 1 and others[0].endswith(".bias"):
            sums[product] = site
    return sums


def _architecture(layout: str, config: Any) -> str:
    """Return what an engine calls a kind of model of transformers."""
    model_type = str(getattr(config, "model_type", ""))
    if layout == "ggml":
        return ARCHITECTURES.get(model_type, model_type)
    if layout in ("vllm", "sglang"):
        return str((getattr(config, "architectures", None) or [model_type])[0])
    return "gemma" if model_type.startswith(("gemma2", "gemma3")) else "decoder"


def operands_of(alignment: Alignment, program: Program) -> tuple[dict[str, Callable[[torch.Tensor], Read]], set[str]]:
    """Return what the products of a recording read of their activations, by node, and the types that they read."""
    graph = alignment.source.metadata.get("graph") or {}
    readers: dict[str, Callable[[torch.Tensor], Read]] = {}
    kinds: set[str] = set()
    nodes = {node.name: node for node in program.graph.nodes}
    for site in program.sites:
        known = alignment.tensors.names(site)
        node = nodes.get(site.node)
        if known is None or node is None or not traits_of(node).reads_memory:
            continue
        read = {kind for name in known[0] if (kind := _reads(graph, name)) is not None}
        if len(read) == 1:
            (kind,) = read
            readers[site.node] = READERS[kind]
            kinds.add(kind)
    return readers, kinds


def arithmetic_of(
    alignment: Alignment, program: Program, operands: Mapping[str, Callable[[torch.Tensor], Read]], *, as_deployed: bool
) -> CoarseArithmetic:
    """Return what an engine computes more coarsely than float32, op by op.

    Args:
        alignment: Of a recording.
        program: The baseline's.
        operands: What products with weights of their own read, as `operands_of` has it.
        as_deployed: Whether the recording is of the engine as it runs by default.
    """
    kinds = operands_of(alignment, program)[1] | hidden_kinds(alignment)
    hidden = max((ROUNDOFF[kind] for kind in hidden_kinds(alignment)), default=0.0)
    table, weights = alignment.table, {node.name for node in weight_only_nodes(program)}
    summed: dict[str, Accumulation] = {}
    readers = {**operands, **{node: READERS[_AS_READ[dtype]] for node, dtype in alignment.rounded.items()}}
    cached = getattr(torch, table.deployed) if as_deployed and table.deployed else None
    for node in program.graph.nodes:
        if node.op != "call_function" or not traits_of(node).reads_memory or node.name in operands:
            continue
        if any(_origin(source).name in weights for source in node.all_input_nodes):
            if hidden:  # of experts; a roundoff is the most that a number is off, and about twice what most are
                summed[node.name] = Accumulation(u_operands=hidden / 2)
        elif cached is not None:
            readers[node.name] = READERS[_AS_READ[cached]]
            u = unit_roundoff(cached)  # what attention adds up over its keys is kept so, too
            of_values = op_name(_origin(node.all_input_nodes[0])).endswith("softmax")
            summed[node.name] = Accumulation(u_sums=u) if of_values else Accumulation(u_contexts=u)
    rounded = dict(alignment.rounded)
    if cached is not None:
        rounded |= {program.output_nodes[name]: cached for name in program.caches.values()}
    said = [_WORDS.get(kind, "8-bit activations") for kind in sorted(kinds)]
    said += [f"{table.deployed} keys and values"] * (cached is not None)
    said += ["float16 tables"] * bool(alignment.rounded)
    return CoarseArithmetic(readers, summed, rounded, tuple(dict.fromkeys(said)))


_AS_READ = {torch.float16: "F16", torch.bfloat16: "BF16"}
_WORDS = {"F16": "float16 activations", "BF16": "bfloat16 activations"}


def _origin(node: Node) -> Node:
    """Return what a tensor is rows, a view or a copy of."""
    while (is_view(node) or op_name(node) in _KEEPS) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


_KEEPS = ("index", "index_select", "clone", "contiguous", "type_as", "to", "_to_copy", "dropout")


def _reads(graph: dict[str, Any], site: str) -> str | None:
    """Return what a product of the recording reads of its activations; None where it reads them as they are."""
    node = graph.get(site) or {}
    if "op" not in node:
        return READ_AS.get(_type_of_weight(graph, site) or "")
    if node["op"] == "add":  # a product with a bias
        node = next((one for name in node["sources"] if "reads" in (one := graph.get(name) or {})), node)
    reads = node.get("reads")
    return reads if reads in READERS else None


def _type_of_weight(graph: dict[str, Any], site: str) -> str | None:
    """Return the type of the weight that a product of the recording reads, as `TYPES` calls it."""
    node = graph.get(site)
    if node is None or not node["sources"]:
        return None
    first = node["sources"][0]
    if site.rpartition("/")[2].startswith("add.") and "/mul_mat" in first:
        return _type_of_weight(graph, first)  # a product with a bias
    weight = graph.get(first)
    return str(weight["type"]).upper() if weight is not None else None


def hidden_kinds(alignment: Alignment) -> set[str]:
    """Return what quantized products read that no site of the program is: those of experts, which choose their rows."""
    graph = alignment.source.metadata.get("graph") or {}
    types = {_type_of_weight(graph, site) for site in graph if "/mul_mat_id." in site}
    mixed = {str(node["reads"]) for node in graph.values() if node.get("op") == "qmoe" and "reads" in node}
    return {READ_AS[kind] for kind in types if kind in READ_AS} | mixed
