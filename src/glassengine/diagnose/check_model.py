"""`glass check`: judges a candidate against a baseline, whatever kind of candidate it is.

The level `prompt` (tokens, templates and settings of both sides) is compared beside it, while the model is judged.
`--graft-until-clean` lists all mistakes of a port, by grafting each that is found and judging again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from glassengine import asked, environment
from glassengine.asked import HUB_ID
from glassengine.candidates import RECORD, flags_of, refuse, require_kind
from glassengine.diagnose.ladder.request import CheckRequest
from glassengine.diagnose.reproduction.files import require_free
from glassengine.diagnose.router import route, served_spec
from glassengine.engine.build.write import mesh_for
from glassengine.errors import GlassError, UnknownNameError, UsageError, first_line
from glassengine.extensions import plugin
from glassengine.judge.cases import as_inputs, prompt_texts
from glassengine.judge.sides.protocol import Place
from glassengine.program.loading.adapters import base_and_adapter
from glassengine.program.onnx.session import session_settings
from glassengine.progress import Progress, silent
from glassengine.prompt.check import compare_files, compare_in
from glassengine.prompt.side import NoTokenizer
from glassengine.prompt.worker import answer, kind_of
from glassengine.results import FLAGGED, Comparison, Divergence, Findings, Policy
from glassengine.results.findings import with_grafts, with_prompt
from glassengine.results.without_tensors import LEVEL, PromptComparison
from glassengine.serving.protocol import ServingOptions
from glassengine.sites import patterns_of
from glassengine.stores.places import place
from glassengine.workers.processes import Processes

_MOST_ROUNDS = 20
_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_MOST_TEXTS = 64
Add = Callable[[Comparison], Comparison]


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
    inputs: str | Path | Mapping[str, Any] | Sequence[Any] | Tensor | None = None,
    steps: int = 3,
    passes: Sequence[str] = (),
    all_levels: bool = False,
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
    tokenizer: str | None = None,
    only: str | None = None,
    against: str | Path | None = None,
    graft: Sequence[str] = (),
    graft_until_clean: bool = False,
    suggest_precision: bool = False,
    progress: Progress = silent,
) -> Comparison:
    """Judge a candidate against a baseline and say which op, on which level, made an error first.

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
        inputs: A text file with one prompt per line, what `load_inputs` reads, keyword arguments (a dict, or one a
            step), or tensors in the order of the forward's parameters; None takes built-in prompts. A causal language
            model that is given more than tokens (images, say) is judged as a plain module, without a decode loop; that
            is listed among what was skipped.
        steps: Number of decode steps after the prefill.
        passes: User passes on the program, each a level of its own.
        all_levels: Climb op-by-op too: every op compiled alone. Without it only what the engine got wrong is.
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
        tensor_parallel: As for `build`, of the engine that is built: its ranks are a level of their own.
        pipeline_parallel: As for `build`.
        jobs: Processes of this machine that judge the cases (prompts), each a case at a time; 1 is this one.
        tokenizer: Of the candidate, where it has no files of one: `file.py:factory` of an object with `encode(text)`.
        only: "prompt" compares what goes in (tokens, chat templates, settings) and loads no model.
        against: Interpreter of another environment (another torch or transformers): the candidate is the baseline,
            run there by a recorder that needs torch and numpy alone.
        graft: "SITE=baseline": there the baseline's op takes the place of the candidate's, and the candidate's program
            goes on with what it makes. Such a check is never ok.
        graft_until_clean: Graft every origin that is found and judge again: `origins` has all mistakes of the port,
            also those that others hide.
        suggest_precision: Find the fewest modules to keep in float32 so that BASELINE in `dtype` keeps `min_snr`; of a
            quantized checkpoint as candidate the fewest to leave unquantized. `notes` name them.
        progress: Called with an event when a stage begins.

    Raises:
        UsageError: The request cannot be carried out.
        BackendError: A back-end is missing or failed.
        IncomparableError: The two sides have nothing in common to judge.
    """
    flags = flags_of(**locals())
    require_kind(candidate)
    dtype = str(asked.dtype(dtype))
    serving = ServingOptions(library=library, python=python, dtype=dtype, session=session_settings(session_options))
    request = CheckRequest(
        baseline,
        candidate,
        Policy(fail_on, min_coverage, min_snr),
        flags=flags,
        map=map,
        layout=layout,
        serving=serving,
        backend=backend,
        quantize=quantize,
        dtype=dtype,
        inputs=as_inputs(inputs),
        steps=steps,
        passes=patterns_of(passes, "passes"),
        all_levels=all_levels,
        bisect_outputs=bisect_outputs,
        drift=drift,
        accumulation=accumulation,
        reproduction=None if reproduction is None else place(reproduction),
        loading={
            "attn_implementation": attn_implementation,
            "trust_remote_code": trust_remote_code,
            "revision": revision,
        },
        trust_engine=trust_engine,
        adapter=adapter,
        mesh=mesh_for(tensor_parallel, pipeline_parallel),
        jobs=jobs,
        grafts=sites_of(tuple(graft)),
        progress=progress,
        route=route,
    )
    request.require_jobs()
    if request.reproduction is not None:
        require_free(request.reproduction)
    if against is not None:
        if candidate is not None:
            raise UsageError("--against runs BASELINE itself", got=f"the candidate {candidate}", hint="leave it out")
        refuse(RECORD, request.flags, against)
        found: Comparison = plugin("serving.another_python").check_against(request, str(against))
        return found
    if suggest_precision:
        if min_snr is None:
            raise UsageError("--suggest-precision needs a budget", hint="--min-snr 40dB")
        kept: Comparison = plugin("quantized.suggest").suggest(request, min_snr)
        return kept
    if only is not None:
        return check_only(request, only, tokenizer)
    with beside(request, tokenizer) as with_prompt:
        return with_prompt(until_clean(request, route) if graft_until_clean else route(request))


def sites_of(grafts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the sites of `SITE=baseline`.

    Raises:
        UsageError: Another word is given.
    """
    for one in grafts:
        if not one.endswith("=baseline") or one == "=baseline":
            raise UsageError("invalid --graft", got=one, expected="SITE=baseline")
    return tuple(one.removesuffix("=baseline") for one in grafts)


def until_clean(request: CheckRequest, check: Callable[[CheckRequest], Comparison]) -> Comparison:
    """Judge, graft every origin, and judge again until no more is found; return the first answer with all mistakes."""
    first = result = check(request)
    sites = list(request.grafts)
    found: list[Divergence] = []
    rounds, why = 0, None
    while rounds < _MOST_ROUNDS:
        new = [one for one in result.origins if _is_mistake(one, request.policy) and one.site not in sites]
        if not new:
            break
        found += new
        sites += dict.fromkeys(one.site for one in new)
        rounds += 1
        try:
            result = check(replace(request, grafts=tuple(sites), reproduction=None))
        except GlassError as error:
            why = first_line(error)
            break
    # The module as it is shows fewer tensors: its origin may only pass on what the program shows once it is grafted.
    found = [one for one in found if one.level == Place.CANDIDATE] or found
    later = [one for one in found if one.site not in {origin.site for origin in first.origins}]
    return with_grafts(first, later, _summary(found, result, rounds, why))


def _is_mistake(one: Divergence, policy: Policy) -> bool:
    return one.level in (Place.CANDIDATE, Place.UNTOUCHED) and policy.fails(one.verdict)


def _summary(found: list[Divergence], last: Comparison, rounds: int, why: str | None) -> str:
    if not found:
        return "grafting: no op of the candidate's program is wrong, so that nothing was grafted"
    names = list(dict.fromkeys(one.site for one in found))
    many = f"{len(names)} mistake{'s' if len(names) > 1 else ''}"
    text = f"grafting lists {many} in {rounds} round{'s' if rounds > 1 else ''}: {', '.join(names)}"
    if why is not None:
        return f"{text}; then it ended: {why}"
    if last.verdict in FLAGGED:
        return f"{text}; with the baseline's tensors there something else is still {last.verdict}"
    return f"{text}; with the baseline's tensors there nothing else is wrong"


def check_only(request: CheckRequest, only: str, tokenizer: str | None) -> Comparison:
    """Return the comparison of the prompts alone; no model is loaded.

    Raises:
        UnknownNameError: There is no such level by itself.
        UsageError: A side has no tokenizer.
    """
    if only != LEVEL:
        raise UnknownNameError("part", only, [LEVEL], hint="leave --only out for all")
    if request.candidate is None and tokenizer is None:
        raise UsageError("--only prompt compares two sides", got="no --candidate", hint="--candidate TARGET")
    given = request.baseline, tokenizer or served_spec(request)
    if not all(isinstance(side, str | Path) for side in given):
        raise UsageError("--only prompt compares files", got="a module", expected="a directory or file for each side")
    sides = str(given[0]), str(given[1])
    with closing(Processes(answer, 1)) as workers:
        prompt = _compared(workers, request, sides, fetch=True)
    found = Findings(*sides, environment.describe(), left=None if prompt.ok or prompt.wrong else prompt.in_words())
    return with_prompt(found.conclude(request.policy), prompt)


@contextmanager
def beside(request: CheckRequest, tokenizer: str | None) -> Iterator[Add]:
    """Compare the prompts in another process meanwhile; yield a function that adds what was found to a comparison.

    It adds nothing where a side has no tokenizer, and a note where one cannot be opened.

    Raises:
        UsageError: A tokenizer was given that cannot be used, or that has no counterpart.
    """
    sides = _sides_of(request, tokenizer)
    if sides is None:
        yield lambda result: result
        return
    with ThreadPoolExecutor(1) as thread, closing(Processes(answer, 1)) as workers:

        def start() -> Future[PromptComparison]:
            return thread.submit(_compared, workers, request, sides)

        # What is on the hub is here once the model is loaded.
        begun = None if any(map(_is_hub_id, sides)) else start()
        yield lambda result: _added(result, begun or start(), is_asked=tokenizer is not None)


def _added(result: Comparison, found: Future[PromptComparison], *, is_asked: bool) -> Comparison:
    try:
        prompt = found.result()
        return with_prompt(result, prompt) if prompt.ok or prompt.wrong else result
    except NoTokenizer:
        if is_asked:
            raise
        return result
    except (GlassError, RuntimeError) as error:  # of a worker
        if is_asked:
            raise
        return replace(result, notes=(*result.notes, f"the prompts were not compared: {first_line(error)}"))


def _compared(
    workers: Processes, request: CheckRequest, sides: tuple[str, str], *, fetch: bool = False
) -> PromptComparison:
    baseline, candidate = (_local(side, request, fetch=fetch) for side in sides)
    found = compare_files(baseline, candidate)
    if found is None:
        is_text = isinstance(request.inputs, str) and Path(request.inputs).suffix == ".txt"
        texts = prompt_texts(str(request.inputs))[:_MOST_TEXTS] if is_text else ()
        found = compare_in(workers, baseline, candidate, texts, python=request.serving.python)
    return replace(found, baseline=sides[0], candidate=sides[1])


def _sides_of(request: CheckRequest, tokenizer: str | None) -> tuple[str, str] | None:
    """Return both sides where each may have a tokenizer; None where one surely has none."""
    other = tokenizer or served_spec(request)
    if other is None or not isinstance(request.baseline, str | Path) or not isinstance(other, str | Path):
        return None
    baseline = base_and_adapter(str(request.baseline), None)[0]
    try:
        for side in (baseline, str(other)):
            if not _is_hub_id(side) and kind_of(side)[0] == "port" and side != tokenizer:
                if tokenizer is None:
                    return None  # it returns a model, which would be built twice
                raise UsageError("--tokenizer has nothing beside it", got=side, expected="a baseline with a tokenizer")
    except UsageError:
        if tokenizer is not None:
            raise
        return None
    return baseline, str(other)


def _is_hub_id(side: str) -> bool:
    return HUB_ID.fullmatch(side) is not None and not Path(side).exists()


def _local(side: str, request: CheckRequest, *, fetch: bool) -> str:
    """Return the side, or the directory of a hub id; its small files are fetched where that is wanted."""
    if not _is_hub_id(side):
        return side
    from huggingface_hub import snapshot_download

    try:
        revision = request.loading.get("revision")
        found = snapshot_download(side, revision=revision, allow_patterns=list(_FILES), local_files_only=not fetch)
        return str(found)
    except Exception as error:
        raise NoTokenizer("the tokenizer is not here", got=f"{side}: {first_line(error)}") from None
