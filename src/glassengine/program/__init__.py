"""From a model to a named program: load, export, name, add outputs, pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from glassengine.errors import UsageError
from glassengine.program.generation import LoadedModel as LoadedModel
from glassengine.program.generation import Stages
from glassengine.program.inputs.modules import module_inputs, stored_inputs
from glassengine.program.inputs.user_inputs import in_order
from glassengine.program.inputs.user_inputs import load_inputs as load_inputs
from glassengine.program.kinds.causal_lm import is_pretrained
from glassengine.program.kinds.example_inputs import MadeUp
from glassengine.program.kinds.example_inputs import example_inputs as example_inputs
from glassengine.program.loading.load import load_candidate as load_candidate
from glassengine.program.loading.load import load_model as load_model
from glassengine.program.representation.listing import OnStage, stage_of
from glassengine.program.representation.passes import apply_pass
from glassengine.program.representation.program import Program as Program
from glassengine.program.representation.stored import load_names
from glassengine.program.user_code.calls import forward_errors, problem_function
from glassengine.program.user_code.forward import as_written, uncompiled
from glassengine.reading.copies import here
from glassengine.sites import Site, SiteTable
from glassengine.stores.places import remote


def made_up_inputs(model: LoadedModel) -> MadeUp:
    """Return steps of keyword arguments for the forward of a model: of its file, of its kind, or found by trying.

    Raises:
        UsageError: It takes something that cannot be made up.
    """
    if model.stored is not None:
        return stored_inputs(model.module, model.stored)
    if is_pretrained(model.module):
        return example_inputs(model.module, model.directory)
    make = problem_function(type(as_written(model.module)), "get_inputs")
    if make is None:
        return module_inputs(model.module, model.spec)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        step = in_order(make(), model.input_names)
    return MadeUp([step], recipes=dict.fromkeys(step, "by get_inputs of its file"), origin="made up")


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

    Arguments and errors are those of `export_program`. `on_encoder_stage` is the receiver of stages of what runs before
    the first step: an encoder, or the vision program.
    """
    if inputs is None and model.stored is None and not is_pretrained(model.module):
        inputs = made_up_inputs(model)
    with (
        forward_errors(model.module, f"{model.spec} cannot run on these inputs: its forward raised in"),
        uncompiled(model.module) as module,
    ):
        model = replace(model, module=module)
        stages = Stages(on_stage, on_encoder_stage, specialized)
        stored = model.stored
        exported = (_stored(stored, passes),) if stored is not None else model.generation.export(model, inputs, stages)
        *earlier, program = exported
    if on_encoder_stage is not None:
        for one in earlier:
            on_encoder_stage(stage_of(one, "functional"))
    if on_stage is not None:
        on_stage(stage_of(program, "functional"))
    for spec in passes:
        program = apply_pass(program, spec)
        if on_stage is not None:
            on_stage(stage_of(program, f"pass-{spec.rpartition(':')[2]}"))
    return *earlier, program


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
    if remote(target) is not None:
        target = str(here(target))
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
        given = load_inputs(inputs, model.input_names) if inputs else None
        tables = [program.sites for program in export_programs(model, inputs=given)]
    if pattern is None:
        return [site for table in tables for site in table]
    found = [site for table in tables for site in table.match(pattern)]
    return found or tables[-1].resolve([pattern])
