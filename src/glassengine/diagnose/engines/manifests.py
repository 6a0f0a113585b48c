"""What a manifest says about engines that stand side by side: whether they are of one model, and how they differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glassengine.engine.run.engine import Engine
from glassengine.engine.store.files import MAIN, WEIGHTS
from glassengine.engine.store.manifest import FILE
from glassengine.errors import IncomparableError


def require_one_model(engines: Sequence[Engine]) -> tuple[str, ...]:
    """Refuse engines whose logits cannot be compared; return what could not be verified.

    Raises:
        IncomparableError: They differ in class, vocabulary, cache or (in one dtype) weights, or do not generate.
    """
    notes: list[str] = []
    first = engines[0]
    for engine in engines:
        if not engine.manifest.generates:
            raise IncomparableError(
                f"the engine {str(engine.directory)!r} does not generate",
                got=f"kind {engine.manifest.kind}",
                hint="record what it returns and compare the recordings",
            )
    for engine in engines[1:]:
        same_weights = _fingerprint(engine) == _fingerprint(first)
        if _structure(engine) != _structure(first) or (
            engine.manifest.dtype == first.manifest.dtype and not same_weights
        ):
            raise IncomparableError(
                "the engines are not of one model",
                got=_identity(engine),
                expected=_identity(first),
                hint="to judge one model by another: glass check BASELINE --candidate TARGET",
            )
        if not same_weights:
            # A fingerprint is of the values in their own dtype.
            notes.append(
                f"not verified: that the weights of {engine.directory} ({engine.manifest.dtype}) and of "
                f"{first.directory} ({first.manifest.dtype}) are the same but for rounding"
            )
    return tuple(notes)


def _structure(engine: Engine) -> tuple[Any, ...]:
    return engine.manifest.model.get("class"), engine.manifest.vocab_size, engine.manifest.kv_layout


def _fingerprint(engine: Engine) -> Any:
    return engine.manifest.model.get("fingerprint")


def _identity(engine: Engine) -> str:
    manifest = engine.manifest
    return (
        f"{engine.directory}: {manifest.model.get('class')} of {manifest.model.get('spec')}, {manifest.dtype}, "
        f"vocabulary {manifest.vocab_size}, {len(manifest.kv_layout)} layers, weights {_fingerprint(engine)}"
    )


def sizes(engine: Engine) -> dict[str, int]:
    """Return the sizes of an engine on disk in bytes, by the names of `EngineColumn`."""
    files = {entry.path: entry.size for entry in engine.manifest.files}
    return {
        "total_bytes": sum(files.values()) + (engine.directory / FILE).stat().st_size,
        "executable_bytes": sum(size for path, size in files.items() if path.startswith(f"{MAIN}/")),
        "weights_bytes": files.get(WEIGHTS, 0),
    }


def options_that_differ(engines: Sequence[Engine]) -> list[dict[str, str]]:
    """Return for each engine what it was built with, where that is not the same for all."""
    options = [_options(engine) for engine in engines]
    names = list(dict.fromkeys(name for side in options for name in side))
    kept = [name for name in names if len({side.get(name) for side in options}) > 1]
    return [{name: side.get(name, "-") for name in kept} for side in options]


def _options(engine: Engine) -> dict[str, str]:
    manifest = engine.manifest
    return {
        "model": str(manifest.model.get("spec")),
        "max_batch_size": str(manifest.max_batch_size),
        "max_seq_len": str(manifest.max_seq_len),
        "attn_implementation": str(manifest.model.get("attn_implementation")),
        "passes": ", ".join(manifest.passes) or "none",
        "left_out": ", ".join(manifest.left_out) or "none",
        "weights": "beside the executable" if manifest.shares_weights else "within the executable",
        "kv": manifest.kv,
        "graph_level": manifest.graph_level,
        "glassengine": manifest.glassengine,
        **{f"requires {name}": version for name, version in manifest.requires.items()},
        "built on": manifest.cpu,
    }
