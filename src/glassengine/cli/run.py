"""`glass run`: generate with an engine, look at its tensors on the way, record them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import glassengine as glass
from glassengine.cli import foreign
from glassengine.cli.options import err, out, settings, write_json
from glassengine.errors import UsageError

CONTEXT_SETTINGS = foreign.CONTEXT_SETTINGS


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
    tokenizer: Annotated[str | None, typer.Option(metavar="DIR", help="Tokenizer instead of the engine's own.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            metavar="N",
            help="Most tokens to generate (also --max-output-len); by default the model's own setting, else 20.",
        ),
    ] = None,
    debug: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Print these tensors of every step: name, site, glob or re:. Repeatable."),
    ] = None,
    debug_mode: Annotated[
        bool, typer.Option("--debug-mode", help="Print the names of all tensors of a step first.", hidden=True)
    ] = False,
    use_py_session: Annotated[bool, typer.Option("--use-py-session", hidden=True)] = False,
    record: Annotated[
        str | None, typer.Option(metavar="DIR", help="Record the added outputs and logits of every step.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a recording that exists.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Generate text with an engine; print or record its tensors."""
    # Every session of ours is one of Python, so --use_py_session changes nothing.
    del use_py_session
    if (engine is None) == (engine_dir is None):
        raise UsageError("give one engine", hint="glass run ENGINE --input-text TEXT")
    if json and (debug or debug_mode):
        raise UsageError("--json prints one document, --debug many lines", hint="record the tensors: --record DIR")
    loaded = glass.load(str(engine or engine_dir))
    observes = bool(debug or debug_mode)
    streams = len(input_text or ()) == 1 and not json and not observes
    result = loaded.generate(
        list(input_text) if input_text else None,
        input_ids=input_ids,
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        debug=list(debug) if debug else debug_mode,
        on_step=_printer(debug_mode, bool(debug)) if observes else None,
        on_text=_write if streams else None,
        record=record,
        overwrite=overwrite,
    )
    if json:
        write_json({"schema_version": 1, "engine": str(loaded.directory), **result.to_dict()}, "-")
        return 0
    if streams:
        _write("\n")
    else:
        _print_texts(result)
    if not settings.quiet:
        steps = max(result.num_steps - 1, 1)
        err.print(
            f"prefill {result.prefill_s * 1e3:.1f} ms, {result.num_steps - 1} decode steps, "
            f"{result.decode_s / steps * 1e3:.2f} ms each"
        )
        if result.recording:
            err.print(f"recorded {Path(result.recording)}: glass show {result.recording}")
    return 0


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _printer(names: bool, tensors: bool) -> Any:
    """Return what prints a step as the documents do: the names once, then `step name tensor`."""

    def show(session: Any) -> None:
        if names and session.step == 0:
            out.print(str(session.engine.debug_names))
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
    for prompt, text in zip(prompts, result.texts, strict=True):
        # Not through the console, which would drop control characters.
        _write(f"Input: {prompt}\nOutput: {text}\n")
