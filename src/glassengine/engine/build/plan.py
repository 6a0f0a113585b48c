"""Plans a build: its settings, its debug outputs resolved to sites, and the result of a dry run.

`--add-output` and TRTLLM_ADD_OUTPUT take `SITE|NODE|GLOB[=ALIAS][:DTYPE]`. An alias of a pattern that matches several
tensors gets an index, `ALIAS_0`, `ALIAS_1`, ... in graph order. Without an alias an output is called by its site, or,
where another name was given (an FX node, or a name of the reference documents such as `mm_default`), by that name. An
output keeps the dtype that it is computed in; a DTYPE asks for a cast when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from glassengine.backends.registry import choose_backend
from glassengine.engine.build.requests import OutputRequest, find_sites, read_requests, requests_from_environment
from glassengine.engine.manifest import AddedOutput
from glassengine.errors import UsageError
from glassengine.program.representation.outputs import OutputPlan, plan_outputs
from glassengine.program.representation.program import Program
from glassengine.results import Result
from glassengine.sites import Site


@dataclass(frozen=True)
class BuildSettings:
    """What a build was asked for beside the program; see `build`.

    `implicit_outputs` adds what TRTLLM_ADD_OUTPUT says and the taps of a plain module. `reloadable` says that the
    weights can be loaded again from the checkpoint, unchanged and without running code. `all_logits` says that a step
    makes the logits of all its tokens.
    """

    backend: str | None = None
    add_output: Sequence[str] = ()
    implicit_outputs: bool = False
    max_batch_size: int = 8
    max_seq_len: int | None = None
    overwrite: bool = False
    byte_budget: int | None = None
    passes: Sequence[str] = ()
    model: Mapping[str, Any] = field(default_factory=dict)
    reloadable: bool = False
    notes: tuple[str, ...] = ()
    device: str = "cpu"
    quantize: str | None = None
    batch_invariant: bool = False
    all_logits: bool = False


@dataclass(frozen=True)
class BuildPlan(Result):
    """What a build would make (`--dry-run`).

    Attributes:
        output_dir: Where the engine would be written.
        backend: Back-end that would build it.
        kind: "causal_lm" or "module".
        dtype: Floating dtype.
        weights_bytes: Bytes of parameters, buffers and constants.
        cache_bytes: Bytes of the key/value cache at the largest batch and length.
        added_outputs: Debug outputs.
        left_out: Debug output that does not fit the byte budget -> reason.
        prefill_output_bytes: Bytes of the added outputs in the largest prefill.
        decode_output_bytes: Bytes of the added outputs in the largest decode step.
        notes: Warnings of the build.
    """

    output_dir: str
    backend: str
    kind: str
    dtype: str
    weights_bytes: int
    cache_bytes: int
    added_outputs: tuple[AddedOutput, ...]
    left_out: dict[str, str]
    prefill_output_bytes: int
    decode_output_bytes: int
    notes: tuple[str, ...]


def plan_build(program: Program, target: Path, settings: BuildSettings, *, encoder: Program | None = None) -> BuildPlan:
    """Return what `build` would make of `program`, and of the encoder that belongs to it."""
    programs = [program] if encoder is None else [encoder, program]
    chosen, _ = choose_backend(settings.backend)
    decided, added, left_out = planned_outputs(program, settings)
    batch, length = settings.max_batch_size, settings.max_seq_len or 1
    dtype = getattr(torch, str(program.metadata.get("dtype", "float32")))
    cache = program.layout.allocate(batch, length, dtype, "meta") if program.layout else {}

    def output_bytes(sequence: int) -> int:
        sizes = {"batch": batch, "sequence": sequence, "cache": length}
        return plan_outputs(program, decided.added, sizes=sizes).num_bytes if decided.added else 0

    return BuildPlan(
        output_dir=str(target),
        backend=chosen.name,
        kind=program.kind,
        dtype=str(program.metadata.get("dtype")),
        weights_bytes=weights_bytes(programs),
        cache_bytes=sum(tensor.nbytes for tensor in cache.values()),
        added_outputs=added,
        left_out=left_out,
        prefill_output_bytes=output_bytes(length),
        decode_output_bytes=output_bytes(1),
        notes=settings.notes,
    )


def weights_bytes(programs: Sequence[Program]) -> int:
    """Return the bytes of parameters, buffers and constants; tensors that share memory count once."""
    stored = (tensor for program in programs for tensor in program.weights().values())
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in stored}.values())


def planned_outputs(
    program: Program, settings: BuildSettings
) -> tuple[OutputPlan, tuple[AddedOutput, ...], dict[str, str]]:
    """Decide how each debug output of a build is observed.

    Returns:
        The plan on nodes, the entries of the manifest, and name -> reason for what does not fit the budget.

    Raises:
        UnknownNameError: A pattern matches nothing; carries the nearest names.
        UsageError: Two outputs would have one name, or a name is taken by an input or result.
    """
    requested = _requested(program, settings)
    nodes = [request.site.node for request in requested]
    sizes = {"batch": settings.max_batch_size, "cache": settings.max_seq_len or 1, "sequence": 1}
    decided = plan_outputs(program, nodes, sizes=sizes, byte_budget=settings.byte_budget)
    added, left_out = [], {}
    for request in requested:
        site = request.site
        if site.node in decided.left_out:
            left_out[request.name] = decided.left_out[site.node]
            continue
        derived = decided.derived.get(site.node)
        text = None if derived is None else str(derived)
        dtype, cast_from = request.cast or site.dtype, site.dtype if request.cast else None
        shape, axes = tuple(site.shape), dict(site.axes)
        added.append(AddedOutput(request.name, site.name, site.node, text, dtype, shape, axes, site.source, cast_from))
    return decided, tuple(added), left_out


def _requested(program: Program, settings: BuildSettings) -> list[_Requested]:
    """Return the outputs that a build was asked for, and those that it adds without being asked."""
    requests = read_requests(settings.add_output)
    if settings.implicit_outputs:
        requests += requests_from_environment()
    found = _resolved(program, requests)
    if not settings.implicit_outputs or program.generates:
        return found
    # A tap that was asked for, in another dtype say, is not added once more as it is.
    asked = {request.name for request in found}
    taps = [site.name for site in program.sites if site.kind == "tap" and site.name not in asked]
    return _resolved(program, [*requests, *map(OutputRequest, taps)])


@dataclass(frozen=True)
class _Requested:
    """One output: its name, its site, and the dtype to cast it to on reading."""

    name: str
    site: Site
    cast: str | None = None


def _resolved(program: Program, requests: Iterable[OutputRequest]) -> list[_Requested]:
    """Return the outputs that `requests` name, in the order asked for; raises as `planned_outputs`."""
    inputs = {port.name for port in program.inputs}
    taken = inputs | set(program.output_nodes)
    resolved: dict[str, _Requested] = {}
    for pattern, alias, cast in requests:
        sites = find_sites(program.sites, pattern)
        for index, site in enumerate(sites):
            if alias is not None:
                name = alias if len(sites) == 1 else f"{alias}_{index}"
            else:
                is_free = program.output_nodes.get(pattern, site.node) == site.node and pattern not in inputs
                name = pattern if len(sites) == 1 and pattern in site.aliases and is_free else site.name
            if name in resolved and (resolved[name].site.node, resolved[name].cast) != (site.node, cast):
                raise UsageError(
                    f"two outputs would be called {name!r}",
                    got=f"{resolved[name].site.name} and {site.name}",
                    hint="give each its own name: --add-output SITE=ALIAS",
                )
            if name in taken and program.output_nodes.get(name) != site.node:
                raise UsageError(
                    f"an output cannot be called {name!r}: an input or result has this name",
                    hint=f"give it another name: --add-output {site.name}=ALIAS",
                )
            resolved[name] = _Requested(name, site, cast)
    return list(resolved.values())
