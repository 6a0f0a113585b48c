"""The kinds of single files that hold tensors, by the ends of their names."""

from __future__ import annotations

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
