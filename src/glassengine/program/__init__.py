"""From a model to a named program: load, export, name, add outputs, pass."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from glassengine.errors import UsageError
from glassengine.program.export.export import export_causal_lm, export_module
from glassengine.program.export.specialized import export_specialized
from glassengine.program.export.two import export_encoder_decoder, export_image_text
from glassengine.program.inputs.given import load_inputs
from glassengine.program.kinds import image_text
from glassengine.program.kinds.example_inputs import encoder_inputs, example_inputs, said_of_made_up
from glassengine.program.listing.listing import OnStage, stage_of
from glassengine.program.loading.load import LoadedModel, load_model
from glassengine.program.representation.passes import apply_pass
from glassengine.program.representation.program import Program, load_names
from glassengine.program.user_code.module_state import holding
from glassengine.program.user_code.raised import forward_errors
from glassengine.program.user_code.written_modules import uncompiled
from glassengine.sites import Site, SiteTable

__all__ = [
    "LoadedModel",
    "Program",
    "example_inputs",
    "export_program",
    "export_programs",
    "load_inputs",
    "load_model",
    "sites",
]


def export_program(
    model: LoadedModel,
    *,
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    passes: Sequence[str] = (),
    on_stage: OnStage | None = None,
    specialized: bool = False,
) -> Program:
    """Export a loaded model once and run user passes over it; of a model that generates with two, the decoder.

    Args:
        model: From `load_model`.
        inputs: Inputs of one forward, see `export_module`; None exports the steps of a model that generates, and makes
            inputs up for any other one of transformers.
        passes: `file.py:function`, in order.
        on_stage: Called with each stage as it is reached: "exported" (as traced), "functional", "pass-<function>".
        specialized: Let the trace of a plain module see the values of `inputs`, which are those of one step.

    Raises:
        UsageError: It cannot be traced or run; or it is a plain module whose inputs are unknown.
    """
    return export_programs(model, inputs=inputs, passes=passes, on_stage=on_stage, specialized=specialized)[-1]


def export_programs(
    model: LoadedModel,
    *,
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    passes: Sequence[str] = (),
    on_stage: OnStage | None = None,
    on_encoder_stage: OnStage | None = None,
    specialized: bool = False,
) -> tuple[Program, ...]:
    """Export all programs of a loaded model: one, or two of which the last decodes; passes and stages are its.

    Args:
        model: As for `export_program`.
        inputs: As for `export_program`.
        passes: As for `export_program`.
        on_stage: As for `export_program`.
        on_encoder_stage: The same for what runs before the first step: an encoder, or the vision program.
        specialized: As for `export_program`.

    Raises:
        UsageError: As `export_program`.
    """
    with (
        forward_errors(model.module, f"{model.spec} cannot be exported, its forward raised in"),
        uncompiled(model.module) as module,
    ):
        model = replace(model, module=module)
        earlier, program = _exported(model, inputs, passes, on_stage, on_encoder_stage, specialized)
    if on_stage is not None:
        on_stage(stage_of(program, "functional"))
    for spec in passes:
        program = apply_pass(program, spec)
        if on_stage is not None:
            on_stage(stage_of(program, f"pass-{spec.rpartition(':')[2]}"))
    return *earlier, program


def _exported(
    model: LoadedModel,
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    passes: Sequence[str],
    on_stage: OnStage | None,
    on_encoder_stage: OnStage | None,
    specialized: bool,
) -> tuple[tuple[Program, ...], Program]:
    """Return the programs before the last one, and that."""
    earlier: tuple[Program, ...] = ()
    if model.stored is not None:
        program = _stored(model.stored, passes)
    elif model.decoding == "encoder_decoder" and inputs is None:
        given = encoder_inputs(model.module, model.directory)
        with said_of_made_up(model.module, given):
            encoder, program = export_encoder_decoder(
                model.module, given, metadata=model.metadata, on_stage=on_stage, on_encoder_stage=on_encoder_stage
            )
        if on_encoder_stage is not None:
            on_encoder_stage(stage_of(encoder, "functional"))
        earlier = (encoder,)
    elif model.decoding == "images" and inputs is None:
        *earlier_ones, program = _with_images(model, on_stage, on_encoder_stage)
        earlier = tuple(earlier_ones)
    elif (model.generates and inputs is None) or model.kind == "causal_lm":
        program = export_causal_lm(model.module, metadata=model.metadata, on_stage=on_stage)
    else:
        if inputs is None:
            inputs = example_inputs(model.module, model.directory)
        keeps = model.state is not None
        held = holding(model.module, model.state, as_buffers=True) if keeps else contextlib.nullcontext()
        with said_of_made_up(model.module, inputs), held:
            options: dict[str, Any] = {"metadata": model.metadata, "on_stage": on_stage, "keeps_state": keeps}
            if specialized:
                (step,) = [inputs] if isinstance(inputs, Mapping) else inputs
                program = export_specialized(model.module, step, **options)
            else:
                program = export_module(model.module, inputs, **options)
    return earlier, program


def _with_images(model: LoadedModel, on_stage: OnStage | None, on_encoder_stage: OnStage | None) -> tuple[Program, ...]:
    """Return the vision program and the decoder; the language model alone, saying so, where they cannot be traced."""
    try:
        image = image_text.made_up_image(model.module, model.directory)
        vision, program = export_image_text(
            model.module, image, metadata=model.metadata, on_stage=on_stage, on_encoder_stage=on_encoder_stage
        )
    except Exception as error:  # the model's own code may raise anything
        model.metadata[image_text.WITHOUT_IMAGES] = image_text.reason_of(error)
        return (export_causal_lm(model.module, metadata=model.metadata, on_stage=on_stage),)
    if on_encoder_stage is not None:
        on_encoder_stage(stage_of(vision, "functional"))
    return vision, program


def _stored(program: Program, passes: Sequence[str]) -> Program:
    if passes and program.onnx is not None:
        raise UsageError(
            "a pass changes a graph of torch, and an ONNX file has none",
            got=f"--pass {passes[0]}",
            hint="change the ONNX graph itself, or give the model that it was made of",
        )
    return program


def sites(
    target: str | Path,
    pattern: str | None = None,
    *,
    inputs: str | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> list[Site]:
    """List the sites of a model or an engine, without building or loading weights.

    Args:
        target: MODEL, or an engine directory.
        pattern: Site, alias, glob or `re:` pattern; None lists all.
        inputs: Inputs of a model that is not a causal language model.
        attn_implementation: As in transformers.
        trust_remote_code: Allow code that comes with the checkpoint to run.
        revision: Of a hub id.

    Raises:
        UnknownNameError: The pattern matches nothing; carries the nearest names.
    """
    if (Path(target) / "program.json").is_file():
        tables: list[SiteTable] = [load_names(Path(target))["sites"]]
    else:
        model = load_model(
            target,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            revision=revision,
            weights=False,
        )
        tables = [program.sites for program in export_programs(model, inputs=load_inputs(inputs) if inputs else None)]
    if pattern is None:
        return [site for table in tables for site in table]
    found = [site for table in tables for site in table.match(pattern)]
    return found or tables[-1].resolve([pattern])
