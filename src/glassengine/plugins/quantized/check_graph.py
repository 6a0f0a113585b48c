"""`glass check` of a quantized ONNX file: drift by node, mistakes by op and by weight, results by their signal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from glassengine import environment
from glassengine.diagnose.ladder.as_given import with_level
from glassengine.errors import IncomparableError
from glassengine.judge.cases import Case
from glassengine.judge.end_to_end import EndToEnd, results_left
from glassengine.judge.graphs.by_name import in_order
from glassengine.judge.replay.replay import covered
from glassengine.judge.verdict.coverage import granularity_of
from glassengine.numerics.metrics.drift import shared
from glassengine.numerics.quantization.weight_error import WeightError
from glassengine.plugins.quantized.file import QuantizedFile, QuantizedOp, judge_widths
from glassengine.plugins.quantized.graph import QuantizedRun
from glassengine.program import LoadedModel
from glassengine.program.representation.program import Program
from glassengine.program.representation.signature import named_inputs, named_results
from glassengine.program.user_code.module_state import own_copies
from glassengine.progress import Progress, Work
from glassengine.results import (
    BY_GRID,
    FLAGGED,
    CaseInputs,
    Divergence,
    Findings,
    Hint,
    LevelResult,
    Pair,
    Skipped,
    Verdict,
    counts_of,
    worst,
)

LEVEL = "quantized"


@dataclass
class Ends:
    """Results of a quantized file against the baseline's: in a user's session, and of the graph as it is written.

    Args:
        program: Of the file of floats.
    """

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
        None,
        found.rms_error,
        None,
        hints,
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
