"""The request of a check: what `glass.check` is asked for, read and checked once."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from glassengine.errors import UsageError, logger
from glassengine.judge.cases import Inputs
from glassengine.program.parallel.placements import Mesh
from glassengine.progress import Progress, silent
from glassengine.results import Comparison, Policy
from glassengine.serving.protocol import ServingOptions

Model = str | Path | nn.Module


@dataclass(frozen=True)
class CheckRequest:
    """What a check is asked for; attributes are arguments of `check`, where not said otherwise.

    Attributes:
        policy: `fail_on`, `min_coverage` and `min_snr`.
        flags: Options that were given, of those that some kind of candidate refuses.
        loading: How transformers loads models: `attn_implementation`, `trust_remote_code`, `revision`.
        serving: How a serving engine is run: `library`, `python`, `dtype`, `session_options`.
        mesh: Ranks of the engine that is built; None for one process.
        route: Judges a request; what the workers of `jobs` call.
    """

    baseline: Model
    candidate: Model | None
    policy: Policy
    flags: Sequence[str] = ()
    map: str | Path | None = None
    layout: str | None = None
    serving: ServingOptions = field(default_factory=ServingOptions)
    backend: str | None = None
    quantize: str | None = None
    dtype: str = "auto"
    inputs: Inputs = None
    steps: int = 3
    passes: Sequence[str] = ()
    all_levels: bool = False
    bisect_outputs: bool = False
    drift: bool = False
    accumulation: str | None = None
    reproduction: Path | None = None
    grafts: tuple[str, ...] = ()
    loading: Mapping[str, Any] = field(default_factory=dict)
    trust_engine: bool = False
    adapter: str | Path | None = None
    mesh: Mesh | None = None
    jobs: int = 1
    progress: Progress = silent
    route: Callable[[CheckRequest], Comparison] | None = None

    def require_jobs(self) -> None:
        """Require that the cases can be judged by `jobs` processes.

        Raises:
            UsageError: `jobs` is not positive, or a side cannot be given to another process.
        """
        if self.jobs < 1:
            raise UsageError("invalid --jobs", got=str(self.jobs), expected="a number from 1 on")
        for name, side in (("baseline", self.baseline), ("candidate", self.candidate)):
            if self.jobs > 1 and not isinstance(side, str | Path):
                raise UsageError(
                    "--jobs is for a baseline and a candidate that other processes can load",
                    got=f"{name}: {type(side).__name__}",
                    expected="a directory, or file.py:factory",
                    hint="--jobs 1",
                )
        if self.jobs > 1 and self.reproduction is not None:
            logger.warning("one process judges all cases: a reproduction needs their tensors")

    def for_workers(self) -> bytes | None:
        """Return the request for other processes, which judge a case each; None if this one judges all."""
        if self.jobs == 1 or self.reproduction is not None:
            return None
        return pickle.dumps(replace(self, jobs=1, progress=silent))
