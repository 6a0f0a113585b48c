"""`glass check`: climb the ladder model -> program -> (passes) -> engine -> release on the same inputs and tokens.

Every rung is judged against one float64 reference, the baseline's exported program, in one sweep (see `judge`). The
untouched model is a side like any other, so a mistake in the export itself shows as the model leaving the program.
An encoder-decoder is two programs, and climbs twice (see `two_programs`); so does a model of images and text (see
`image_programs`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from glassengine import asked, environment
from glassengine.backends.registry import choose_backend, get_backend
from glassengine.diagnose.ladder.accumulated import judge_alike
from glassengine.diagnose.ladder.as_given import as_given, require_two_models
from glassengine.diagnose.ladder.bisect_release import bisect_release
from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.encoder_decoder import joined
from glassengine.diagnose.ladder.interrupted import kept
from glassengine.diagnose.ladder.judging import explain_engine
from glassengine.diagnose.ladder.other_model import add_model, start_stage
from glassengine.diagnose.ladder.per_case import judge_cases, requested
from glassengine.diagnose.ladder.prepared import accumulation_of, climbs_of, given_to, parts_of, with_record
from glassengine.diagnose.ladder.record import judge_sums_again
from glassengine.diagnose.ladder.rungs import add_built, add_engine, arguments_of
from glassengine.diagnose.ladder.sessions import as_run, with_level
from glassengine.diagnose.ladder.step_by_step import numbered, staged
from glassengine.diagnose.quantization.check import check_quantized_checkpoint, is_quantized_candidate
from glassengine.diagnose.quantization.module import check_quantized_module, quantized_in_memory
from glassengine.diagnose.quantization.port import check_quantized_file, is_quantized_file
from glassengine.diagnose.reproduction.files import require_free
from glassengine.diagnose.reproduction.reproduce import with_reproduction
from glassengine.diagnose.served.candidates import built_candidate, is_engine, named_candidate
from glassengine.diagnose.served.check import check_served
from glassengine.engine.build.ranks import check_mesh, mesh_for
from glassengine.engine.run.load import load
from glassengine.errors import UsageError
from glassengine.judge.cases import as_inputs, in_one_forward, other_tokens, texts_of, tokens_in_one_forward
from glassengine.judge.sides.module import threads_for
from glassengine.judge.sides.protocol import Place
from glassengine.judge.sides.recorded import PARTIAL
from glassengine.judge.sides.recorded_ranks import first_rank
from glassengine.judge.verdict.conclude import conclude
from glassengine.judge.verdict.corrections import with_configuration
from glassengine.judge.verdict.drift import Drift, is_less_precise
from glassengine.judge.verdict.evidence import EvidenceBox
from glassengine.program import load_candidate, load_model
from glassengine.program.generation.generation import PLAIN
from glassengine.program.kinds.image_text import IMAGE_TOKEN, WITHOUT_IMAGES
from glassengine.program.onnx.stored.options import session_settings
from glassengine.progress import Progress, Work, silent
from glassengine.results import Comparison, Policy, Skipped
from glassengine.serving.protocol import Options
from glassengine.sites import patterns_of
from glassengine.stores.places import place

logger = logging.getLogger("glassengine")


def check(
    baseline: str | Path | nn.Module,
    *,
    candidate: str | Path | nn.Module | None = None,
    map: str | Path | None = None,
    layout: str | None = None,
    library: str | Path | None = None,
    python: str | Path | None = None,
    session_options: str | Path | Mapping[str, Any] | Sequence[str] | None = None,
    backend: str | None = None,
    quantize: str | None = None,
    dtype: str = "auto",
    inputs: str | Path | Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    steps: int = 3,
    passes: Sequence[str] = (),
    all_rungs: bool = False,
    bisect_outputs: bool = False,
    fail_on: Literal["suspicious", "wrong"] = "wrong",
    min_coverage: float = 0.9,
    drift: bool = False,
    min_snr: float | None = None,
    accumulation: str | None = None,
    reproduction: str | Path | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    trust_engine: bool = False,
    revision: str | None = None,
    adapter: str | Path | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    jobs: int = 1,
    progress: Progress = silent,
) -> Comparison:
    """Judge a candidate against a baseline and say which op, on which rung, introduced an error first.

    Args:
        baseline: MODEL: Hugging Face directory or id, `file.py:factory`, `package.module:factory`, or a module object.
        candidate: Another model, a factory, an adapter of the baseline, an engine directory, or a record of tensors
            (see `compare`); None builds the baseline's own engine and release engine and climbs the ladder. A quantized
            checkpoint beside an unquantized baseline is judged weight by weight: what quantization costs, and what is a
            mistake.
        map: Which names of the program belong to which of a record, as for `compare`.
        layout: How a serving engine names its tensors ("ggml", "onnx", "vllm", "sglang"), where a record has none.
        library: Shared library of a serving engine (`gguf:FILE`); None for the one that is installed.
        python: Interpreter that a serving engine is installed for (`vllm:DIR`); None for this one.
        session_options: How ONNX Runtime runs an ONNX file as candidate: "graph_optimization_level=basic", several of
            them, a dict, or a JSON file; None for its own default, which optimizes as far as it can.
        backend: Back-end of the built engines.
        quantize: As in `build`.
        dtype: As in `build`; of both sides, unless the candidate is an engine. Of `vllm:DIR` that of vLLM: "auto" for
            float32.
        inputs: A text file with one prompt per line, what `load_inputs` reads, or keyword arguments (a dict, or one a
            step); None takes built-in prompts. A causal language model that is given more than tokens (images, say) is
            judged as a plain module, without a decode loop; that is listed among what was skipped.
        steps: Number of decode steps after the prefill.
        passes: User passes on the program, each a rung of its own.
        all_rungs: Climb op-by-op too: every op compiled alone. Without it only what the engine got wrong is.
        bisect_outputs: Build no engine with all debug outputs; where the release engine is wrong, add a few at a time.
        fail_on: The mildest verdict that makes the result not ok.
        min_coverage: Least share of the baseline's float-valued sites that must have been judged.
        drift: Say in a table which module loses how much of the signal; always done where the candidate is less precise
            than the baseline.
        min_snr: Least signal-to-noise ratio of each result, in dB.
        accumulation: "float32", "tf32", "bfloat16" or "float16": how the candidate sums its products, where it is less
            than float32; None takes what `torch.set_float32_matmul_precision` says.
        reproduction: Directory for a test of the first divergence that needs neither the models nor Glass Engine; what
            an earlier one in it is moved aside. Nothing is written without a divergence.
        attn_implementation: As in transformers, for models that are loaded by transformers.
        trust_remote_code: Allow code that comes with a checkpoint to run.
        trust_engine: Load native code of an engine that was built elsewhere, as for `load`.
        revision: Of a hub id.
        adapter: As for `build`, of the baseline.
        tensor_parallel: As for `build`, of the engine that is built: its ranks are a rung of their own.
        pipeline_parallel: As for `build`.
        jobs: Processes of this machine that judge the cases (prompts), each a case at a time; 1 is this one.
        progress: Called with an event when a stage begins.

    Raises:
        UsageError: The request cannot be carried out.
        BackendError: A back-end is missing or failed.
        IncomparableError: The two sides have nothing in common to judge.
    """
    request = requested(check, jobs, locals())
    passes = patterns_of(passes, "passes")
    inputs = as_inputs(inputs)
    mesh = mesh_for(tensor_parallel, pipeline_parallel)
    asked.beside_candidate(candidate, parallel=mesh is not None, quantize=quantize is not None)
    if reproduction is not None:
        require_free(place(reproduction))
    options: dict[str, Any] = {
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
    }
    dtype = str(asked.dtype(dtype))
    settings = session_settings(session_options)
    how = Options(library=library, python=python, dtype=dtype, session=settings)
    served, record = named_candidate(baseline, candidate, how, layout=layout, has_map=bool(map))
    if candidate is None:
        served = built_candidate(baseline, backend, quantize, how, progress, dtype=dtype, adapter=adapter, **options)
    if served is not None:
        unused: dict[str, object] = {
            "--map": map,
            "--backend": backend and candidate,
            "--pass": passes,
            "--accum": accumulation,
            "--session-options": settings.given and not hasattr(served, "session"),
        }
        unused |= {"--tensor-parallel": mesh, "--all-rungs": all_rungs, "--bisect-outputs": bisect_outputs}
        unused["--jobs"] = jobs > 1
        if given_more := [name for name, value in unused.items() if value]:
            raise UsageError(f"{given_more[0]} is not for a serving engine", got=str(candidate), hint="leave it out")
        return check_served(
            baseline,
            served,
            dtype=dtype,
            inputs=inputs,
            steps=steps,
            fail_on=fail_on,
            min_coverage=min_coverage,
            min_snr=min_snr,
            drift=drift,
            layout=layout,
            reproduction=reproduction,
            adapter=adapter,
            progress=progress,
            **options,
        )
    if layout:
        raise UsageError("--layout is for a recording of a serving engine", got=f"the candidate {candidate}")
    engine = load(str(candidate), trust=trust_engine) if is_engine(candidate) else None
    of_first = None if record is None else first_rank(record)  # refused before anything is loaded
    if map is not None and (record is None or record is not of_first):
        what = "a record of tensors" if record is None else "a record of one process"
        raise UsageError(f"--map is for {what}", got=f"the candidate {candidate}")
    if candidate is not None and engine is None:
        asked.beside_model(candidate, rungs=all_rungs or bisect_outputs, builds=bool(backend or passes))
    policy = Policy(fail_on, min_coverage, min_snr)
    # Of quantized weights all are judged, whatever the least coverage is.
    told: dict[str, Any] = {"policy": replace(policy, min_coverage=0.0), "steps": steps, "progress": progress}
    if is_quantized_candidate(baseline, candidate):
        if reproduction is not None or accumulation is not None:
            raise UsageError("--reproduction and --accum are for ops", got=f"the quantized checkpoint {candidate}")
        more_told: dict[str, Any] = {"dtype": dtype, "adapter": adapter, "inputs": inputs}
        return check_quantized_checkpoint(baseline, str(candidate), **more_told, **told, **options)
    if backend is not None:
        get_backend(backend)  # an unusable one is reported before anything is loaded
    progress(Work.LOADING.says("loading the baseline"))
    wanted = engine.manifest.dtype if engine and dtype == "auto" else dtype
    model = load_model(baseline, dtype=wanted, adapter=adapter, **options)
    if mesh is not None:
        check_mesh(mesh, model, choose_backend(backend)[0], [("--bisect-outputs", bisect_outputs)])
    # An engine is judged on the very programs that it generates with; a port need not have such.
    alone = candidate is not None and (engine is None or not engine.manifest.generates)
    without_encoder = engine is not None and not engine.manifest.has_encoder
    if IMAGE_TOKEN in model.metadata and (alone or without_encoder):
        why = "with images a port is judged in one forward, of --inputs" if engine is None else "the engine takes none"
        model.metadata[WITHOUT_IMAGES], alone = why, True
    model, given, without_decoding = given_to(model, inputs, of_first, alone=alone)
    other, other_ids = None, []
    if candidate is not None and engine is None and record is None:
        progress(Work.LOADING.says("loading the candidate"))
        other = load_candidate(candidate, baseline, dtype=dtype, **options)
        require_two_models(model, other)
        other_ids = other_tokens(model, other.directory, given)
        other = other.judged_as(other.generation.alone)
        if model.generation.generates and not other.generation.generates:
            given = tokens_in_one_forward(model, other.module, given)
            model, without_decoding = model.judged_as(PLAIN), "the candidate is a plain module"
        elif other.generation.generates and not model.generation.generates:
            given, other = in_one_forward(given), other.judged_as(PLAIN)
    as_run(model, other, settings)
    held = quantized_in_memory(model, other)
    if other is not None and (held is not None or (is_quantized_file(other) and not is_quantized_file(model))):
        if reproduction is not None or accumulation is not None:
            raise UsageError("--reproduction and --accum are for floats", got=f"the quantized {candidate}")
        if held is not None:
            return check_quantized_module(model, other, held, given, differences=other_ids, **told)
        limits: dict[str, Any] = {"fail_on": fail_on, "min_coverage": min_coverage, "min_snr": min_snr}
        again = partial(check, inputs=inputs, steps=steps, progress=progress, **limits, **options)
        return check_quantized_file(baseline, model, other, given, again, policy)
    parts = parts_of(engine, 2 if model.generation.has_encoder else 1)
    of_stages: Sequence[Any] = (None,) * len(parts)
    with ExitStack() as stack:
        stack.enter_context(threads_for(model.module))
        if other is not None and not model.generation.generates:
            of_stages = staged(model, other, arguments_of(model, given), progress)
            climbs: Sequence[Climb] = [start_stage(stage, stack, progress) for stage in of_stages]
            parts = [None] * len(climbs)
        else:
            climbs = climbs_of(model, given, steps, stack, progress, of_first)
            parts = parts[-len(climbs) :]
        if model.generation.decodes_tokens and (reason := model.metadata.get(WITHOUT_IMAGES)):
            climbs[0].skipped.append(Skipped("images", "both", f"judged from text alone: {reason}"))
        if without_decoding is not None:
            climbs[0].skipped.append(Skipped("decode steps", "both", f"{without_decoding}, without a decode loop"))
        results: list[Comparison] = []
        for climb, part, stage in zip(climbs, parts, of_stages[-len(climbs) :], strict=True):
            climb.accumulation = accumulation_of(accumulation)
            if part is not None:
                climb.coarsest = getattr(torch, part.manifest.dtype)
                add_engine(climb, part, progress, only_release=bisect_outputs)
            elif record is not None:
                tensors = with_record(climb, record, map)
            elif other is not None:
                climb.coarsest = add_model(climb, other, stage, progress)
            else:
                # Passes are those of the last program, as when an engine is built.
                own_passes = passes if climb is climbs[-1] else ()
                add_built(
                    climb, backend, own_passes, progress, all_rungs=all_rungs, only_release=bisect_outputs, mesh=mesh
                )
            as_given(climb, model, other, num_stages=len(climbs))
            climb.differences += other_ids
            if reproduction is not None:
                for score in climb.scores:
                    score.evidence = EvidenceBox(climb.program)
            if drift or is_less_precise(climb.coarsest, str(climb.program.metadata.get("dtype"))):
                for score in climb.scores[1:]:
                    score.drift = Drift()

            def concluded(climb: Climb = climb, **more: Any) -> Comparison:
                return conclude(
                    climb.program,
                    climb.scores,
                    climb.skipped,
                    climb.severity,
                    climb.weights,
                    baseline=model.spec,
                    candidate=_described(climb, candidate),
                    policy=policy,
                    environment=environment.describe(),
                    cases=climb.cases,
                    differences=climb.differences,
                    notes=climb.notes,
                    **more,
                )

            stack.enter_context(kept(concluded, results))
            progress(Work.JUDGING.says(f"judging {len(climb.cases)} case{'s' if len(climb.cases) > 1 else ''}"))
            judge_cases(climb, request if len(climbs) == 1 else None, jobs, progress)
            if record is not None:
                judge_sums_again(climb, tensors, progress)
            alike = judge_alike(climb, progress)
            built_by = engine.manifest.backend if engine is not None else backend
            if bisect_outputs:
                bisect_release(climb, built_by, progress)
            explain_engine(climb, built_by, progress)
            if record is not None:
                left_out = {**dict.fromkeys(tensors.partial, PARTIAL), **tensors.impossible, **tensors.unknown}
                climb.skipped += [
                    Skipped(name, "candidate", why, rung=Place.RECORD) for name, why in sorted(left_out.items())
                ]
            texts = texts_of(model, climb.cases, climb.chosen) if climb.program.generates else None
            result = concluded(accumulated=alike, texts=texts)
            result = with_configuration(result, model.module)
            results.append(result if stage is None else numbered(result, stage.numbers))
        result = with_level(reduce(joined, results), other or model)
        if reproduction is None or result.first_divergence is None:
            return result
        progress(Work.WRITING.says("writing a reproduction"))
        at = next(number for number, one in enumerate(results) if result.first_divergence in one.origins)
        return with_reproduction(result, place(reproduction), climbs[at].scores, climbs[at].program)


def _described(climb: Climb, candidate: str | Path | nn.Module | None) -> str:
    if candidate is None:
        return climb.candidate
    return type(candidate).__name__ if isinstance(candidate, nn.Module) else str(candidate)
