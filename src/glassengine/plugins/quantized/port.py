"""A quantized ONNX file beside a model of PyTorch: judged in two steps, each by its own measure.

    the graph    the file without its grids, with the model's own weights instead of the rounded ones, is
                 compared with the model as any port is: op by op, to rounding
    the grids    the file is compared with that, as any quantized file is with its floats: op by op by its own grids

So a wrong op is found as in a port, a wrong scale as in a quantization, and what quantization costs is drift.

`glass check` of a quantized ONNX file: drift by node, mistakes by op and by weight, results by their signal.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor

from glassengine import environment
from glassengine.diagnose.ladder.as_given import with_level
from glassengine.diagnose.ladder.levels import arguments_of
from glassengine.errors import IncomparableError
from glassengine.judge.cases import Case, module_cases
from glassengine.judge.end_to_end import EndToEnd, results_left
from glassengine.judge.replay.replay import covered
from glassengine.judge.sides.arguments import matched
from glassengine.judge.site_pairs import in_order
from glassengine.judge.verdict.coverage import granularity_of
from glassengine.numerics.drift import shared
from glassengine.numerics.weight_error import WeightError
from glassengine.plugins.onnx.dequantized import without_grids
from glassengine.plugins.quantized.file import QuantizedFile, QuantizedOp, judge_widths
from glassengine.plugins.quantized.graph import QuantizedRun
from glassengine.program import LoadedModel, load_model
from glassengine.program.kinds.example_inputs import MadeUp
from glassengine.program.representation.program import Program
from glassengine.program.representation.signature import named_inputs, named_results
from glassengine.program.user_code.module_state import own_copies, run_alone
from glassengine.progress import Progress, Work
from glassengine.results import (
    FLAGGED,
    CaseInputs,
    Divergence,
    Findings,
    Hint,
    LevelResult,
    Pair,
    Policy,
    Skipped,
    Verdict,
    counts_of,
    worst,
)
from glassengine.results.pairs import BY_GRID

LEVEL = "quantized"


@dataclass
class Ends:
    """Results of a quantized file against the baseline's: in a user's session, and of the graph as it is written."""

    program: Program

    def __post_init__(self) -> None:
        self.run, self.written = EndToEnd(self.program, LEVEL), EndToEnd(self.program, LEVEL)

    def compare(
        self, module: Any, inputs: Mapping[str, Tensor], ours: Mapping[str, Tensor], where: tuple[str, int]
    ) -> dict[str, Tensor]:
        """Compare one step of a file with the results of the baseline, and return all values of its graph."""
        values: dict[str, Tensor] = module.values(inputs)
        theirs = module.returned(inputs, values)
        # The results of a module have names of their own.
        names = {name: name for name in ours if name in theirs}
        left, free = ({n: v for n, v in one.items() if n not in names} for one in (ours, theirs))
        names |= in_order(left, free) if left and free else {}
        ours = {names.get(name, name): one for name, one in ours.items()}
        self.run.compare_signals(theirs, ours, where)
        self.written.compare_signals({name: values[name] for name in theirs if name in values}, ours, where)
        return values


def check_quantized_graph(
    baseline: LoadedModel,
    candidate: LoadedModel,
    cases: Sequence[Case],
    progress: Progress,
    *,
    returned: Sequence[Mapping[str, Tensor]] | None = None,
) -> Findings:
    """Run both files on all cases, and judge each op of the quantized one in its own precision.

    Args:
        baseline: An ONNX file of floats.
        candidate: What it was quantized to.
        cases: Of plain modules.
        progress: Called with an event when a stage begins.
        returned: Results of the baseline that the user has given, for each step, where `baseline` stands for it.

    Raises:
        IncomparableError: No value of the quantized file has the name of one of the baseline's.
    """
    program, theirs = baseline.stored, candidate.stored
    assert program is not None and theirs is not None
    run = QuantizedRun(program, QuantizedFile(theirs))
    ends = Ends(program)
    total, judged = sum(case.num_steps for case in cases), 0
    for case in cases:
        for number, step in enumerate(case.steps):
            judged += 1
            progress(Work.JUDGING.says(f"judging: {judged} of {total} steps", judged, total))
            where = (case.name, number)
            named = named_inputs(step)
            ours = named_results(baseline.module(**own_copies(named))) if returned is None else returned[judged - 1]
            run.step(named, ends.compare(candidate.module, named, ours, where), where)
    if not run.ops:
        raise IncomparableError(
            "no value of the quantized file has the name of one of the baseline's",
            got=", ".join(list(theirs.output_nodes)[:3]),
            expected=", ".join(site.name for site in list(program.sites)[:3]),
        )
    progress(Work.JUDGING.says("judging the quantized weights"))
    weights = dict(run.judged_weights())
    return _findings(baseline, candidate, program, run, ends, weights, cases)


def _findings(
    baseline: LoadedModel,
    candidate: LoadedModel,
    program: Program,
    run: QuantizedRun,
    ends: Ends,
    weights: Mapping[str, WeightError],
    cases: Sequence[Case],
) -> Findings:
    judge_widths(run.ops.values())
    order = {node.name: index for index, node in enumerate(program.graph.nodes)}
    ops = sorted((op for op in run.ops.values() if op.worst is not None), key=lambda op: order[op.node.name])
    pairs = [_pair_of_weight(name, error) for name, error in weights.items()] + [_pair(op) for op in ops]
    origins = [_of_weight(name, error) for name, error in weights.items() if error.mistakes]
    origins += [_divergence(program, op) for op in ops if op.worst is not None and op.worst.verdict in FLAGGED]
    # A weight is as early as the first op that reads it.
    reader = {f"{name}:param": order[_first_reader(program, node)] for node, name in program.weight_names().items()}
    origins.sort(key=lambda found: order[found.node] if found.node is not None else reader.get(found.site, 0))
    verdict = worst(pair.verdict for pair in pairs)
    first = next((o for level in ("wrong", "suspicious") for o in origins if o.verdict == level), None)
    results = ends.run.compared
    nodes = {op.node.name for op in ops}
    inside = {node: end for node, end in covered(program, nodes).items() if end <= nodes}
    found = granularity_of(program, LEVEL, nodes, inside)
    agree = bool(results) and all(result.agrees for result in results)
    share = found.op_by_op + found.in_regions + (found.in_large_regions if agree else 0.0)
    measured = [op for op in run.ops.values() if op.sums.num_tensors]
    rows = [op.sums.row(op.site, op.candidate_site, "op", op.sums.loss) for op in measured]
    returned = set(program.output_nodes)
    unknown = "it reads a weight of which the file's own is not known: measured, not judged"
    skipped = [Skipped(op.site, "candidate", unknown, level=LEVEL) for op in run.ops.values() if op.worst is None]
    level = LevelResult(
        LEVEL, baseline.spec, candidate.spec, verdict, "judged by its own grids", len(ops), share, first
    )
    answer = Findings(
        baseline=baseline.spec,
        candidate=candidate.spec,
        environment=environment.describe(),
        inside=verdict,
        left=results_left([ends.run]),
        first_divergence=first,
        origins=origins,
        counts=counts_of(pairs, unmatched_baseline=0, unmatched_candidate=0, not_recorded=0),
        pairs=tuple(pairs),
        skipped=skipped,
        coverage=share,
        levels=(level,),
        results=results,
        granularity=(found,),
        inputs=[CaseInputs(case.name, case.num_steps, case.inputs) for case in cases],
        drift=(*shared([row for row in rows if row.site not in returned]), *ends.run.drift_rows()),
    )
    return with_level(answer, candidate, ends.written.compared)


def _first_reader(program: Program, weight: str) -> str:
    node = program.node(weight)
    return next(iter(node.users), node).name


def _pair(op: QuantizedOp) -> Pair:
    assert op.worst is not None
    return Pair(
        step=op.where[1],
        site=op.site,
        candidate_site=op.candidate_site,
        method="name",
        confidence=1.0,
        verdict=op.worst.verdict,
        judged_by=BY_GRID,
        noise_ratio=op.worst.noise_ratio,
        level=LEVEL,
        case=op.where[0],
        reason=op.worst.reason,
    )


def _divergence(program: Program, op: QuantizedOp) -> Divergence:
    assert op.worst is not None
    hints = () if op.worst.reason is None else (Hint("other", op.worst.reason, 0.8, evidence="quantization"),)
    sites = program.sites.by_node.get(op.node.name)
    found = op.worst
    return Divergence(
        LEVEL,
        op.where[1],
        op.site,
        op.node.name,
        op.candidate_site,
        sites[0].source if sites else None,
        found.verdict,
        found.noise_ratio,
        introduced=found.rms_error,
        hints=hints,
    )


def _verdict(error: WeightError) -> Verdict:
    if not error.mistakes:
        return "identical" if error.rms_steps == 0 else "rounding"
    return "wrong"


def _pair_of_weight(name: str, error: WeightError) -> Pair:
    text = "; ".join(hint.text for hint in error.mistakes) or None
    return Pair.of_weight(name, _verdict(error), error.rms_steps, text, level=LEVEL)


def _of_weight(name: str, error: WeightError) -> Divergence:
    return Divergence.without_run(f"{name}:param", "wrong", error.mistakes, level=LEVEL, noise_ratio=error.rms_steps)


_ALIKE = 0.3
"""Relative distance of a weight from the one that it was quantized from: four bits a tensor leave so much."""
_FOLDED = 0.05
"""Relative error of the factors of rows that are estimated from a quantized weight."""
_WITHOUT_GRIDS = "inside it is compared without its grids, with the baseline's weights where they were rounded"
_MOST_STEPS = 1.5
"""A bias is so many of its steps from the one that was quantized."""
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
_EPSILONS = (1e-5, 1e-3, 1e-6, 1e-4, 1e-12)


def check_quantized_file(
    baseline: LoadedModel,
    candidate: LoadedModel,
    given: Any,
    judge_file: Callable[[Path], Findings],
    policy: Policy,
    progress: Progress,
) -> Findings:
    """Judge a quantized ONNX file beside a model of floats.

    Args:
        baseline: The model: an ONNX file, or one of PyTorch.
        candidate: The file.
        given: Inputs that were read; None for made-up ones.
        judge_file: Judges another ONNX file beside the baseline, as a port.
        policy: Of the check.
        progress: Called with an event when a stage begins.

    Raises:
        UsageError: The file computes with integers in a way that is not known.
    """
    if baseline.stored is not None and baseline.stored.onnx is not None:
        return check_quantized_graph(baseline, candidate, module_cases(arguments_of(baseline, given)), progress)
    assert candidate.stored is not None and candidate.stored.onnx is not None
    file, module = candidate.stored.onnx.file, baseline.module
    steps, arguments = matched(baseline, candidate, arguments_of(baseline, given))
    own = [arguments.of(step) for step in steps]
    cases = module_cases(MadeUp(own, recipes=steps.recipes, origin=steps.origin) if isinstance(steps, MadeUp) else own)
    ours = [named_results(run_alone(module, step)) for step in steps]
    parts = {f"{path}.": part for path, part in module.named_modules()}
    epsilons = {path: float(part.eps) for path, part in parts.items() if isinstance(part, _BATCH_NORMS)}
    model = without_grids(file, Weights(dict(module.state_dict()), epsilons))
    with tempfile.TemporaryDirectory(prefix="glassengine-") as folder:
        path = Path(folder) / file.path.name
        size = sum(tensor.ByteSize() for tensor in model.graph.initializer)
        onnx.save(model, str(path), save_as_external_data=size > 1 << 30, location=f"{path.stem}.data")
        of_graph = judge_file(path)
        concluded = of_graph.conclude(policy)
        twin = load_model(path)
        if not concluded.ok and not concluded.too_little:
            assert twin.stored is not None
            ends = Ends(twin.stored)
            for place, step in enumerate(cases[0].steps):
                ends.compare(candidate.module, named_inputs(step), ours[place], (cases[0].name, place))
            of_graph.candidate, of_graph.results = candidate.spec, ends.run.compared
            of_graph.inside = worst(level.verdict for level in of_graph.levels)
            of_graph.notes = [_WITHOUT_GRIDS, *of_graph.notes]
            again = of_graph.conclude(policy)
            if again.ok or again.too_little:
                # What the rounded weights cost hides a difference that the graph has without its grids.
                of_graph.differences = [*of_graph.differences, f"without its grids: {concluded.not_ok_because}"]
            return with_level(of_graph, candidate, ends.written.compared)
        of_grids = check_quantized_graph(twin, candidate, cases, progress, returned=ours)
    share = f"{of_graph.coverage:.0%}"
    note = f"without its grids the file is the baseline's graph: {share} judged; sites are the file's"
    of_grids.baseline, of_grids.notes = baseline.spec, [*of_grids.notes, note]
    of_grids.left = of_grids.left or concluded.not_ok_because
    return of_grids


@dataclass
class Weights:
    """Finds the weight of a model that a quantized one was made of.

    Args:
        known: The model's, by name.
        epsilons: Of its norms, by path and a dot.
    """

    known: Mapping[str, Tensor]
    epsilons: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, numbers: Tensor, steps: Tensor) -> Tensor | None:
        """Return the model's weight for what a quantized one stands for; None where none is like it."""
        if numbers.dim() < 2:
            return self._bias(numbers, steps)
        whole = self._nearest(numbers)
        for axis in range(numbers.dim()):
            whole = self._beside(numbers, axis) if whole is None else whole
        return self._folded(numbers) if whole is None else whole

    def _floats(self) -> Iterator[Tensor]:
        return (tensor.double() for tensor in self.known.values() if tensor.is_floating_point() and tensor.dim() > 1)

    def _nearest(self, numbers: Tensor) -> Tensor | None:
        found = [
            one
            for tensor in self._floats()
            for whole in ((tensor, tensor.T) if tensor.dim() == 2 else (tensor,))
            for one in _parts(whole, numbers.shape)
        ]
        best = min(found, key=lambda one: float((one - numbers).norm()), default=None)
        return best if best is not None and _is_alike(best, numbers) else None

    def _beside(self, numbers: Tensor, axis: int) -> Tensor | None:
        """Return what several weights make side by side: queries, keys and values in one product, say."""
        parts: list[Tensor] = []
        start, end = 0, numbers.shape[axis]
        while start < end:
            part = self._part(numbers.narrow(axis, start, end - start), axis)
            if part is None:
                return None
            parts.append(part)
            start += part.shape[axis]
        return torch.cat(parts, axis)

    def _part(self, numbers: Tensor, axis: int) -> Tensor | None:
        for tensor in self._floats():
            for one in (tensor, tensor.T) if tensor.dim() == 2 else (tensor,):
                if one.dim() != numbers.dim() or one.shape[axis] > numbers.shape[axis]:
                    continue
                beside = numbers.narrow(axis, 0, one.shape[axis])
                if one.shape == beside.shape and _is_alike(one, beside):
                    return one
        return None

    def _folded(self, numbers: Tensor) -> Tensor | None:
        """Return a weight into whose rows a norm behind it was folded."""
        for tensor in self._floats():
            if tensor.shape != numbers.shape:
                continue
            rows, own = tensor.flatten(1), numbers.flatten(1)
            factors = (rows * own).sum(1) / rows.square().sum(1).clamp(min=1e-30)
            like = [1, *[1] * (tensor.dim() - 1)]
            like[0] = -1
            if not _is_alike(tensor * factors.reshape(like), numbers):
                continue
            for norm in self._norms(len(factors)):
                if _is_alike(norm.factors, factors, _FOLDED):
                    return tensor * norm.factors.reshape(like)
        return None

    def _bias(self, numbers: Tensor, steps: Tensor) -> Tensor | None:
        floats = (one.double() for one in self.known.values() if one.is_floating_point())
        alone = [part for one in floats for part in _parts(one, numbers.shape)]
        norms = list(self._norms(len(numbers)))
        folded = [norm.shift for norm in norms]
        folded += [norm.shift + bias * norm.factors for norm, bias in itertools.product(norms, alone)]
        found: Sequence[Tensor] = [*alone, *folded]
        best = min(found, key=lambda one: float(((one - numbers) / steps).abs().max()), default=None)
        if best is None or float(((best - numbers) / steps).abs().max()) > _MOST_STEPS:
            return None
        return best

    def _norms(self, size: int) -> Iterator[_Norm]:
        """Yield what the batch norms of so many channels multiply by and add."""
        for name, variance in self.known.items():
            path, is_norm, _ = name.rpartition("running_var")
            mean = self.known.get(f"{path}running_mean")
            if not is_norm or mean is None or variance.numel() != size:
                continue
            ones, zeros = torch.ones(size), torch.zeros(size)
            weight, bias = self.known.get(f"{path}weight", ones), self.known.get(f"{path}bias", zeros)
            for eps in (self.epsilons[path],) if path in self.epsilons else _EPSILONS:
                factors = weight.double() / (variance.double() + eps).sqrt()
                yield _Norm(factors, bias.double() - mean.double() * factors)


@dataclass(frozen=True)
class _Norm:
    factors: Tensor
    shift: Tensor


def _parts(whole: Tensor, shape: torch.Size) -> Iterator[Tensor]:
    """Yield the parts of a weight that have a shape: itself, or queries, keys and values of a packed one."""
    axes = [axis for axis in range(whole.dim()) if whole.dim() == len(shape) and whole.shape[axis] != shape[axis]]
    if whole.shape == shape:
        yield whole
    elif len(axes) == 1 and shape[axes[0]] < whole.shape[axes[0]]:
        size = shape[axes[0]]
        for start in range(0, whole.shape[axes[0]] - size + 1, math.gcd(whole.shape[axes[0]], size)):
            yield whole.narrow(axes[0], start, size)


def _is_alike(one: Tensor, numbers: Tensor, apart: float = _ALIKE) -> bool:
    return float((one - numbers).norm()) <= apart * float(one.norm())
