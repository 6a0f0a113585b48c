"""Whether a stored program can be read without running code.

`torch.export.load` unpickles weights, constants and example inputs where the archive asks for it, and follows the names
in the description of a graph (`program.store.inert`). What `save_program` writes needs none of that, so an archive that goes
beyond it is refused before torch sees it.
"""

from __future__ import annotations

import io
import json
import logging
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from glassengine.errors import CorruptError, GlassError
from glassengine.program.store.inert import problems
from glassengine.reading.documents import parsed
from glassengine.reading.files import open_regular
from glassengine.reading.tensors import check_unfolded, read_torch

if TYPE_CHECKING:
    from torch.export import ExportedProgram

MAX_BYTES = 1 << 30
"""Most bytes of a stored program when unpacked; it holds no weights."""

MAX_JSON_BYTES = 256 << 20
MAX_ITEMS = 8_000_000
"""Values in the description of a graph: some hundred a node, and as many bytes of memory each."""


class _Weight(msgspec.Struct):
    path_name: str
    use_pickle: bool


class _Weights(msgspec.Struct):
    config: dict[str, _Weight]


_MODEL, _EXAMPLES = "models/model.json", "data/sample_inputs/model.pt"
_CONFIGS = {
    "data/weights/model_weights_config.json": re.compile(r"weight_\d+"),
    "data/constants/model_constants_config.json": re.compile(r"tensor_\d+"),
}
_OTHERS = re.compile(
    r"data/weights/weight_\d+|data/constants/tensor_\d+|archive_(format|version)|\.data/(version|serialization_id)"
    r"|\.format_version|\.storage_alignment|byteorder|version"
)


def inert_archive(path: Path, *, has_weights: bool = False) -> io.BytesIO:
    """Return a program archive for `torch.export.load`, refused where it holds more than a graph, names and tensors.

    The result is rewritten from the checked entries: torch has a zip reader of its own, and two
    readers can see different files in one archive (entries of one name, headers that contradict each other).

    Args:
        path: The file.
        has_weights: Whether it is a user's, with weights; guards, which are code, are then left out.

    Its entries must not be compressed (torch never does), so that it cannot unpack to more than its own size.

    Raises:
        CorruptError: It is not an archive, too large, or reading it could run code.
    """
    try:
        with (
            open_regular(path, inside=None if has_weights else path.parent) as opened,
            zipfile.ZipFile(opened) as archive,
        ):
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise _refusal(path, "compressed entries")
            if not has_weights and sum(info.file_size for info in archive.infolist()) > MAX_BYTES:
                raise _refusal(path, f"more than {MAX_BYTES:,} bytes")
            files: dict[str, bytes] = {}
            for info in archive.infolist():
                name = info.filename.partition("/")[2]
                if name not in (_MODEL, _EXAMPLES, *_CONFIGS) and not _OTHERS.fullmatch(name):
                    raise _refusal(path, f"an entry {name!r}")
                if name in files:
                    raise _refusal(path, f"two entries {name!r}")
                if name in (_MODEL, *_CONFIGS) and info.file_size > MAX_JSON_BYTES:
                    raise _refusal(path, f"{name} of {info.file_size:,} bytes")
                files[name] = archive.read(info)
        for name, stored in _CONFIGS.items():
            for weight, entry in parsed(files[name], _Weights, f"{path}:{name}").config.items():
                if entry.use_pickle or not stored.fullmatch(entry.path_name):
                    raise _refusal(path, f"a pickle for {weight!r}")
        check_unfolded(read_torch(io.BytesIO(files[_EXAMPLES]), name=f"{path}:{_EXAMPLES}"), str(path))
        told: dict[str, Any] = {"items": MAX_ITEMS, "nonfinite": True, "what": "the graph"}
        model = parsed(files[_MODEL], dict[str, Any], f"{path}:{_MODEL}", **told)
        if has_weights and model.pop("guards_code", None):
            files[_MODEL] = json.dumps({**model, "guards_code": []}).encode()
    except GlassError:
        raise
    except Exception as error:
        raise CorruptError(f"{path.name} cannot be read", got=f"{type(error).__name__}: {error}") from error
    for problem in problems(model):
        raise _refusal(path, problem)
    return _rewritten(files)


def load_archive(archive: io.BytesIO) -> ExportedProgram:
    """Return the program in what `inert_archive` gave, or raise what torch says of it.

    torch logs the reason, with a traceback, and raises that one should look there.
    """
    import torch

    reasons: list[str] = []

    def kept(record: logging.LogRecord) -> bool:
        reasons.append(str(record.exc_info[1]) if record.exc_info else record.getMessage())
        return False

    logger = logging.getLogger("torch.export")
    logger.addFilter(kept)
    try:
        return torch.export.load(archive)
    except RuntimeError as error:
        if not reasons:
            raise
        raise RuntimeError(reasons[-1]) from error
    finally:
        logger.removeFilter(kept)


def _rewritten(files: Mapping[str, bytes]) -> io.BytesIO:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            archive.writestr(f"program/{name}", content)
    buffer.seek(0)
    return buffer


def _refusal(path: Path, found: str) -> CorruptError:
    return CorruptError(
        f"{path.name} is not a stored program",
        got=found,
        expected="a graph, names and tensors, as torch.export.save and glass build write",
    )
