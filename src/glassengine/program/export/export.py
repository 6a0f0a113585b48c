"""Export a model once: module -> functional `Program` with names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from glassengine.errors import UsageError
from glassengine.program.export.functionalize import decomposed, functional
from glassengine.program.kinds import causal_lm, encoder_decoder, image_text
from glassengine.program.representation.listing import OnStage, Stage
from glassengine.program.representation.naming import Paths, build_sites, describe_shape
from glassengine.program.representation.program import (
    CALLED_AS,
    FIXED_INPUTS,
    SMALLEST,
    Port,
    Program,
    without_dead_weights,
)
from glassengine.program.representation.signature import (
    as_contiguous,
    example_of,
    fixed_inputs,
    leave_meta_device,
    named_inputs,
    named_results,
    quiet,
    require_one_dtype,
    require_unchanged_buffers,
    result_names,
    small_sizes,
    tensor_results_only,
    user_inputs,
    with_state_as_results,
)
from glassengine.program.user_code.calls import source_of
from glassengine.program.user_code.forward import explicit_keywords, exportable_results, methods_of_classes
from glassengine.program.user_code.module_state import applied_state, run_alone
from glassengine.program.user_code.tracing import (
    SPECIALIZED,
    WITH_VALUES,
    WRITTEN_DOWN,
    collect_marks,
    fast_tracing,
    helper_lines,
    marking,
    real_values,
    remove_dead_nodes,
    without_assertions,
    written_down,
)


def export_causal_lm(
    model: nn.Module, *, metadata: dict[str, Any] | None = None, on_stage: OnStage | None = None
) -> Program:
    """Export a Hugging Face causal LM (in evaluation mode) to the one program of its engine, for prefill and decode.

    Args:
        model: The model.
        metadata: Kept in the program.
        on_stage: Called with the graph as it was traced, before it is made functional.

    Raises:
        UsageError: The model has no plain key/value cache, or torch.export cannot trace it.
    """
    has_values = leave_meta_device(model)
    layout = causal_lm.probe_layout(model, has_values=has_values)
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    wrapper = causal_lm.CausalLM(model, layout)
    inputs, dynamic = causal_lm.example_inputs(layout, model.dtype, parameter.device)  # type: ignore[arg-type]
    with causal_lm.exportable_experts(model):
        return traced_program(
            wrapper,
            inputs,
            dynamic,
            prefix=causal_lm.USER_MODULE,
            input_names=causal_lm.input_names(layout),
            output_names=["logits"],
            layout=layout,
            metadata=metadata or {},
            on_stage=on_stage,
        )


def export_module(
    module: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    *,
    metadata: dict[str, Any] | None = None,
    on_stage: OnStage | None = None,
    keeps_state: bool = False,
) -> Program:
    """Export any module for the given keyword arguments.

    Args:
        module: In evaluation mode.
        inputs: A dict of keyword arguments, or one dict per step; a dimension whose size differs between steps becomes
            dynamic, everything else is fixed.
        metadata: Kept in the program.
        on_stage: As in `export_causal_lm`.
        keeps_state: Whether it may change its buffers: what they are afterwards is one more result each, by its name.

    Raises:
        UsageError: The steps do not fit together, torch.export cannot trace the module, it changes its buffers and may
            not, or multiplies numbers of two dtypes.
    """
    steps = [inputs] if isinstance(inputs, Mapping) else list(inputs)
    if not steps:
        raise UsageError("no inputs to export with", hint="--inputs file.py:factory that returns a dict")
    has_values = leave_meta_device(module)
    example, dynamic = example_of(steps)
    program = traced_program(
        module,
        example,
        dynamic,
        input_names=list(named_inputs(example)),
        metadata={**(metadata or {}), FIXED_INPUTS: fixed_inputs(example)},
        on_stage=on_stage,
        keeps_state=keeps_state,
    )
    require_one_dtype(program)
    if has_values and (smallest := small_sizes(module, program, steps)):
        program.metadata[SMALLEST] = smallest
    return program


def traced_program(
    module: nn.Module,
    inputs: dict[str, Any],
    dynamic: Any,
    *,
    input_names: list[str],
    metadata: dict[str, Any],
    prefix: str = "",
    output_names: list[str] | None = None,
    layout: causal_lm.KVLayout | None = None,
    on_stage: OnStage | None = None,
    is_part: bool = False,
    keeps_state: bool = False,
    with_values: bool = False,
) -> Program:
    """Trace a module and name the tensors of its graph, see `named_program`.

    `with_values` lets the exporter see the values of `inputs`, for which the program then holds alone.
    """
    # Compiled code relies on the strides of the example, and back-ends hand their inputs on as contiguous tensors.
    inputs = pytree.tree_map_only(torch.Tensor, as_contiguous, inputs)
    try:
        marked = marking(getattr(module, prefix) if prefix else module)
        seen = real_values() if with_values else nullcontext()
        with (
            torch.no_grad(),
            quiet(),
            fast_tracing(dynamic),
            methods_of_classes(module),
            explicit_keywords(module, inputs),
            exportable_results(module),
            marked,
            helper_lines(),
            seen,
        ):
            exported = torch.export.export(module, (), kwargs=inputs, dynamic_shapes=dynamic, strict=False)
        if on_stage is not None:
            user, results = user_inputs(exported), output_names or result_names(exported)
            symbols = _symbols(exported) if layout else {}
            inputs_of = dict(zip(user, input_names, strict=True))
            on_stage(Stage("exported", exported, inputs_of, tuple(results), {}, symbols))
        with torch.no_grad(), quiet(), fast_tracing(dynamic), real_values() if with_values else nullcontext():
            # Values decide what a graph made with them holds; it is run, too.
            exported = decomposed(exported) if with_values else functional(exported)
        exported = without_assertions(exported) if with_values else exported
        if keeps_state:
            output_names = output_names or result_names(exported)
            exported = with_state_as_results(exported, output_names)
    except UsageError:
        raise
    except Exception as error:
        if not any(parameter.is_meta for parameter in module.parameters()):
            run_alone(module, inputs)  # what raises without an exporter too is the caller's to name
        where = source_of(error)
        traced = getattr(module, prefix) if prefix else module
        # What follows the first paragraph is advice to those who work on torch.
        reason = str(error).split("\n\n")[0]
        raise UsageError(
            f"torch.export cannot trace {type(traced).__name__}" + (f" at {where}" if where else ""),
            got=f"{type(error).__name__}: {reason}",
            hint="replace a branch on values by torch.where; or record both sides (glass record MODEL -o DIR) and "
            "compare the records (glass compare DIR DIR)",
        ) from error
    return named_program(
        exported,
        module,
        prefix=prefix,
        input_names=input_names,
        output_names=output_names,
        layout=layout,
        metadata=metadata,
        is_part=is_part,
    )


def named_program(
    exported: ExportedProgram,
    module: nn.Module,
    *,
    input_names: Sequence[str],
    metadata: dict[str, Any],
    prefix: str = "",
    output_names: list[str] | None = None,
    layout: causal_lm.KVLayout | None = None,
    is_part: bool = False,
) -> Program:
    """Name the tensors of a functional graph; its marks are erased.

    Args:
        exported: Of `functional`, or of `run_decompositions({})`.
        module: What was exported; its submodules have the paths of the graph.
        input_names: Of the tensors that are given at run time, in order.
        metadata: Kept in the program.
        prefix: Attribute of `module` that holds the user's module, or "".
        output_names: Of the results; None takes the keys of the containers that they come in.
        layout: Of the cache of a program that generates; None for a module.
        is_part: Keep what leads to the results, for a program that is not all of `module`.

    Raises:
        UsageError: The module changes its buffers, or names clash.
    """
    exported = tensor_results_only(exported, names_of_results := output_names or result_names(exported))
    graph = exported.graph
    paths = Paths(module, prefix, graph)
    marks = collect_marks(graph)
    if is_part:
        marks = remove_dead_nodes(graph, marks)
        exported = without_dead_weights(exported)
        graph = exported.graph
    exported.graph_module.recompile()

    signature = exported.graph_signature
    require_unchanged_buffers(signature.output_specs, type(module).__name__)
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    symbols = _symbols(exported) if layout else {}
    ports = []
    for node_name, name in zip(user_inputs(exported), input_names, strict=True):
        value = placeholders[node_name].meta["val"]
        shape, _ = describe_shape(value, symbols)
        ports.append(Port(name, node_name, str(value.dtype).removeprefix("torch."), shape))

    by_node = {port.node: port.name for port in ports}
    mutated = {
        by_node[spec.target]: spec.arg.name
        for spec in signature.output_specs
        if spec.kind is OutputKind.USER_INPUT_MUTATION and spec.target in by_node
    }
    results = [spec.arg.name for spec in signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    outputs = dict(zip(names_of_results, results, strict=True))
    caches = {past: past.replace("past_", "present_", 1) for past in mutated}
    if clash := outputs.keys() & caches.values():
        raise UsageError(
            f"{type(module).__name__} changes an input in place that has the name of a result",
            got=", ".join(sorted(clash)),
            hint="give the result another name",
        )
    outputs |= {caches[past]: node for past, node in mutated.items()}

    names = {spec.arg.name: str(spec.target) for spec in signature.input_specs if spec.target is not None} | by_node
    sites = build_sites(
        graph,
        marks,
        paths,
        names=names,
        symbols=symbols,
        caches={node: past.split("_")[1] for past, node in mutated.items()} if layout else {},
    )
    if paths.called_as:
        metadata = {**metadata, CALLED_AS: paths.called_as}
    kind = "causal_lm" if layout else "module"
    return Program(exported, sites, kind, tuple(ports), outputs, caches, layout, metadata)


def _symbols(exported: ExportedProgram) -> dict[str, str]:
    """Name the dynamic sizes of a causal LM; torch may or may not have unified them across inputs."""
    placeholders = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    roles: dict[str, tuple[str | None, ...]] = {
        "input_ids": ("batch", "sequence"),
        "attention_mask": ("batch", "cache"),
        "cache_position": ("sequence",),
        encoder_decoder.SOURCE_MASK: ("batch", "source"),
        image_text.FEATURES: ("features",),
        image_text.INDEX: ("image_tokens",),
    }
    table: dict[str, str] = {}
    for name in user_inputs(exported):
        # The cache holds keys and values [B, H, T, D], and states [B, ...] whose other sizes never change.
        long = "cache" if name.startswith("cache_") else "source"
        is_cache = name.startswith(("cache_", "cross_"))
        wanted = roles.get(name, ("batch", None, long, None) if is_cache else ("batch", "sequence"))
        for size, role in zip(placeholders[name].meta["val"].shape, wanted, strict=False):
            if role and not isinstance(size, int):
                table[str(size)] = role
    return table


def export_specialized(
    module: nn.Module,
    step: Mapping[str, Any],
    *,
    metadata: dict[str, Any] | None = None,
    on_stage: OnStage | None = None,
    keeps_state: bool = False,
) -> Program:
    """Export a module that looks at values, as `export_module` does, for the inputs of one step alone.

    How it was traced is in the metadata.

    Raises:
        UsageError: It cannot be traced that way, either.
    """
    example = dict(step)
    options: dict[str, Any] = {"input_names": list(named_inputs(example)), "on_stage": on_stage}
    options |= {"keeps_state": keeps_state, "with_values": True}
    known = {**(metadata or {}), FIXED_INPUTS: fixed_inputs(example)}
    _, dynamic = example_of([example])
    try:
        facts = {**known, SPECIALIZED: WITH_VALUES}
        program = traced_program(module, example, dynamic, metadata=facts, **options)
        if _repeats(program, module, example):
            return program
        first = UsageError(f"the program that was exported of {type(module).__name__} gives other results than it")
    except UsageError as error:
        first = error
    try:
        with torch.no_grad(), quiet(), applied_state(module, None):
            repeated = written_down(module, example)
        facts = {**known, SPECIALIZED: WRITTEN_DOWN}
        return traced_program(repeated, example, dynamic, metadata=facts, **options)
    except Exception:
        raise first from first.__cause__


def _repeats(program: Program, module: nn.Module, example: Mapping[str, Any]) -> bool:
    """Whether a program gives what its module gives: values that an exporter propagates may be others."""
    given = named_inputs(example)
    tensors = {**program.weights(), **{port.node: given[port.name] for port in program.inputs if port.name in given}}
    placeholders = [node.name for node in program.graph.find_nodes(op="placeholder")]
    if any(name not in tensors for name in placeholders):
        return True  # it takes what only a run of its own can say
    own = named_results(run_alone(module, example))
    with torch.no_grad():
        values = torch.fx.Interpreter(program.exported.graph_module).run(*(tensors[name] for name in placeholders))
    outputs: Any = program.graph.output_node().args[0]
    made = {getattr(node, "name", ""): value for node, value in zip(outputs, values, strict=True)}
    repeated = {name: made.get(node) for name, node in program.output_nodes.items()}
    return all(
        value.is_complex() or _is_near(repeated[name], value)
        for name, value in own.items()
        if isinstance(repeated.get(name), torch.Tensor)
    )


def _is_near(one: Any, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=1e-3, atol=1e-3, equal_nan=True)
