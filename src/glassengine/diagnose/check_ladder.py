"""Climbs the ladder model -> program -> (passes) -> engine -> release on the same inputs and tokens.

Every level is judged against one float64 reference, the baseline's exported program, in one sweep (see `judge`). The
unchanged model is a side like any other, so a mistake in the export itself shows as the model leaving the program.
An encoder-decoder is two programs, and climbs twice (`encoder_decoder`); so does a model of images and text
(`image_text`). Another model, or a record, is a level as an engine is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import nn

from glassengine import environment
from glassengine.asked import FORMS
from glassengine.backends.registry import choose_backend, get_backend
from glassengine.candidates import QUANTIZED_MODEL, expected, refuse
from glassengine.compare.matching.maps import load_map
from glassengine.diagnose.ladder.as_given import as_given, as_run, require_two_models, with_level, with_order
from glassengine.diagnose.ladder.bisect_release import bisect_release
from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.generations import JUDGED, joined
from glassengine.diagnose.ladder.judging import explain_engine, judge, judge_alike, judge_cases, judge_sums_again, kept
from glassengine.diagnose.ladder.levels import (
    add_built,
    add_engine,
    add_model,
    add_record,
    arguments_of,
    leave_out_export,
    start_stage,
    tensors_of,
)
from glassengine.diagnose.ladder.request import CheckRequest
from glassengine.diagnose.ladder.step_by_step import StepStage, numbered, staged
from glassengine.diagnose.reproduction.reproduce import with_reproduction
from glassengine.engine.build.build import compiler_beside
from glassengine.engine.build.write import check_mesh
from glassengine.engine.run.engine import Engine
from glassengine.errors import IncomparableError, UnknownNameError, UsageError
from glassengine.extensions import plugin
from glassengine.judge.cases import in_one_forward, read_inputs, texts_of, tokens_in_one_forward
from glassengine.judge.sides.module import threads_for
from glassengine.judge.sides.protocol import Place
from glassengine.judge.sides.recorded import (
    PARTIAL,
    RecordedTensors,
    case_of,
    recorded_inputs,
    require_own,
)
from glassengine.judge.sides.recorded_ranks import first_rank
from glassengine.judge.verdict.conclude import findings_of
from glassengine.judge.verdict.corrections import with_configuration
from glassengine.judge.verdict.evidence import EvidenceBox
from glassengine.numerics.drift import Drift
from glassengine.numerics.float64 import ACCUMULATIONS, Accumulation
from glassengine.numerics.judgement import unit_roundoff
from glassengine.program import LoadedModel, load_candidate, load_model
from glassengine.program.generation import PLAIN
from glassengine.program.kinds.image_text import IMAGE_TOKEN, WITHOUT_IMAGES
from glassengine.program.loading.quantized_grid import QuantizedModule, quantized_module
from glassengine.program.onnx.grids import is_quantized_graph
from glassengine.progress import Work
from glassengine.recording.source import TensorSource
from glassengine.results import Comparison, Findings, Policy, Skipped
from glassengine.results.sentences import named_mistake
from glassengine.serving.protocol import ServingOptions


def check_record(request: CheckRequest, record: TensorSource) -> Comparison:
    """Judge a recording, or a dump of another tool.

    Raises:
        UsageError: A map of names is given for a record of several processes.
    """
    ladder = Ladder(request, record=record, first_record=first_rank(record))
    if request.map is not None and record is not ladder.first_record:
        raise UsageError("--map is for a record of one process", got=f"the candidate {request.candidate}")
    return ladder.check()


def check_model(request: CheckRequest, _: Any) -> Comparison:
    """Judge another model, port, adapter or stored program."""
    return Ladder(request).check()


@dataclass
class Ladder:
    """A check by levels.

    Attributes:
        request: What is asked for.
        engine: The candidate, where it is one.
        record: Likewise.
        first_record: Its first rank.
        policy: By which the findings are concluded.
    """

    request: CheckRequest
    engine: Engine | None = None
    record: TensorSource | None = None
    first_record: TensorSource | None = None
    policy: Policy = field(init=False)

    def __post_init__(self) -> None:
        self.policy = self.request.policy

    def check(self) -> Comparison:
        """Return what the findings come to."""
        found = self.findings()
        if self.request.grafts and found.left is None:
            found.left = f"the candidate ran with tensors of the baseline: {', '.join(self.request.grafts)}"
        return found.conclude(self.policy)

    def findings(self) -> Findings:
        """Load both sides, judge every level, and return what was found.

        Raises:
            UsageError: The request cannot be carried out.
            BackendError: A back-end is missing or failed.
            IncomparableError: The two sides have nothing in common to judge.
        """
        request = self.request
        if request.backend is not None:
            get_backend(request.backend)  # an unusable one is reported before anything is loaded
        with ExitStack() as stack:
            # It starts while this process loads and exports.
            is_built = request.candidate is None and request.mesh is None and not request.bisect_outputs
            self._compiler = compiler_beside(request.backend, request.baseline) if is_built else None
            if self._compiler is not None:
                stack.enter_context(closing(self._compiler))
            baseline, alone = self._load_baseline()
            self.skipped: list[Skipped] = []
            baseline, given = self._given(baseline, alone=alone)
            candidate: LoadedModel | None = None
            if request.candidate is not None and self.engine is None and self.record is None:
                candidate, baseline, given = self._load_candidate(baseline, given)
            as_run(baseline, candidate, request.serving.session)
            if candidate is not None:
                found = self._check_quantized(baseline, candidate, given)
                if found is not None:
                    return found
            stack.enter_context(threads_for(baseline.module))
            return self._climb(baseline, candidate, given, stack)

    def _check_quantized(self, baseline: LoadedModel, candidate: LoadedModel, given: Any) -> Findings | None:
        """Judge a candidate with quantized weights beside a baseline without; None for any other."""
        request = self.request
        held = quantized_in_memory(baseline, candidate)
        if held is None and not (is_quantized_file(candidate) and not is_quantized_file(baseline)):
            return None
        refuse(QUANTIZED_MODEL, request.flags, request.candidate)
        found: Findings
        if held is None:
            check = plugin("quantized.port").check_quantized_file
            found = check(baseline, candidate, given, self._of_file, self.policy, request.progress)
        else:
            # Of quantized weights all are judged, whatever the least coverage is.
            self.policy = replace(self.policy, min_coverage=0.0)
            found = plugin("quantized.check").check_quantized_module(
                baseline,
                candidate,
                held,
                given,
                steps=request.steps,
                policy=self.policy,
                progress=request.progress,
            )
        return found

    def _of_file(self, path: Any) -> Findings:
        """Judge an ONNX file that stands for the candidate, in a session as it is by default, in this process."""
        return Ladder(replace(self.request, candidate=path, serving=ServingOptions(), drift=False, jobs=1)).findings()

    def _load_baseline(self) -> tuple[LoadedModel, bool]:
        """Return the baseline, and whether it is judged without the programs that it generates with."""
        request, engine = self.request, self.engine
        request.progress(Work.LOADING.says("loading the baseline"))
        dtype = engine.manifest.dtype if engine and request.dtype == "auto" else request.dtype
        model = load_model(request.baseline, dtype=dtype, adapter=request.adapter, **request.loading)
        if request.mesh is not None:
            unlike = [("--bisect-outputs", request.bisect_outputs)]
            check_mesh(request.mesh, model, choose_backend(request.backend)[0], unlike)
        # An engine is judged on the very programs that it generates with; a port need not have such.
        alone = request.candidate is not None and (engine is None or not engine.manifest.generates)
        without_encoder = engine is not None and not engine.manifest.has_encoder
        if IMAGE_TOKEN in model.metadata and (alone or without_encoder):
            one_forward = "with images a port is judged in one forward, of --inputs"
            model.metadata[WITHOUT_IMAGES] = one_forward if engine is None else "the engine takes none"
            alone = True
        return model, alone

    def _given(self, model: LoadedModel, *, alone: bool) -> tuple[LoadedModel, Any]:
        """Return the model as it is judged, and what it is given."""
        record, inputs = self.first_record, self.request.inputs
        if record is None or inputs is not None:
            given = read_inputs(inputs, model.input_names)
        else:
            given = recorded_inputs(record, model)
        if record is not None and inputs is not None:
            require_own(record, given)
        if alone:
            model = model.judged_as(model.generation.alone)
        judged = JUDGED[model.generation]
        given = judged.given(model, given)
        more = judged.beside(model, given)
        if more:
            model, given = model.judged_as(PLAIN), in_one_forward(given)
            self._without_decoding(f"{', '.join(more)} given: the model is judged as a plain module")
        return model, given

    def _without_decoding(self, why: str) -> None:
        self.skipped = [Skipped("decode steps", "both", f"{why}, without a decode loop")]

    def _load_candidate(self, baseline: LoadedModel, given: Any) -> tuple[LoadedModel, LoadedModel, Any]:
        """Return the candidate, the baseline and the inputs as both can be judged."""
        request = self.request
        request.progress(Work.LOADING.says("loading the candidate"))
        assert request.candidate is not None
        try:
            other = load_candidate(request.candidate, request.baseline, dtype=request.dtype, **request.loading)
        except UsageError as error:
            if error.expected is None or not error.expected.startswith(FORMS):
                raise
            # A candidate may be more than a MODEL.
            more = error.expected.replace(FORMS, expected())
            raise UsageError(error.what, got=error.got, expected=more, hint=error.hint) from error
        require_two_models(baseline, other)
        other = other.judged_as(other.generation.alone)
        if baseline.generation.generates and not other.generation.generates:
            given = tokens_in_one_forward(baseline, other.module, given)
            baseline = baseline.judged_as(PLAIN)
            self._without_decoding("the candidate is a plain module")
        elif other.generation.generates and not baseline.generation.generates:
            given, other = in_one_forward(given), other.judged_as(PLAIN)
        return other, baseline, given

    def _climb(
        self,
        baseline: LoadedModel,
        candidate: LoadedModel | None,
        given: Any,
        stack: ExitStack,
    ) -> Findings:
        """Judge each program of the baseline (or each stage of a plain module), and join what was found."""
        request = self.request
        parts = _parts_of(self.engine, 2 if baseline.generation.has_encoder else 1)
        stages: Sequence[StepStage | None] = (None,) * len(parts)
        if candidate is not None and not baseline.generation.generates:
            stages = made = staged(baseline, candidate, arguments_of(baseline, given), request.progress)
            climbs: Sequence[Climb] = [start_stage(stage, stack, request.progress) for stage in made]
            parts = [None] * len(climbs)
        else:
            climbs = self._start(baseline, given, stack)
            parts, stages = parts[-len(climbs) :], stages[-len(climbs) :]
        if baseline.generation.decodes_tokens and (reason := baseline.metadata.get(WITHOUT_IMAGES)):
            climbs[0].skipped.append(Skipped("images", "both", f"judged from text alone: {reason}"))
        climbs[0].skipped += self.skipped
        found: list[Findings] = []
        for climb, part, stage in zip(climbs, parts, stages, strict=True):
            self._add_candidate(climb, part, stage, candidate, is_last=climb is climbs[-1])
            # Stages of a baseline that remembers nothing are calls by themselves: one of them is made twice.
            is_alone = len(climbs) == 1 or (stage is not None and stage.baseline.state is None)
            if not request.grafts:
                as_given(climb, baseline, candidate, calls_again=is_alone and climb is climbs[0])
            result = self._judged(climb, baseline, found, stack, is_alone=len(climbs) == 1)
            found.append(result if stage is None else numbered(result, stage.numbers))
        result = with_level(with_order(reduce(joined, found), candidate), candidate or baseline)
        if request.reproduction is None or result.first_divergence is None:
            return result
        request.progress(Work.WRITING.says("writing a reproduction"))
        at = next(number for number, one in enumerate(found) if result.first_divergence in one.origins)
        return with_reproduction(result, request.reproduction, climbs[at].scores, climbs[at].program)

    def _start(self, model: LoadedModel, given: Any, stack: ExitStack) -> list[Climb]:
        """Return the climbs of a model, on what a record was made with where there is one.

        Raises:
            IncomparableError: What is given is not what the record was made with.
        """
        case, num_steps, record = None, self.request.steps + 1, self.first_record
        if record is not None:
            case = case_of(record, model.generation, given)
            num_steps = len({entry.step for entry in record.entries})
        steps = min(self.request.steps, num_steps - 1)
        climbs = list(JUDGED[model.generation].start(model, given, steps, stack, self.request.progress, case))
        cases = climbs[0].cases
        if record is not None and (len(cases) > 1 or cases[0].num_steps > num_steps):
            raise IncomparableError(
                "the record is of one run, and more inputs are given",
                got=f"{record.path}: {num_steps} steps; {len(cases)} cases, the first of {cases[0].num_steps} steps",
                hint="--inputs FILE with what it was made on, and no more",
            )
        return climbs

    def _add_candidate(
        self,
        climb: Climb,
        engine: Engine | None,
        stage: StepStage | None,
        candidate: LoadedModel | None,
        *,
        is_last: bool,
    ) -> None:
        """Add the sides of the candidate to a climb."""
        request = self.request
        climb.accumulation = _accumulation_of(request.accumulation)
        self._tensors: RecordedTensors | None = None
        if engine is not None:
            climb.coarsest = getattr(torch, engine.manifest.dtype)
            add_engine(climb, engine, request.progress, only_release=request.bisect_outputs)
        elif self.record is not None:
            self._tensors = tensors_of(climb, self.record, load_map(request.map) if request.map else None)
            climb.coarsest = add_record(climb, self._tensors)
        elif candidate is not None:
            climb.coarsest = add_model(climb, candidate, stage, request.progress, request.grafts)
        else:
            add_built(
                climb,
                request.backend,
                # Passes are those of the last program, as when an engine is built.
                request.passes if is_last else (),
                request.progress,
                all_levels=request.all_levels,
                only_release=request.bisect_outputs,
                mesh=request.mesh,
                compiler=self._compiler,
                answer_first=partial(self._answer_first, climb),
            )

    def _answer_first(self, climb: Climb) -> None:
        """Tell whether the model and its program agree in the first step, before the engines are built.

        All is judged again beside the engines; one step costs two forwards where both have the same bits.
        """
        case = replace(climb.cases[0], num_steps=1)
        scores = [score.fresh() for score in climb.scores if score.side.place is not Place.OP_BY_OP]
        judge(climb, scores, cases=[case])
        if not any(score.pairs for score in scores):
            return
        found = findings_of(climb.program, scores, (), {}, baseline="", candidate="", min_coverage=0.0, environment={})
        result = found.conclude(replace(self.policy, min_coverage=0.0))
        if result.too_little:
            return  # what is not decided yet is no disagreement
        at = "" if result.first_divergence is None else f" at {result.first_divergence.site}"
        agree = "agree" if result.ok else f"do not agree{at}: {named_mistake(result) or result.not_ok_because}"
        text = f"first answer ({case.name}, step 0): the model and its program {agree}"
        self.request.progress(Work.FIRST_ANSWER.says(text))

    def _judged(
        self, climb: Climb, baseline: LoadedModel, earlier: Sequence[Findings], stack: ExitStack, *, is_alone: bool
    ) -> Findings:
        """Judge the sides of a climb.

        Args:
            climb: With its sides.
            baseline: As it was loaded.
            earlier: Findings of the climbs before this one.
            stack: Ends with the check.
            is_alone: There is no other climb, so that other processes may judge some of its cases.
        """
        request, progress, engine = self.request, self.request.progress, self.engine
        if request.reproduction is not None:
            for score in climb.scores:
                score.evidence = EvidenceBox(climb.program)
        if request.drift or _is_less_precise(climb.coarsest, str(climb.program.metadata.get("dtype"))):
            for score in climb.scores[1:]:
                score.drift = Drift()

        def collected(**more: Any) -> Findings:
            return findings_of(
                climb.program,
                climb.scores,
                climb.skipped,
                climb.severity,
                climb.weights,
                baseline=baseline.spec,
                candidate=self._described(climb),
                min_coverage=self.policy.min_coverage,
                environment=environment.describe(),
                cases=climb.cases,
                differences=climb.differences,
                notes=climb.notes,
                seeded=climb.seeded,
                **more,
            )

        before = tuple(earlier)
        stack.enter_context(kept(lambda: reduce(joined, [*before, collected()]), self.policy))
        progress(Work.JUDGING.says(f"judging {len(climb.cases)} case{'s' if len(climb.cases) > 1 else ''}"))
        judge_cases(climb, request.for_workers() if is_alone else None, request.jobs, progress)
        leave_out_export(climb)
        if self._tensors is not None:
            judge_sums_again(climb, self._tensors, progress)
        accumulated = judge_alike(climb, progress)
        backend = engine.manifest.backend if engine is not None else request.backend
        if request.bisect_outputs:
            bisect_release(climb, backend, progress)
        explain_engine(climb, backend, progress)
        if self._tensors is not None:
            tensors = self._tensors
            left_out = {**dict.fromkeys(tensors.partial, PARTIAL), **tensors.impossible, **tensors.unknown}
            climb.skipped += [
                Skipped(name, "candidate", why, level=Place.RECORD) for name, why in sorted(left_out.items())
            ]
        texts = texts_of(baseline, climb.cases, climb.chosen) if climb.program.generates else None
        return with_configuration(collected(accumulated=accumulated, texts=texts), baseline.module)

    def _described(self, climb: Climb) -> str:
        candidate = self.request.candidate
        if candidate is None:
            return climb.candidate
        return type(candidate).__name__ if isinstance(candidate, nn.Module) else str(candidate)


def _accumulation_of(name: str | None) -> Accumulation:
    """Return how a candidate sums; None is what torch is set to."""
    if name is None:
        name = {"high": "tf32", "medium": "bfloat16"}.get(torch.get_float32_matmul_precision(), "float32")
    if name not in ACCUMULATIONS:
        raise UnknownNameError("accumulation", name, list(ACCUMULATIONS), hint="--accum tf32")
    return ACCUMULATIONS[name]


def _parts_of(engine: Engine | None, number: int) -> list[Engine | None]:
    """Return the engines of the programs that are climbed: one, or encoder (or vision) and decoder."""
    if engine is None:
        return [None] * number
    parts: list[Engine | None] = [engine.encoder, engine] if engine.manifest.has_encoder else [engine]
    if len(parts) != number:
        raise IncomparableError(
            "the engine was built from another kind of model",
            got="encoder and decoder" if len(parts) == 2 else "one program",
            expected="encoder and decoder" if number == 2 else "one program",
        )
    return parts


def _is_less_precise(candidate: torch.dtype | None, baseline: str) -> bool:
    """Whether a candidate of one dtype computes with fewer digits than a baseline of another."""
    own = getattr(torch, baseline, None)
    if candidate is None or not isinstance(own, torch.dtype):
        return False
    floats = candidate.is_floating_point and own.is_floating_point
    return floats and unit_roundoff(candidate) > unit_roundoff(own)


def quantized_in_memory(baseline: LoadedModel, candidate: LoadedModel) -> QuantizedModule | None:
    """Return the quantized weights of a candidate; None where none is one of the unquantized baseline's."""
    if candidate.stored is not None or baseline.stored is not None:
        return None
    found = quantized_module(candidate.module)
    if found is None or quantized_module(baseline.module) is not None:
        return None
    known = {name: tensor.shape for name, tensor in baseline.module.named_parameters()}
    return found if any(known.get(name) == step.shape for name, step in found.steps.items()) else None


def is_quantized_file(model: LoadedModel) -> bool:
    """Whether a model is a quantized ONNX file."""
    return model.stored is not None and model.stored.onnx is not None and is_quantized_graph(model.stored.onnx.file)
