"""`glass run`: generate with an engine, look at its tensors on the way, write or record them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import glassengine as glass
from glassengine import asked, environment
from glassengine.cli import foreign
from glassengine.cli.documents import answer
from glassengine.cli.options import err, out, settings
from glassengine.cli.shared import Overwrite, TrustEngine
from glassengine.errors import UsageError
from glassengine.reading.files import printable
from glassengine.stores.places import place

CONTEXT_SETTINGS = foreign.CONTEXT_SETTINGS

_PROMPT = "The value of an expression"
_MAX_PRINTED = 64
"""A tensor of more elements is printed as a few figures."""


def command(
    engine: Annotated[
        str | None, typer.Argument(metavar="ENGINE", help="Directory of an engine.", show_default=False)
    ] = None,
    engine_dir: Annotated[str | None, typer.Option("--engine-dir", hidden=True)] = None,
    input_text: Annotated[
        list[str] | None, typer.Option("--input-text", metavar="TEXT", help="A prompt. Repeatable: one batch.")
    ] = None,
    input_ids: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Token ids instead: .json (one list, or one per prompt), .npz, .pt, .safetensors."
        ),
    ] = None,
    input_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompt file instead: .txt with one per line, .json or .jsonl of strings."),
    ] = None,
    chat: Annotated[
        str | None,
        typer.Option(metavar="FILE", help=".json file of messages instead, rendered by the model's chat template."),
    ] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Image for the next placeholder in the prompts. Repeatable."),
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Tensors instead, for engines that need more than text (images, sound)."),
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(metavar="DIR", help="Tokenizer instead of the engine's own.")] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Checkpoint with the weights, if the engine does not contain them."),
    ] = None,
    trust_engine: TrustEngine = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            help="Maximum new tokens (also --max-output-len); default: the model's own setting, or 20.",
        ),
    ] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Run the prompt in pieces of N tokens, to save memory."),
    ] = None,
    use_py_session: Annotated[bool, typer.Option("--use-py-session", hidden=True)] = False,
    streaming: Annotated[bool, typer.Option("--streaming", hidden=True)] = False,
    record: Annotated[
        str | None, typer.Option(metavar="DIR", help="Record the added outputs and logits of every step.")
    ] = None,
    overwrite: Overwrite = False,
    profile: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Profile the generation; show it with glass profile DIR.", show_default=False),
    ] = None,
    *,
    sampling: Sampling,
    debugging: Debugging,
) -> int:
    """Generate text with an engine, or run one forward of it; print or record its tensors."""
    # Every session of ours is one of Python, and a single prompt is always streamed.
    del use_py_session, streaming
    if engine is not None and engine_dir is not None:
        raise UsageError(
            "more than one engine is named",
            got=f"{engine} and {engine_dir}",
            hint="each prompt has a flag of its own: --input-text",
        )
    if engine is None and engine_dir is None:
        raise UsageError("no engine is named", hint="glass run ENGINE --input-text TEXT")
    files = _step_files(debugging)
    patterns = list(debugging.debug or ())
    names = debugging.print_tensors or (debugging.debug_mode and files is None)
    prints = debugging.print_tensors or (bool(patterns) and files is None)
    if settings.json == "-" and (names or prints):
        raise UsageError(
            "--json prints one document, --debug many lines", hint="write the tensors: --debug-dir DIR or --record DIR"
        )
    given: dict[str, Any] = {
        "prompt_file": input_file,
        "chat": chat,
        "image": list(image) if image else None,
        "prefill_chunk": prefill_chunk,
        **sampling.arguments(),
    }
    asked.engine(engine or engine_dir)
    loaded = glass.load(str(engine or engine_dir), trust=trust_engine, model=model)
    if debugging.synchronous:
        loaded.executable.synchronous = True
    profiling = glass.profiler.profile(profile) if profile is not None else contextlib.nullcontext()
    if loaded.manifest.mesh and environment.rank():
        # Started by torchrun beside the first rank, which prints for all; each records what it makes.
        texts = list(input_text) if input_text else None
        same = {name: value for name, value in given.items() if value is not None and name != "image"}
        more: dict[str, Any] = {"input_ids": input_ids, "tokenizer": tokenizer, "max_new_tokens": max_new_tokens}
        more |= {"record": record, "overwrite": overwrite}
        loaded.generate(texts, **more, **same)
        return 0
    if not loaded.manifest.generates:
        other_options = {**given, "prompt_file": None, "max_new_tokens": max_new_tokens, "debug_dir": files}
        sources = {
            "prompts": list(input_text) if input_text else None,
            "input_ids": input_ids,
            "prompt_file": input_file,
            "inputs": inputs,
            "tokenizer": tokenizer,
        }
        wanted = {"debug": patterns, "record": record, "overwrite": overwrite}
        with _snapshots(debugging), profiling:
            return _forward(loaded, {**sources, **wanted}, other_options)
    if not (input_text or input_ids or input_file or inputs or loaded.manifest.has_encoder):
        input_text = [_PROMPT]
        if not settings.quiet:
            err.print(f"no prompt is given: {_PROMPT!r} (--input-text TEXT)")
    observers = [_printer(names, prints)] if names or prints else []
    streams = len(input_text or ()) == 1 and settings.json != "-" and not observers
    with (
        files if files is not None else contextlib.nullcontext(),
        _kept(files, record),
        _snapshots(debugging),
        profiling,
        _line() as write,
    ):
        result = loaded.generate(
            list(input_text) if input_text else None,
            input_ids=input_ids,
            inputs=inputs,
            tokenizer=tokenizer,
            max_new_tokens=max_new_tokens,
            debug=patterns or prints or files is not None,
            on_step=_each([*observers, files] if files is not None else observers),
            on_text=write if streams else None,
            record=record,
            overwrite=overwrite,
            images=given.pop("image"),
            **{name: value for name, value in given.items() if value is not None},
        )
        written = {} if files is None else {"debug_dir": str(files.directory)}

        def show() -> None:
            if streams:
                _write("\n")
            else:
                _print_texts(result)
            if not settings.quiet:
                _print_notes(result, files)
                if profile is not None:
                    err.print(f"profile taken: glass profile {profile}")

        answer(lambda: {"engine": str(loaded.directory), **result.to_dict(), **written}, show)
    return 0


def _step_files(debugging: Debugging) -> glass.compat.StepFiles | None:
    """Return what writes the files of the steps; None where none were asked for."""
    formats = debugging.debug_format or ()
    named = environment.debug_artifacts_dir() if debugging.debug_mode or formats else None
    target = debugging.debug_dir or named
    if target is None and formats:
        raise UsageError(
            "--debug-format needs a directory", hint="--debug-dir DIR, or the variable DEBUG_ARTIFACTS_DIR"
        )
    if target is None:
        return None
    return glass.compat.StepFiles(target, formats=formats) if formats else glass.compat.StepFiles(target)


@contextlib.contextmanager
def _snapshots(debugging: Debugging) -> Iterator[None]:
    """Take snapshots while the block runs, and say how many there are."""
    directory, on = debugging.snapshot, debugging.snapshot_on
    if directory is None:
        if on:
            raise UsageError("--snapshot-on needs a directory", hint="--snapshot DIR")
        yield
        return
    with glass.snapshots.take(directory, on=on or "every") as taking:  # type: ignore[arg-type]  # words are checked there
        try:
            yield
        finally:
            if taking.written and not settings.quiet:
                count = f"{len(taking.written)} snapshot" + ("s" if len(taking.written) > 1 else "")
                err.print(f"took {count}: glass snapshot show {directory}")


@contextlib.contextmanager
def _line() -> Iterator[Callable[[str], None]]:
    """Yield what writes pieces of a text; one that is cut short ends its line, so that no message runs on from it."""
    pieces = 0

    def write(text: str) -> None:
        nonlocal pieces
        pieces += bool(text)
        _write(text)

    try:
        yield write
    except BaseException:
        if pieces:
            _write("\n")
        raise


@contextlib.contextmanager
def _kept(files: glass.compat.StepFiles | None, record: str | None) -> Iterator[None]:
    """Say what is on disk when the user stops the run."""
    try:
        yield
    except KeyboardInterrupt:
        if files is not None:
            err.print(f"wrote the tensors of {files.num_steps} steps to {files.directory}")
        if record is not None and (place(record) / "recording.json").is_file():
            err.print(f"recorded the steps that were finished: glass show {record}")
        raise


def _each(observers: Sequence[Callable[[Any], None]]) -> Callable[[Any], None] | None:
    def call(session: Any) -> None:
        for observe in observers:
            observe(session)

    return call if observers else None


def _write(text: str) -> None:
    # What a model writes is data for a program; a terminal would obey it. Joiners are part of words and pictures.
    sys.stdout.write(printable(text, also="\n\t\u200c\u200d") if sys.stdout.isatty() else text)
    sys.stdout.flush()


def _printer(names: bool, tensors: bool) -> Callable[[Any], None]:
    """Return what prints a step as the documents do: the names once, then `step name tensor`."""

    def show(session: Any) -> None:
        if names and session.step == 0:
            # As Python prints the keys of `debug_buffers`, without making copies where nothing else is asked for.
            out.print(f"dict_keys({list(session.debug_buffers) or session.engine.debug_names})")
        if tensors:
            for name, tensor in session.debug_buffers.items():
                out.print(f"{session.step} {name} {tensor}")

    return show


def _print_texts(result: Any) -> None:
    if result.texts is None:
        for row in result.token_ids:
            out.print(" ".join(map(str, row)))
        return
    prompts = result.prompts or [" ".join(map(str, row)) for row in result.prompt_token_ids]
    inputs = [f"Input: {prompt}\n" for prompt in prompts] or [""] * len(result.texts)
    for prompt, text in zip(inputs, result.texts, strict=True):
        # Not through the console, which would drop control characters.
        _write(f"{prompt}Output: {text}\n")


def _print_notes(result: Any, files: glass.compat.StepFiles | None) -> None:
    # A recurrent engine takes a step for every token of a prompt, too.
    steps = max(len(row) for row in result.token_ids) - 1
    each = f", {result.decode_s / steps * 1e3:.2f} ms each" if steps else ""
    err.print(f"prefill {result.prefill_s * 1e3:.1f} ms, {steps} decode step{'' if steps == 1 else 's'}{each}")
    if result.seed is not None:
        err.print(f"sampled with --seed {result.seed}")
    if result.recording:
        err.print(f"recorded {Path(result.recording)}: glass show {result.recording}")
    if files is not None:
        err.print(f"wrote the tensors of {files.num_steps} steps to {files.directory}")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    do_sample: Annotated[
        bool | None,
        typer.Option(
            "--do-sample/--no-do-sample",
            help="Sample, or take the most likely token; default: the model's own setting, and sampling if "
            "--temperature, --top-k or --top-p is given.",
        ),
    ] = None
    temperature: Annotated[float | None, typer.Option(help="As in transformers.")] = None
    top_k: Annotated[int | None, typer.Option(min=0, help="As in transformers; 0 is all.")] = None
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="As in transformers.")] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="As in transformers.")] = None
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of sampling; default: a new one, which is printed."),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `Engine.generate`: what chooses among likely tokens turns sampling on."""
        chooses = any(value is not None for value in (self.temperature, self.top_k, self.top_p))
        return {**vars(self), "do_sample": True if self.do_sample is None and chooses else self.do_sample}


@dataclass(frozen=True)
class Debugging:
    """Which tensors of a run are shown, where files and snapshots of them go."""

    debug: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Show these tensors at every step: name, site, glob or re:. Repeatable. They are printed, unless "
            "they are written to files.",
        ),
    ] = None
    print_tensors: Annotated[
        bool,
        typer.Option(
            "--print-tensors", help="Print the tensor names, then step, name and tensor; without --debug all of them."
        ),
    ] = False
    debug_dir: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Write every input and output of every step (or those of --debug) to DIR/step0.pt, DIR/step0.txt, ...",
        ),
    ] = None
    debug_format: Annotated[
        list[str] | None,
        typer.Option(metavar="FORMAT", help="pt, txt or npy. Repeatable; default: pt and txt."),
    ] = None
    debug_mode: Annotated[
        bool,
        typer.Option(
            "--debug-mode",
            help="Like --debug-dir, into the directory of the variable DEBUG_ARTIFACTS_DIR; without it, print "
            "the names of the tensors.",
        ),
    ] = False
    synchronous: Annotated[
        bool,
        typer.Option(
            "--synchronous",
            help="Wait for the device after each execution, so that an error names the failing one "
            "(also GLASS_SYNCHRONOUS=1 and CUDA_LAUNCH_BLOCKING=1).",
        ),
    ] = False
    snapshot: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Write a snapshot (graph and inputs) of each execution, for glass replay."),
    ] = None
    snapshot_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHEN",
            help="every; or nonfinite, error: the first such execution, with its outputs; then stop. Repeatable.",
        ),
    ] = None


def _forward(engine: Any, given: Mapping[str, Any], other_options: Mapping[str, Any]) -> int:
    """Run an engine that does not generate, and show what came out.

    Args:
        engine: Loaded, of kind "module".
        given: Arguments of `Engine.forward`.
        other_options: Flag -> value, or None where it was not given: what means nothing here.

    Raises:
        UsageError: A flag of generation was given, or the inputs do not fit.
        UnknownNameError: A pattern of `--debug` names nothing.
    """
    meaningless = [f"--{name.replace('_', '-')}" for name, value in other_options.items() if value is not None]
    if meaningless:
        raise UsageError(
            f"the engine {engine.manifest.name!r} runs in one forward and generates nothing",
            got=", ".join(meaningless),
            hint="leave them out; --record DIR writes its tensors",
        )
    result = engine.forward(**given)
    answer(lambda: {"engine": str(engine.directory), **result.to_dict()}, lambda: _print_forward(result))
    return 0


def _print_forward(result: Any) -> None:
    for name, tensor in result.outputs.items():
        out.print(f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}", markup=False)
        out.print(_shown_values(tensor), markup=False, highlight=False)
    if not settings.quiet:
        err.print(f"forward {result.seconds * 1e3:.1f} ms")
        if result.recording:
            err.print(f"recorded {Path(result.recording)}: glass show {result.recording}")


def _shown_values(tensor: Any) -> str:
    if tensor.numel() <= _MAX_PRINTED:
        return str(tensor)
    values = tensor.double()
    low, mean, high = (float(value) for value in (values.min(), values.mean(), values.max()))
    return f"  min {low:.4g}, mean {mean:.4g}, max {high:.4g}; all values: --json or --record DIR"
