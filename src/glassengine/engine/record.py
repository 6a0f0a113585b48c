"""Record a session: every added output and the logits of every step, by site."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from glassengine import environment
from glassengine.engine.session import Session
from glassengine.recording.worker import BackgroundWriter
from glassengine.sites import Site


class SessionRecorder:
    """Called after each step of `session`; a context manager.

    Args:
        path: Directory of the recording.
        session: Before its prefill.
        rows: Token ids of the prompts, without padding.
        overwrite: Replace a recording that exists.

    Raises:
        UsageError: The recording cannot be written, or exists.
    """

    def __init__(self, path: str | Path, session: Session, rows: Sequence[Sequence[int]], *, overwrite: bool) -> None:
        engine = session.engine
        manifest = engine.manifest
        logits = _logits_site(engine.sites.by_node[_node_of(engine, "logits")])
        by_name = {entry.name: engine.sites.get(entry.site) for entry in manifest.added_outputs}
        # One site may have been asked for under two names.
        sites = {site.name: (name, site) for name, site in by_name.items() if site is not None}
        self._sites = {**sites, logits.name: ("logits", logits)}
        self._prompts = [list(row) for row in rows]
        metadata = {
            "kind": "engine",
            "model": dict(manifest.model),
            "model_fingerprint": manifest.model.get("fingerprint"),
            "engine": manifest.name,
            "backend": manifest.backend,
            "dtype": manifest.dtype,
            "device": "cpu",
            "versions": environment.versions(),
            "cpu": environment.cpu_name(),
            "command_line": environment.without_secrets(sys.argv),
            "prompt_lengths": [len(row) for row in rows],
            "padding": "left",
            "sources": {name: site.source for name, (_, site) in self._sites.items() if site.source},
            "aliases": {name: site for site, (name, _) in self._sites.items() if name != site}
            | {entry.name: entry.site for entry in manifest.added_outputs if entry.name != entry.site},
            "left_out": dict(manifest.left_out),
        }
        self._writer = BackgroundWriter(path, metadata=metadata, overwrite=overwrite)

    def __call__(self, session: Session) -> None:
        """Record the step that just ran."""
        names = [name for name, _ in self._sites.values()]
        values = session.read(names)
        tokens = session.read(["input_ids"])["input_ids"][:, :1].tolist() if session.step else self._prompts
        for site_name, (name, site) in self._sites.items():
            self._writer.write(site_name, session.step, values[name], axes=site.axes, node=site.node)
        self._writer.commit(session.step, token_ids=tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close(None if error is None else f"stopped by {type(error).__name__}")


def _node_of(engine: object, output: str) -> str:
    entries = engine.manifest.outputs  # type: ignore[attr-defined]
    return next(str(entry.node) for entry in entries if entry.name == output)


def _logits_site(sites: Sequence[Site]) -> Site:
    """The name of the logits that a recording of the model itself would use: the output of the head module."""
    modules = [site for site in sites if site.kind == "module" and ":" not in site.name]
    return modules[0] if modules else sites[0]
