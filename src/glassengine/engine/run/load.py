"""Loads an engine, of one process or of several ranks."""

from __future__ import annotations

from pathlib import Path

from glassengine.engine.run.engine import Engine, open_engine, read_engine
from glassengine.engine.run.parallel import load_parallel


def load(
    directory: str | Path, *, verify: bool = False, trust: bool = False, model: str | Path | None = None
) -> Engine:
    """Load an engine; one of several ranks starts them, or is one of them under torchrun.

    Args:
        directory: What `build` made.
        verify: Hash files of every size, not only small ones.
        trust: Load native code although this user did not build it here. It can do all that the user can.
        model: Where to take weights from that are not in the engine, as `build` takes it; None takes the checkpoint
            that the engine names, which must be a directory with a configuration and weights in safetensors.

    Raises:
        UsageError: There is no such directory, or it brings native code that is not trusted.
        CorruptError: It is damaged, half written, edited, or of a newer schema.
        BackendError: It was built for another processor or other versions; says which.
    """
    found = read_engine(directory, verify=verify)
    if found.manifest.mesh:
        return load_parallel(found.directory, found.manifest, found.names["sites"], trust=trust)
    return open_engine(found, trust=trust, model=model)
