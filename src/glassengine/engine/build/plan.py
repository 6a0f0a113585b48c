"""What a build would make, and which debug outputs its engine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from glassengine.backends.registry import choose_backend
from glassengine.engine.build.describe import Settings
from glassengine.engine.build.outputs import Requested, output_bytes, plan, resolve_requests, tap_requests
from glassengine.engine.store.manifest import AddedOutput
from glassengine.engine.store.requests import read_requests, requests_from_environment
from glassengine.program import Program
from glassengine.program.representation.outputs import OutputPlan
from glassengine.results import Result


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


def plan_build(program: Program, target: Path, settings: Settings, *, encoder: Program | None = None) -> BuildPlan:
    """Return what `build` would make of `program`, and of the encoder that belongs to it."""
    programs = [program] if encoder is None else [encoder, program]
    chosen, _ = choose_backend(settings.backend)
    decided, added, left_out = planned_outputs(program, settings)
    nodes = decided.added
    batch, length = settings.max_batch_size, settings.max_seq_len or 1
    dtype = getattr(torch, str(program.metadata.get("dtype", "float32")))
    cache = program.layout.allocate(batch, length, dtype, "meta") if program.layout else {}
    return BuildPlan(
        output_dir=str(target),
        backend=chosen.name,
        kind=program.kind,
        dtype=str(program.metadata.get("dtype")),
        weights_bytes=weights_bytes(programs),
        cache_bytes=sum(tensor.nbytes for tensor in cache.values()),
        added_outputs=added,
        left_out=left_out,
        prefill_output_bytes=output_bytes(program, nodes, batch=batch, sequence=length, cache=length),
        decode_output_bytes=output_bytes(program, nodes, batch=batch, sequence=1, cache=length),
        notes=settings.notes,
    )


def weights_bytes(programs: Sequence[Program]) -> int:
    """Return the bytes of parameters, buffers and constants; tensors that share memory count once."""
    stored = (tensor for program in programs for tensor in program.weights().values())
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in stored}.values())


def planned_outputs(program: Program, settings: Settings) -> tuple[OutputPlan, tuple[AddedOutput, ...], dict[str, str]]:
    """Decide how each debug output of a build is observed, as `outputs.plan` does.

    Raises:
        UnknownNameError: A name is not a site.
        UsageError: Two outputs would have one name.
    """
    sizes = {"batch": settings.max_batch_size, "cache": settings.max_seq_len or 1}
    return plan(program, _requested(program, settings), sizes=sizes, byte_budget=settings.byte_budget)


def _requested(program: Program, settings: Settings) -> list[Requested]:
    """Return the outputs that a build was asked for, and those that it adds without being asked."""
    requests = read_requests(settings.add_output)
    if settings.implicit_outputs:
        requests += requests_from_environment()
    if not settings.implicit_outputs or program.generates:
        return resolve_requests(program, requests)
    # A tap that was asked for, in another dtype say, is not added once more as it is.
    asked = {request.name for request in resolve_requests(program, requests)}
    requests += [request for request in tap_requests(program) if request.pattern not in asked]
    return resolve_requests(program, requests)
