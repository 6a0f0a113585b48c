"""The manifest of an engine that is being built."""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glassengine import environment
from glassengine.backends.protocol.backend import Backend
from glassengine.engine.store.checked_files import list_files
from glassengine.engine.store.manifest import AddedOutput, Manifest, TensorEntry, instruction_flags
from glassengine.program import LoadedModel, Program
from glassengine.program.representation.program import FIXED_INPUTS, GRAPH_LEVEL, SMALLEST


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a build was asked for beside the program; see `build`.

    `implicit_outputs` adds what TRTLLM_ADD_OUTPUT says and the taps of a plain module. `reloadable` says that the
    weights can be loaded again from the checkpoint, unchanged and without running code.
    """

    backend: str | None = None
    add_output: Sequence[str] = ()
    implicit_outputs: bool = False
    max_batch_size: int = 8
    max_seq_len: int | None = None
    overwrite: bool = False
    byte_budget: int | None = None
    passes: Sequence[str] = ()
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reloadable: bool = False
    notes: tuple[str, ...] = ()
    device: str = "cpu"
    quantize: str | None = None


def describe_engine(
    program: Program,
    backend: Backend,
    directory: Path,
    *,
    name: str,
    settings: Settings,
    added: Sequence[AddedOutput],
    left_out: Mapping[str, str],
    weights: str,
    shares_weights: bool,
    tokenizer: bool,
    has_encoder: bool,
) -> Manifest:
    """Return the manifest of what lies in `directory`; see `Manifest` for the meaning of the arguments."""
    is_causal_lm = program.layout is not None
    versions = environment.versions()
    return Manifest(
        name=name,
        glassengine=str(versions["glassengine"]),
        backend=backend.name,
        kv=backend.capabilities.kv,
        portable=backend.capabilities.portable,
        requires={package: version for package in ("torch", backend.name) if (version := versions.get(package))},
        versions=versions,
        machine=platform.machine(),
        cpu=environment.cpu_name(),
        cpu_flags=instruction_flags(),
        kind=program.kind,
        dtype=str(program.metadata.get("dtype")),
        graph_level=GRAPH_LEVEL,
        max_batch_size=settings.max_batch_size if is_causal_lm else None,
        max_seq_len=settings.max_seq_len if is_causal_lm else None,
        vocab_size=_vocab_size(program),
        kv_layout=program.layout.layers if program.layout is not None else (),
        caches=program.caches,
        inputs=tuple(TensorEntry(port.name, port.node, port.dtype, port.shape) for port in program.inputs),
        outputs=_results(program),
        ranges={} if is_causal_lm else _ranges(program),
        fixed_inputs=dict(program.metadata.get(FIXED_INPUTS, {})),
        added_outputs=tuple(added),
        left_out=dict(left_out),
        passes=tuple(settings.passes),
        model=dict(settings.model),
        weights=weights,
        shares_weights=shares_weights,
        tokenizer=tokenizer,
        has_encoder=has_encoder,
        files=list_files(directory),
        command_line=tuple(environment.without_secrets(sys.argv)),
        git=environment.git_revision(Path.cwd()),
        notes=settings.notes,
        device=settings.device,
        quantize=settings.quantize or "",
    )


def _vocab_size(program: Program) -> int | None:
    if program.layout is None:
        return None
    size = program.sites.by_node[program.output_nodes["logits"]][0].shape[-1]
    return size if isinstance(size, int) else None


def _results(program: Program) -> tuple[TensorEntry, ...]:
    entries = []
    for name, node in program.output_nodes.items():
        value = program.node(node).meta["val"]
        sites = program.sites.by_node.get(node)
        shape = sites[0].shape if sites else tuple(s if isinstance(s, int) else str(s) for s in value.shape)
        entries.append(TensorEntry(name, node, str(value.dtype).removeprefix("torch."), shape))
    return tuple(entries)


def _ranges(program: Program) -> dict[str, tuple[int, int | None]]:
    """Ranges of the dynamic sizes of a plain module."""
    # The tracer knows more symbols: values that the graph reads from tensors, which may have no bounds at all.
    sizes = {size for port in program.inputs for size in port.shape if isinstance(size, str)}
    limit = sys.maxsize // 2
    smallest = program.metadata.get(SMALLEST, {})
    found = {}
    for symbol, bounds in program.exported.range_constraints.items():
        if str(symbol) in sizes:
            upper = bounds.upper
            lower = smallest.get(str(symbol), int(bounds.lower))
            found[str(symbol)] = (lower, int(upper) if upper.is_finite and upper < limit else None)
    return found


def about_build(model: LoadedModel, backend: Backend, passes: Sequence[str]) -> dict[str, Any]:
    """What the manifest of the artifacts says of a build before it has begun."""
    return {
        "model": model.spec,
        "fingerprint": model.metadata.get("fingerprint"),
        "kind": model.kind,
        "dtype": model.dtype,
        "backend": backend.name,
        "passes": list(passes),
    }
