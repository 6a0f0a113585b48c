"""The level `prompt` of a check: tokens, templates and settings of both sides, compared while the model is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from glassengine import environment
from glassengine.asked import HUB_ID
from glassengine.diagnose.ladder.request import CheckRequest
from glassengine.diagnose.router import served_spec
from glassengine.errors import GlassError, UnknownNameError, UsageError, first_line
from glassengine.judge.cases import prompt_texts
from glassengine.program.loading.adapters import base_and_adapter
from glassengine.prompt.check import compare_files, compare_in
from glassengine.prompt.side import NoTokenizer
from glassengine.prompt.worker import answer, kind_of
from glassengine.results import Comparison, Findings, with_prompt
from glassengine.results.without_tensors import LEVEL, PromptComparison
from glassengine.workers.processes import Processes

_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
_MOST_TEXTS = 64
Add = Callable[[Comparison], Comparison]


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
