"""Finds the accuracy of a back-end's kernels: from the cache, from the table that ships, or by a measurement.

`glass doctor --calibrate` measures all back-ends. A check measures a runtime that neither the cache nor the table has
once, which takes a few seconds; where that fails, the nearest entry of the table holds, with a warning.
"""

from __future__ import annotations

import functools
import json
from importlib import metadata
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from glassengine import environment
from glassengine.backends.kernel_sweep import sweep
from glassengine.backends.protocol.backend import Backend
from glassengine.backends.registry import find_backend, list_backends
from glassengine.errors import GlassError, logger
from glassengine.numerics.kernels import UNMEASURED, KernelError, Kernels, joined
from glassengine.reading.documents import read_document
from glassengine.writing import aside, private_directory

SCHEMA_VERSION = 1
_SETS = ("amx_tile", "avx512_bf16", "avx512f", "avx2", "sve", "asimd")
"""Instruction sets, the widest first: the widest that a processor has decides which kernels run."""
_MAX_BYTES = 1 << 20


def kernels_of(name: str, *, measure: bool = True) -> Kernels:
    """Return how accurate the kernels of the back-end `name` are; as accurate as rounding where it has none of its own.

    Args:
        name: Of a registered back-end.
        measure: Whether to measure what neither the cache nor the table knows.
    """
    try:
        return _kernels_of(name, measure)
    except Exception as error:  # a judgement without the table is stricter, and better than none
        logger.warning("the kernels of %s are taken to be exact: %s", name, error)
        return UNMEASURED


def of_any_runtime() -> Kernels:
    """Return kernels as coarse as the coarsest that are known: for a record of a runtime that is not."""
    return joined(_from_dict(entry) for entry in _shipped())


def calibrate() -> list[dict[str, Any]]:
    """Measure the elementwise kernels of every back-end here that has its own, keep them in the cache, and return them.

    Raises:
        OSError: The cache cannot be written.
    """
    entries = []
    for info in list_backends():
        if info.available and (backend := find_backend(info.name)).capabilities.own_kernels:
            entries.append(measured(backend))
            _keep(entries[-1])
    _kernels_of.cache_clear()
    return entries


def measured(backend: Backend) -> dict[str, Any]:
    """Return an entry of the table: the errors of a back-end's kernels on this processor."""
    dtypes = [name for name in backend.capabilities.dtypes if name in ("float32", "float16")]
    errors: dict[str, dict[str, KernelError]] = {name: sweep(backend, getattr(torch, name)) for name in dtypes}
    return {"schema_version": SCHEMA_VERSION, **_key(backend), "errors": Kernels(errors).to_dict()}


@functools.cache
def _kernels_of(name: str, measure: bool) -> Kernels:
    backend = find_backend(name)
    if not backend.capabilities.own_kernels:
        return UNMEASURED
    key = _key(backend)
    for entry in (_cached(key), *_shipped()):
        if entry is not None and all(entry.get(part) == value for part, value in key.items()):
            return _from_dict(entry)
    if measure and backend.available().available:
        logger.info("measuring the kernels of %s %s", name, key["version"])
        entry = measured(backend)
        if entry["errors"]:
            try:
                _keep(entry)
            except OSError as error:
                logger.info("the kernels of %s are not kept: %s", name, error)
            return _from_dict(entry)
    near = [entry for entry in _shipped() if entry.get("backend") == name]
    logger.warning(
        "the kernels of %s %s on %s were not measured; those of %s are taken (glass doctor --calibrate measures them)",
        name,
        key["version"],
        key["instruction_set"],
        ", ".join(f"{entry['version']} on {entry['instruction_set']}" for entry in near) or "no other version",
    )
    return joined(_from_dict(entry) for entry in near)


def _key(backend: Backend) -> dict[str, str]:
    """What the kernels depend on: the runtime, its version, and the widest instruction set."""
    package = getattr(backend, "package", "torch")
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = "unknown"
    flags = environment.cpu_flags()
    widest = next((name for name in _SETS if name in flags), "unknown")
    return {"backend": backend.name, "version": version, "instruction_set": widest}


def _keep(entry: dict[str, Any]) -> None:
    path = _cache_file(entry)
    private_directory(path.parent)
    with aside(path) as target:
        target.write_text(json.dumps(entry, indent=1), encoding="utf-8")


def _cache_file(key: dict[str, Any]) -> Path:
    name = "-".join(str(key[part]) for part in ("backend", "version", "instruction_set"))
    return environment.cache_dirs()["glassengine"] / "kernels" / f"{name}.json"


def _cached(key: dict[str, Any]) -> dict[str, Any] | None:
    """Return the entry that was kept; None where there is none, or one that cannot be read."""
    path = _cache_file(key)
    try:
        if not path.exists():
            return None
        entry = read_document(path, dict[str, Any], most=_MAX_BYTES, inside=path.parent, nonfinite=True)
        _from_dict(entry)
    except (GlassError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        logger.info("%s is not read: %s", path, error)
        return None
    return entry if entry.get("schema_version") == SCHEMA_VERSION else None


@functools.cache
def _shipped() -> tuple[dict[str, Any], ...]:
    text = files("glassengine.backends").joinpath("kernel_errors.json").read_text(encoding="utf-8")
    return tuple(json.loads(text)["entries"])


def _from_dict(entry: dict[str, Any]) -> Kernels:
    about = f"{entry['backend']} {entry['version']} on {entry['instruction_set']}"
    return Kernels.from_dict(entry["errors"], about)
