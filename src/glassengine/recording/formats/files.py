"""The kinds of single files that hold tensors, by the ends of their names."""

from __future__ import annotations

from pathlib import Path

from glassengine.recording.formats.npy_file import NpyFile
from glassengine.recording.formats.numpy_file import NumpyFile
from glassengine.recording.formats.safetensors_file import SafetensorsFile
from glassengine.recording.formats.torch_file import TorchFile

TensorFile = TorchFile | SafetensorsFile | NumpyFile | NpyFile

KINDS: dict[str, type[TensorFile]] = {
    ".pt": TorchFile,
    ".pth": TorchFile,
    ".safetensors": SafetensorsFile,
    ".npz": NumpyFile,
    ".npy": NpyFile,
}


def why_not_a_file(folder: Path, name: str) -> str | None:
    """Return why `name`, which a dump says is a file in `folder`, is not opened, or None."""
    if Path(name).name != name or "\\" in name or "\0" in name or name in ("", ".", ".."):
        return "its file is outside of the directory"
    try:
        if folder.is_symlink() or (folder / name).is_symlink():
            return "its file is a link, which could leave the directory"
        return None if (folder / name).is_file() else "its file is not there"
    except OSError as error:
        return f"its file cannot be opened: {error.strerror}"
