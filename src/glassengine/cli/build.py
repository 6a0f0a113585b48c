"""`glass build`: make an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

import glassengine as glass
from glassengine import commands, environment
from glassengine.cli import foreign
from glassengine.cli.documents import answer
from glassengine.cli.options import out, stages
from glassengine.cli.options import progress as progress_bar
from glassengine.cli.shared import (
    AdaptedCheckpoint,
    Dtype,
    ModuleInputs,
    Overwrite,
    Passes,
    PipelineParallel,
    Quantize,
    TensorParallel,
)
from glassengine.errors import UsageError
from glassengine.progress import Work
from glassengine.results import BatchProof

CONTEXT_SETTINGS = foreign.CONTEXT_SETTINGS

_INVARIANT = "onnxruntime"
"""Back-end whose kernels give a row the same bits in every batch of rows of one length."""
_SHARES = ((Work.LOADING, 1.0), (Work.EXPORTING, 8.0), (Work.COMPILING, 12.0), (Work.WRITING, 1.0))


def command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Hugging Face directory or id, file.py:factory, package.module:factory.",
            show_default=False,
        ),
    ] = None,
    out_directory: Annotated[
        str | None,
        typer.Argument(
            metavar="OUT", help="Directory of the new engine; default: engines/<model>.", show_default=False
        ),
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="DIR", help="Same as OUT.", show_default=False)
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Back-end, see glass doctor; default: inductor, or onnxruntime without a C++ compiler."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", help="Device the engine runs on; default: that of the back-end."),
    ] = None,
    quantize: Quantize = None,
    dtype: Dtype = "auto",
    add_output: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SITE[=ALIAS][:DTYPE]",
            help="Add a debug output: site, node, glob or re:; @FILE reads {name: alias}. Repeatable; see glass sites.",
        ),
    ] = None,
    inputs: ModuleInputs = None,
    passes: Passes = None,
    artifacts: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Write every stage of the build, the network and an index.html; DEBUG_ARTIFACTS_DIR does, too.",
            show_default=False,
        ),
    ] = None,
    max_batch_size: Annotated[int, typer.Option(help="Maximum sequences of a batch.")] = 8,
    max_seq_len: Annotated[
        int | None, typer.Option(help="Maximum tokens of a sequence; default: the limit of the model.")
    ] = None,
    tensor_parallel: TensorParallel = 1,
    pipeline_parallel: PipelineParallel = 1,
    overwrite: Overwrite = False,
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="Prove on 200 random batches that rows have the same bits as alone."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be built, and its size.")] = False,
    model_dir: Annotated[str | None, typer.Option("--model-dir", hidden=True)] = None,
    visualize_network: Annotated[bool, typer.Option("--visualize-network", hidden=True)] = False,
    profiling_verbosity: Annotated[str | None, typer.Option("--profiling-verbosity", hidden=True)] = None,
    use_gpt_attention_plugin: Annotated[bool, typer.Option("--use-gpt-attention-plugin", hidden=True)] = False,
    *,
    checkpoint: AdaptedCheckpoint,
) -> int:
    """Compile a model into an engine directory."""
    # Every listing of ours is a detailed one, and attention is one op, the "plugin", in every program.
    del profiling_verbosity, use_gpt_attention_plugin
    if (model is None) == (model_dir is None):
        raise UsageError(
            "give one model", got=None if model is None else f"{model} and {model_dir}", hint="glass build MODEL [OUT]"
        )
    model = str(model or model_dir)
    if visualize_network and artifacts is None and environment.debug_artifacts_dir() is None:
        raise UsageError("--visualize_network needs a directory", hint="--artifacts DIR, or DEBUG_ARTIFACTS_DIR=DIR")
    if out_directory is not None and output is not None:
        raise UsageError("the output directory is given twice", got=f"{out_directory} and {output}")
    backend = backend or (_INVARIANT if batch_invariant else None)
    options: dict[str, Any] = {
        "backend": backend,
        "device": device,
        "quantize": quantize,
        "dtype": dtype,
        "add_output": add_output or (),
        "inputs": inputs,
        "passes": passes or (),
        "max_batch_size": max_batch_size,
        "max_seq_len": max_seq_len,
        **vars(checkpoint),
        "artifacts": artifacts,
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
        "batch_invariant": batch_invariant,
    }
    directory = out_directory or output
    if dry_run:
        with stages(_SHARES[:2]) as progress:
            plan = glass.build(model, directory, dry_run=True, progress=progress, **options)
        answer(plan.to_dict, lambda: _print_plan(plan))
        return 0
    with stages(_SHARES) as progress:
        engine = glass.build(model, directory, overwrite=overwrite, progress=progress, **options)
    proof = None
    if batch_invariant:
        with progress_bar(f"running random batches of {engine.manifest.name}"):
            proof = commands.prove_batch_invariant(engine.directory, inputs)
    manifest = engine.manifest
    where = Path(artifacts) if artifacts is not None else environment.debug_artifacts_dir()
    document = {"directory": str(engine.directory), **manifest.to_dict()}
    document |= {} if proof is None else {"batch_invariance": proof.to_dict()}
    answer(lambda: document, lambda: _print_engine(engine, where, proof))
    return 0 if proof is None or proof.ok else 1


def _print_plan(plan: Any) -> None:
    out.print(f"would build {plan.output_dir} with {plan.backend}, {plan.dtype}")
    out.print(f"  weights              {plan.weights_bytes:>16,} bytes")
    out.print(f"  key/value cache      {plan.cache_bytes:>16,} bytes at the largest batch and length")
    out.print(f"  added outputs        {plan.prefill_output_bytes:>16,} bytes in the largest prefill")
    out.print(f"                       {plan.decode_output_bytes:>16,} bytes in the largest decode step")
    _print_outputs(plan.added_outputs)


def _print_engine(engine: glass.Engine, artifacts: Path | None, proof: BatchProof | None) -> None:
    manifest = engine.manifest
    ranks = "".join(f", {kind} parallel {size}" for kind, size in manifest.mesh.items() if size > 1)
    out.print(f"built {engine.directory} with {manifest.backend}, {manifest.dtype}{ranks}")
    _print_outputs(manifest.added_outputs)
    if proof is not None:
        plain = "it is the plain engine, and costs what that costs"
        price = plain if manifest.backend == _INVARIANT else "its attention is products of matrices"
        price = price if proof.ok else f"glass check {engine.directory} --invariant batch says where"
        out.print(f"  batch invariant: {'yes' if proof.ok else 'NO'}: {proof.in_words()}; {price}")
    for name, reason in manifest.left_out.items():
        out.print(f"  left out {name}: {reason}")
    if artifacts is not None:
        out.print(f"  artifacts {artifacts / 'index.html'}")


def _print_outputs(outputs: Sequence[Any]) -> None:
    """Print what the patterns of --add-output matched."""
    for entry in outputs:
        shape = ", ".join(map(str, entry.shape))
        note = "" if entry.name == entry.site else f"  ({entry.site})"
        cast = f", cast from {entry.cast_from}" if entry.cast_from else ""
        out.print(f"  output {entry.name}{note}  {entry.dtype}[{shape}]{cast}")
