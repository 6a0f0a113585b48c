"""What a build is asked for, by name: the same whether it builds or plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from glassengine.progress import Progress

Model = str | Path | nn.Module
Inputs = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]


class BuildOptions(TypedDict, total=False):
    """What `build` takes whether it builds or plans."""

    backend: str | None
    device: str | None
    quantize: str | None
    dtype: str
    add_output: Sequence[str]
    inputs: Inputs | None
    passes: Sequence[str]
    max_batch_size: int
    max_seq_len: int | None
    overwrite: bool
    attn_implementation: str | None
    trust_remote_code: bool
    revision: str | None
    adapter: str | Path | None
    byte_budget: int | None
    artifacts: str | Path | None
    tensor_parallel: int
    pipeline_parallel: int
    progress: Progress
