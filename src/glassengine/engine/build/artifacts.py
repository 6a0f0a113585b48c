"""Build artifacts: what a build went through, written while it goes on (`--artifacts`, DEBUG_ARTIFACTS_DIR).

    DIR/manifest.json                  schema, versions, command line, back-end, options, stages, hashes; `complete`
        index.html                     all of it to read, with the differences between consecutive stages
        NN-<stage>/                    graph_module.py (runs), graph.txt, graph.json, diff-from-previous.txt
        graph_module.py, graph.txt     those of the last stage, under the names of the reference documents
        <backend>_network_def.py       what the back-end made of it
        builder_config.json            every option in effect
        plugin.txt                     fused and custom ops
        earlier-NNN/                   artifacts of earlier builds

Everything is written aside and renamed, and the manifest is updated after each step: however the
build, the artifacts written so far are there and say that they are incomplete.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from glassengine import environment
from glassengine.backends.protocol.backend import Backend, Describing, describe_network, program_network
from glassengine.engine.files import hash_file
from glassengine.errors import UsageError
from glassengine.program.onnx.function import OnnxVerifier
from glassengine.program.representation.artifacts import (
    FORMAT,
    MANIFEST,
    SCHEMA_VERSION,
    diff_graphs,
    diff_text,
    read_manifest,
)
from glassengine.program.representation.listing import NodeLine, Stage, graph_json, graph_text, list_nodes
from glassengine.program.representation.program import Program
from glassengine.program.representation.python_source import module_source
from glassengine.reading.files import printable
from glassengine.report.page.build_artifacts import index_page, network_text, plugin_text
from glassengine.stores.places import delivered, place
from glassengine.writing import aside, held, put_away, remove_tree

_STAGE_FOLDER = re.compile(r"\.?\d\d-[\w.-]+")


class ArtifactWriter:
    """Writes the artifacts of one build, while its block runs.

    Args:
        directory: Directory to write to; made where it does not exist. Ranks above 0 write to `rank<r>/` in it.
        about: What the manifest says of the build beside versions, command line and git.

    Raises:
        UsageError: On entering: it cannot be written, holds other files of these names, or is being written.
    """

    def __init__(self, directory: Path, about: Mapping[str, Any]) -> None:
        rank = environment.rank()
        directory = place(directory)
        self.directory = directory / f"rank{rank}" if rank else directory
        self._lines: list[NodeLine] = []
        self._data: dict[str, Any] = {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "complete": False,
            "failure": None,
            **about,
            "versions": environment.versions(),
            "command_line": environment.without_secrets(sys.argv),
            "variables": environment.variables(),
            "git": environment.git_revision(Path.cwd()),
            "options": {},
            "stages": [],
            "files": {},
        }
        self._undo = contextlib.ExitStack()

    def stage(self, stage: Stage) -> None:
        """Write one stage, and its difference from the one before.

        Raises:
            UsageError: It cannot be written.
        """
        lines = list_nodes(stage)
        diff = diff_graphs(self._lines, lines) if self._lines else None
        self._lines = lines
        stages = self._data["stages"]
        folder = f"{len(stages):02d}-{re.sub(r'[^0-9A-Za-z_.-]', '-', stage.name)}"
        title = f"{self._data['model']}: stage {folder}."
        files = {"graph.txt": graph_text(lines), "graph.json": graph_json(lines)}
        if stage.exported.dialect != OnnxVerifier.dialect:  # nothing outside of this package runs an ONNX node
            files = {"graph_module.py": module_source(stage, lines, title), **files}
        if diff is not None:
            files["diff-from-previous.txt"] = diff_text(diff)
        entry = {"name": stage.name, "directory": folder, "num_nodes": len(lines)}
        entry |= {kind: diff.count(kind) if diff else 0 for kind in ("added", "removed", "changed")}
        with self._writing():
            hidden = self.directory / f".{folder}"
            remove_tree(hidden)
            hidden.mkdir()
            try:
                for name, text in files.items():
                    (hidden / name).write_text(shown(text), encoding="utf-8")
                hidden.rename(self.directory / folder)
            except BaseException:
                remove_tree(hidden)
                raise
            stages.append(entry)
            for name in files:
                self._note_file(f"{folder}/{name}")
            # The last stage so far under the documents' own names: a build that fails leaves them, too.
            for name in ("graph_module.py", "graph.txt"):
                if name in files:
                    self._write(name, files[name])
            self._save_manifest()

    def options(self, backend: Backend, program: Program, options: Mapping[str, Any]) -> None:
        """Write `builder_config.json`: what was asked for and every option of the back-end in effect."""
        in_effect = backend.options(program) if isinstance(backend, Describing) else asdict(backend.capabilities)
        self._data["options"] = {**options, "backend_options": in_effect}
        with self._writing():
            text = json.dumps({"backend": backend.name, **self._data["options"]}, indent=2, default=str)
            self._write("builder_config.json", text + "\n")
            self._save_manifest()

    def network(self, backend: Backend, program: Program, directory: Path) -> None:
        """Write what the back-end made of `program` in `directory`: its network and its fused and custom ops."""
        network = describe_network(backend, program, directory)
        sites = {node: [site.name for site in found] for node, found in program.sites.by_node.items()}
        custom = [layer for layer in program_network(program, "").layers if layer.is_plugin]
        with self._writing():
            self._write(f"{backend.name}_network_def.py", network_text(network, backend.name, sites))
            if network.optimized is not None:
                text = network_text(network.optimized, backend.name, sites)
                self._write(f"{backend.name}_optimized_network_def.py", text)
            self._write("plugin.txt", plugin_text(custom, network, sites))
            for name, text in network.sources.items():
                self._write(name, text)
            self._save_manifest()

    def __enter__(self) -> None:
        """Put the artifacts of an earlier build away, and say that one goes on."""
        with contextlib.ExitStack() as undo, self._writing():
            self.directory = undo.enter_context(delivered(self.directory, last=MANIFEST))
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                undo.enter_context(held(self.directory))
            except BlockingIOError as error:
                raise UsageError(
                    "another process is writing its artifacts there",
                    got=str(self.directory),
                    hint="name another directory: --artifacts DIR",
                ) from error
            self._put_earlier_away()
            self._save_manifest()
            self._undo = undo.pop_all()

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Say how the build ended, and write `index.html`. A full disk must not hide what made the build fail."""
        self._data["complete"] = error is None
        if error is not None:
            self._data["failure"] = f"{type(error).__name__}: {error}"
        ignored = [UsageError] if error is not None else []
        with self._undo, contextlib.suppress(*ignored), self._writing():
            self._write("index.html", index_page(self.directory, self._data))
            self._save_manifest()

    def _put_earlier_away(self) -> None:
        """Move the artifacts of an earlier build into `earlier-NNN/`; other files are left where they are."""
        path = self.directory / MANIFEST
        if not path.exists():
            if clash := sorted(name for name in ("graph_module.py", "graph.txt") if (self.directory / name).exists()):
                raise UsageError(
                    "the directory for artifacts holds other files of the same names",
                    got=f"{', '.join(clash)} in {self.directory}",
                    hint="name another directory: --artifacts DIR",
                )
            return
        earlier = read_manifest(self.directory)
        names = {name.split("/")[0] for name in earlier["files"]} | {MANIFEST}
        names |= {entry.name for entry in self.directory.iterdir() if _STAGE_FOLDER.fullmatch(entry.name)}
        # The manifest last: as long as it is here, a move that was interrupted is carried on by the next build.
        there = (self.directory / name for name in sorted(names, key=lambda name: (name == MANIFEST, name)))
        put_away(self.directory, [path for path in there if path.exists()])

    def _write(self, name: str, text: str) -> None:
        _write_aside(self.directory / name, text)
        self._note_file(name)

    def _note_file(self, name: str) -> None:
        path = self.directory / name
        self._data["files"][name] = {"size": path.stat().st_size, "sha256": hash_file(path)}

    def _save_manifest(self) -> None:
        _write_aside(self.directory / MANIFEST, json.dumps(self._data, indent=1, default=str) + "\n")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(
                "cannot write the artifacts",
                got=f"{error.strerror or error} ({error.filename or self.directory})",
                hint="name a directory on a disk that is writable and has room: --artifacts DIR",
            ) from error


def _write_aside(path: Path, text: str) -> None:
    with aside(path) as temporary:
        temporary.write_text(shown(text), encoding="utf-8")


def shown(text: str) -> str:
    """Return text of which names of models and lines of others' sources are part, as people may print it."""
    return printable(text, also="\n\t")
