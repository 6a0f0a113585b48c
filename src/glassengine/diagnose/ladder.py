"""`glass check`: climb the ladder model -> program -> (passes) -> engine -> release on the same inputs and tokens.

Every rung is judged against one float64 reference, the baseline's exported program, in one sweep (see `judge`). The
untouched model is a side like any other, so a mistake in the export itself shows as the model leaving the program.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from glassengine import environment
from glassengine.compare.pairing import pair_sites
from glassengine.compare.verdict import unit_roundoff
from glassengine.diagnose.cases import Case, causal_cases, module_cases
from glassengine.diagnose.conclude import conclude
from glassengine.diagnose.judge import Score, run_cases
from glassengine.diagnose.replay import Replay
from glassengine.diagnose.severity import Severity
from glassengine.diagnose.sides import EngineSide, ModuleSide, ProgramSide
from glassengine.engine.build import build_program
from glassengine.engine.engine import Engine, load
from glassengine.errors import GlassError, IncomparableError, UsageError
from glassengine.program import LoadedModel, Program, export_program, load_inputs, load_model
from glassengine.program.outputs import OutputPlan, plan_outputs
from glassengine.program.passes import apply_pass
from glassengine.results import Comparison, Skipped

logger = logging.getLogger("glassengine")

BYTE_BUDGET = 1 << 30
"""Most bytes of debug outputs in one step of a check."""

SMALL_BYTES = 64 << 20
"""Weights up to this size make a small model."""

Progress = Callable[[str], None]


@dataclass
class Climb:
    """Everything one check has at hand; filled rung by rung."""

    baseline: LoadedModel
    program: Program
    cases: list[Case]
    model: ModuleSide
    scores: list[Score]
    skipped: list[Skipped] = field(default_factory=list)
    severity: dict[str, Severity] = field(default_factory=dict)
    stack: ExitStack = field(default_factory=ExitStack)

    def add(self, side: Any) -> None:
        """Add a side to judge."""
        self.scores.append(Score(side, self.program))


def check(
    baseline: str | Path | nn.Module,
    *,
    candidate: str | Path | nn.Module | None = None,
    backend: str | None = None,
    dtype: str = "auto",
    inputs: str | None = None,
    steps: int = 3,
    passes: Sequence[str] = (),
    fail_on: Literal["suspicious", "wrong"] = "wrong",
    min_coverage: float = 0.9,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    progress: Progress = lambda text: None,
) -> Comparison:
    """Judge a candidate against a baseline and say which op, on which rung, introduced an error first.

    Args:
        baseline: MODEL: Hugging Face directory or id, `file.py:factory`, `package.module:factory`, or a module object.
        candidate: Another model, a factory, or an engine directory; None builds the baseline's own engine and release
            engine and climbs the ladder.
        backend: Back-end of the engines that are built.
        dtype: As in `build`; of both sides, unless the candidate is an engine.
        inputs: A text file with one prompt per line, or what `load_inputs` reads; None takes built-in prompts. A model
            that is no causal language model needs it.
        steps: Decode steps after the prefill.
        passes: User passes on the program, each a rung of its own.
        fail_on: The mildest verdict that makes the result not ok.
        min_coverage: Least share of the baseline's float-valued sites that must have been judged.
        attn_implementation: As in transformers, for models that are loaded by transformers.
        trust_remote_code: Allow code that comes with a checkpoint to run.
        revision: Of a hub id.
        progress: Called with a sentence when a stage begins.

    Raises:
        UsageError: The request cannot be carried out.
        BackendError: A back-end is missing or failed.
        IncomparableError: The two sides have nothing in common to judge.
    """
    options: dict[str, Any] = {
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
    }
    engine = load(str(candidate)) if _is_engine(candidate) else None
    if candidate is not None and engine is None and (backend or passes):
        raise UsageError(
            "--backend and --pass build an engine of BASELINE", hint="leave them out beside --candidate MODEL"
        )
    progress("loading the baseline")
    model = load_model(baseline, dtype=engine.manifest.dtype if engine and dtype == "auto" else dtype, **options)
    with ExitStack() as stack:
        stack.enter_context(_threads_for(model.module))
        climb = _start(model, inputs, steps, stack, progress)
        coarsest = None
        if engine is not None:
            coarsest = getattr(torch, engine.manifest.dtype)
            _add_engine(climb, engine, progress)
        elif candidate is not None:
            coarsest = _add_model(climb, load_model(candidate, dtype=dtype, **options), inputs, progress)
        else:
            _add_built(climb, backend, passes, progress)
        progress(f"judging {len(climb.cases)} cases")
        run_cases(
            climb.program, climb.cases, climb.model, climb.scores, coarsest=coarsest, on_step=_severity_counter(climb)
        )
        return conclude(
            climb.program,
            climb.scores,
            climb.skipped,
            climb.severity,
            baseline=model.spec,
            candidate=str(candidate) if candidate is not None else _described(climb),
            fail_on=fail_on,
            min_coverage=min_coverage,
            environment=environment.describe(),
        )


@contextmanager
def _threads_for(module: nn.Module) -> Iterator[None]:
    """Judge small models on one thread: their short ops would wait for a second one longer than they run."""
    before = torch.get_num_threads()
    if sum(parameter.nbytes for parameter in module.parameters()) <= SMALL_BYTES:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _start(model: LoadedModel, inputs: str | None, steps: int, stack: ExitStack, progress: Progress) -> Climb:
    if model.kind == "causal_lm":
        cases = causal_cases(model, inputs, steps)
        given = None
    else:
        given = load_inputs(inputs) if inputs else None
        cases = module_cases(given or [])
    progress("exporting the program")
    program = export_program(model, inputs=given)
    side = ModuleSide(model.module, program)
    climb = Climb(model, program, cases, side, [], stack=stack)
    climb.add(side)
    return climb


def _add_built(climb: Climb, backend: str | None, passes: Sequence[str], progress: Progress) -> None:
    """The baseline's own passes, engine and release engine."""
    built = climb.program
    for spec in passes:
        progress(f"applying {spec}")
        built = apply_pass(built, spec)
        pairs, _, _ = pair_sites(climb.program, built)
        by_node = {pair.baseline.node: pair for pair in pairs}
        climb.add(ProgramSide(built, by_node, rung=f"pass {spec}", replay=Replay(climb.program)))
    folder = Path(climb.stack.enter_context(tempfile.TemporaryDirectory(prefix="glassengine-check-")))
    plan = _plan(climb, built)
    progress(f"building the engine with {len(plan.added)} debug outputs")
    sizes = _sizes(climb.cases)
    observed = [*plan.added, *plan.derived]
    engine = build_program(built, folder / "engine", backend=backend, outputs=observed, **sizes)
    _add_observable(climb, engine, observed)
    progress("building the release engine")
    release = build_program(built, folder / "release", backend=backend, **sizes)
    if release.manifest.added_outputs:
        raise GlassError("the release engine has debug outputs", got=str(release.manifest.added_outputs))
    climb.add(EngineSide(release, _result_nodes(climb.program, release), "release", "judged at results and caches"))


def _add_engine(climb: Climb, release: Engine, progress: Progress) -> None:
    """An engine as candidate: judged as the release, with an observable twin built from its own stored program."""
    program = release.program
    if program.kind != climb.program.kind:
        raise IncomparableError(
            "the engine was built from another kind of model", got=program.kind, expected=climb.program.kind
        )
    folder = Path(climb.stack.enter_context(tempfile.TemporaryDirectory(prefix="glassengine-check-")))
    plan = _plan(climb, program)
    observed = [*plan.added, *plan.derived]
    progress(f"building an observable twin with {len(plan.added)} debug outputs")
    twin = build_program(
        program, folder / "twin", backend=release.manifest.backend, outputs=observed, **_sizes(climb.cases)
    )
    _add_observable(climb, twin, observed)
    climb.add(EngineSide(release, _result_nodes(climb.program, release), "release", "judged at results and caches"))


def _add_observable(climb: Climb, engine: Engine, observed: Sequence[str]) -> None:
    replay = Replay(climb.program, compiled=True, dtype=getattr(torch, engine.manifest.dtype))
    climb.add(EngineSide(engine, _engine_nodes(climb.program, engine, observed), rung="engine", replay=replay))


def _add_model(climb: Climb, candidate: LoadedModel, inputs: str | None, progress: Progress) -> torch.dtype:
    """Another model or port: op by op through its own export, and untouched at module outputs."""
    if candidate.kind != climb.baseline.kind:
        raise IncomparableError(
            "the two sides are different kinds of model", got=candidate.kind, expected=climb.baseline.kind
        )
    progress("exporting the candidate")
    try:
        program = export_program(
            candidate, inputs=load_inputs(inputs) if inputs and candidate.kind == "module" else None
        )
    except UsageError as error:
        climb.skipped.append(
            Skipped("*", "candidate", f"no op-level rung: {error.what} ({error.got})", rung="candidate")
        )
    else:
        pairs, ours, theirs = pair_sites(climb.program, program)
        by_node = {pair.baseline.node: pair for pair in pairs}
        same = candidate.dtype == climb.baseline.dtype
        replay = Replay(climb.program, compiled=not same, dtype=None if same else getattr(torch, candidate.dtype))
        climb.add(ProgramSide(program, by_node, rung="candidate", replay=replay))
        reason = "no counterpart in the same module call of the other side"
        climb.skipped += [Skipped(site.name, "baseline", reason, rung="candidate") for site in ours]
        climb.skipped += [Skipped(site.name, "candidate", reason, rung="candidate") for site in theirs]
    climb.add(ModuleSide(candidate.module, climb.program, rung="candidate, untouched"))
    coarsest: torch.dtype = getattr(torch, candidate.dtype)
    return coarsest


def _plan(climb: Climb, program: Program) -> OutputPlan:
    nodes = [site.node for site in program.sites if site.kind == "op"]
    sizes = {"sequence": 1, "cache": 1, "batch": 1}
    if climb.program.kind == "causal_lm":
        longest = max(climb.cases, key=lambda case: case.batch * case.cache_length)
        assert longest.input_ids is not None
        sizes = {"batch": longest.batch, "sequence": longest.input_ids.shape[1], "cache": longest.cache_length}
    plan = plan_outputs(program, nodes, sizes=sizes, byte_budget=BYTE_BUDGET)
    for node, reason in plan.left_out.items():
        climb.skipped.append(Skipped(program.sites.by_node[node][0].name, "candidate", reason, rung="engine"))
    constant = [node for node, reason in plan.derived.items() if reason == "depends on weights alone"]
    for node in constant:
        name = program.sites.by_node[node][0].name
        climb.skipped.append(Skipped(name, "both", "depends on weights alone: folded by compilers", rung="engine"))
    kept = {node: reason for node, reason in plan.derived.items() if node not in constant}
    return OutputPlan(plan.added, kept, plan.left_out, plan.num_bytes)


def _engine_nodes(baseline: Program, engine: Engine, observed: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Baseline node -> (output name, engine site, method), for the engine's outputs that the baseline's program has."""
    nodes = _result_nodes(baseline, engine)
    table = {entry.node: entry for entry in engine.manifest.added_outputs}
    for node in observed:
        if node not in table:
            continue
        for site in engine.sites.by_node[node]:
            ours = baseline.sites.get(site.name)
            if ours is not None and site.kind == "op":
                method = "name+fingerprint" if ours.fingerprint == site.fingerprint else "name"
                nodes[ours.node] = (table[node].name, site.name, method)
    return nodes


def _result_nodes(baseline: Program, engine: Engine) -> dict[str, tuple[str, str, str]]:
    """Baseline node -> (output name, engine site, method) for results and updated caches."""
    own = {entry.name: entry.node for entry in engine.manifest.outputs}
    nodes = {}
    for name, node in baseline.output_nodes.items():
        if name in own:
            sites = engine.sites.by_node.get(own[name])
            nodes[node] = (name, sites[0].name if sites else name, "name")
    return nodes


def _sizes(cases: Sequence[Case]) -> dict[str, Any]:
    """The ranges that an engine for `cases` must be built with."""
    causal = [case for case in cases if case.input_ids is not None]
    if not causal:
        return {}
    return {"max_batch_size": max(c.batch for c in causal), "max_seq_len": max(c.cache_length for c in causal)}


def _severity_counter(climb: Climb) -> Callable[[Case, int, Mapping[str, float]], None]:
    """Compare the last logits of each side with those of the rung before it."""

    def count(case: Case, step: int, floors: Mapping[str, float]) -> None:
        if climb.program.kind != "causal_lm":
            return
        assert climb.model.logits is not None
        node = climb.program.output_nodes["logits"]
        model = climb.model.logits[:, -1]
        size = model.double()
        noise = max(
            floors.get(node, 0.0) * float(size.square().mean().sqrt()),
            unit_roundoff(model.dtype) * float(size.abs().max()),
        )
        before = model
        for score in climb.scores[1:]:
            found = score.side.observed(node)
            if not found:
                continue
            logits = found[-1].tensor[:, -1]
            against = before if score.side.rung == "release" else model
            climb.severity.setdefault(score.side.rung, Severity()).add(
                against, logits, noise, f"{case.name}, step {step}"
            )
            before = logits

    return count


def _is_engine(candidate: Any) -> bool:
    return isinstance(candidate, (str, Path)) and (Path(candidate) / "engine.json").is_file()


def _described(climb: Climb) -> str:
    side = next(score.side for score in climb.scores if isinstance(score.side, EngineSide))
    manifest = side.engine.manifest
    return f"{manifest.backend} engine, {manifest.dtype}"
