"""Records an engine: every added output and result of every step, by site."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from glassengine import environment
from glassengine.engine.session.loaded import LoadedEngine
from glassengine.engine.session.session import Session
from glassengine.errors import UsageError
from glassengine.recording.background import BackgroundWriter
from glassengine.sites import ROOT, Site


class EngineRecorder:
    """Writes the steps of an engine; a context manager.

    Args:
        path: Directory of the recording.
        engine: What runs.
        results: Names of the results to record beside the added outputs.
        rows: Token ids of the prompts, without padding; none where tensors were given.
        padding: "left" or "right", where prompts of one batch are padded.
        overwrite: Replace an existing recording.
        rank: Of several, which this process is.

    Raises:
        UsageError: The recording cannot be written, or exists.
    """

    def __init__(
        self,
        path: str | Path,
        engine: LoadedEngine,
        results: Sequence[str],
        rows: Sequence[Sequence[int]],
        *,
        padding: str = "left",
        overwrite: bool,
        rank: int = 0,
    ) -> None:
        self._rank = rank
        manifest, table = engine.manifest, engine.sites
        nodes = {entry.name: str(entry.node) for entry in manifest.outputs}
        named = {name: _result_site(table.by_node[nodes[name]]) for name in results if nodes[name] in table.by_node}
        by_name = {entry.name: table.get(entry.site) for entry in manifest.added_outputs}
        # One site may have been asked for under two names.
        sites = {site.name: (name, site) for name, site in by_name.items() if site is not None}
        self._sites = {**sites, **{site.name: (name, site) for name, site in named.items()}}
        metadata = {
            "kind": "engine",
            "model": dict(manifest.model),
            "model_fingerprint": manifest.model.get("fingerprint"),
            "engine": manifest.name,
            "backend": manifest.backend,
            "dtype": manifest.dtype,
            "device": manifest.device,
            "versions": environment.versions(),
            "cpu": environment.cpu_name(),
            "command_line": environment.without_secrets(sys.argv),
            "prompt_lengths": [len(row) for row in rows],
            "padding": padding,
            "sources": {name: site.source for name, (_, site) in self._sites.items() if site.source},
            "aliases": {name: site for site, (name, _) in self._sites.items() if name != site}
            | {entry.name: entry.site for entry in manifest.added_outputs if entry.name != entry.site},
            "left_out": dict(manifest.left_out),
        }
        self._writer = BackgroundWriter(path, metadata=metadata, overwrite=overwrite)

    @property
    def names(self) -> list[str]:
        """What `write_step` must be given, as the engine calls it."""
        return [name for name, _ in self._sites.values()]

    def write_step(
        self,
        step: int,
        values: Mapping[str, torch.Tensor],
        *,
        token_ids: Sequence[Sequence[int]] = (),
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Record one step.

        `values` are by the engine's names, what the model is `given` by those of its arguments.
        """
        for name, tensor in (given or {}).items():
            self._writer.write(f"{ROOT}:in.{name}", step, tensor, rank=self._rank)
        for site_name, (name, site) in self._sites.items():
            self._writer.write(site_name, step, values[name], rank=self._rank, axes=site.axes, node=site.node)
        self._writer.commit(step, token_ids=token_ids)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self.end(None if error is None else type(error).__name__)

    def end(self, failed: str | None) -> None:
        """End the recording; `failed` is the kind of error that has stopped the run."""
        self._writer.close(None if failed is None else f"stopped by {failed}")


class SessionRecorder(EngineRecorder):
    """Called after each step of `session`, made before its prefill, with its logits and added outputs."""

    def __init__(self, path: str | Path, session: Session, rows: Sequence[Sequence[int]], *, overwrite: bool) -> None:
        super().__init__(path, session.engine, ["logits"], rows, overwrite=overwrite)
        self._prompts = [list(row) for row in rows]

    def __call__(self, session: Session) -> None:
        """Record the step that just ran."""
        self.write_step(session.step, session.read(self.names), token_ids=tokens_of(session, self._prompts))


def tokens_of(session: Session, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the token ids of each sequence in the step that just ran."""
    if not session.step and not session.one_token:
        return [list(row) for row in prompts]
    tokens: list[list[int]] = session.read(["input_ids"])["input_ids"][:, :1].tolist()
    return tokens


def _result_site(sites: Sequence[Site]) -> Site:
    """The name of a result that a recording of the model itself would use: the output of a module."""
    modules = [site for site in sites if site.kind == "module" and ":" not in site.name]
    return modules[0] if modules else sites[0]


class RankRecorder(EngineRecorder):
    """Writes what the part of an engine that one rank runs makes in each step, into `rank<r>` of a directory."""

    def __init__(
        self, path: Path, part: LoadedEngine, rank: int, rows: Sequence[Sequence[int]], *, overwrite: bool
    ) -> None:
        results = [entry.name for entry in part.manifest.outputs if entry.name == "logits"]
        super().__init__(path / f"rank{rank}", part, results, rows, overwrite=overwrite, rank=rank)
        self._part = part
        self._ran: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []

    def note(self, fed: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]) -> None:
        """Take note of what the rank was given and made in a step, or in a piece of it."""
        self._ran.append((dict(fed), dict(outputs)))

    def end_step(self, step: int, tokens: Sequence[Sequence[int]], inputs: Mapping[str, torch.Tensor]) -> None:
        """Record a step that has run.

        `inputs` are what the ranks were given in it, and the caches after it.

        Raises:
            UsageError: The step ran in pieces.
        """
        (fed, outputs), *more = self._ran
        self._ran.clear()
        if more:
            raise UsageError(
                "what ranks make of a prompt in pieces is not recorded",
                got=f"{1 + len(more)} pieces",
                hint="run the prompt in one piece: prefill_chunk=LENGTH (--prefill-chunk LENGTH)",
            )
        added = [name for name in self.names if name in self._part.added_outputs]
        values = {name: outputs[name] for name in self.names if name not in added}
        values |= self._part.debug_values(added, outputs, lambda: ({**fed, **inputs}, outputs))
        # The mask has a column for each slot of the caches; the model's own has those up to the last token.
        mask = inputs["attention_mask"][:, : int(inputs["cache_position"][-1]) + 1].contiguous()
        given = {"input_ids": inputs["input_ids"], "attention_mask": mask}
        self.write_step(step, values, token_ids=tokens, given=given)
