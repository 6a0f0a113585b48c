"""What the plug-in in vLLM writes: `rank0/forward-{n}.safetensors`, each forward of a server a step.

The header of a file says which rows are of which request, and how the server was started.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine.errors import CorruptError
from glassengine.recording.formats.safetensors_file import SafetensorsFile
from glassengine.recording.layout.layout import Entry
from glassengine.results import Skipped

if TYPE_CHECKING:
    from torch import Tensor

_MOST_FORWARDS = 1 << 16
_MOST_TEXT = 1 << 26


class ServerFolder:
    """Tensors of one process of a server.

    Args:
        path: The folder.
        rank: Of the process.

    Raises:
        CorruptError: A file is damaged.
    """

    complete = True

    def __init__(self, path: Path, rank: int = 0) -> None:
        self.path = path
        self.skipped: Sequence[Skipped] = ()
        files = sorted((path / f"rank{rank}").glob("forward-*.safetensors"))[:_MOST_FORWARDS]
        if not files:
            raise CorruptError("a process of the server has recorded nothing", got=str(path / f"rank{rank}"))
        self._files = [SafetensorsFile(file) for file in files]
        settings = _told(self._files[0], "facts")
        self.metadata: dict[str, Any] = {
            "kind": "model",
            "layout": "vllm",
            "architecture": str(settings.get("architecture", "")),
            "dtype": str(settings.get("dtype", "")),
            "settings": settings,
            "as_deployed": True,
            "forwards": [_told(file, "forward").get("requests") for file in self._files],
        }
        self.entries: Sequence[Entry] = [
            dataclasses.replace(entry, step=step) for step, file in enumerate(self._files) for entry in file.entries
        ]

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped."""
        return self._files[entry.step].tensor(entry)


def ranks_of(source: Any) -> list[Any]:
    """Return a source for each process of a server whose model is spread over them; the source itself where it is not.

    Raises:
        CorruptError: A process has recorded nothing.
    """
    world = (source.metadata.get("settings") or {}).get("world", 1)
    spread = (source.metadata.get("settings") or {}).get("tensor_parallel", 1)
    if not isinstance(source, ServerFolder) or not isinstance(world, int) or world != spread or not 1 < world <= 1024:
        return [source]
    return [source, *(ServerFolder(source.path, rank) for rank in range(1, world))]


def open_server_folder(path: Path) -> ServerFolder | None:
    """Open what the plug-in wrote; None where something else did."""
    if not path.is_dir() or next(path.glob("rank*/forward-*.safetensors"), None) is None:
        return None
    return ServerFolder(path)


def _told(file: SafetensorsFile, name: str) -> dict[str, Any]:
    text = file.metadata.get(name, "")
    try:
        found = json.loads(text) if isinstance(text, str) and len(text) <= _MOST_TEXT else None
    except (ValueError, RecursionError) as error:
        raise CorruptError("not a forward of a server", got=f"{file.path}: {error}") from error
    if not isinstance(found, dict):
        raise CorruptError("not a forward of a server", got=f"{file.path}: its header has no {name!r}")
    return found
