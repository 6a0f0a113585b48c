"""Small files of every kind that can be opened: what the fuzzer starts from. File name -> bytes, per kind."""

from __future__ import annotations

import base64
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

import glassengine as glass
from glassengine.recording.export import FORMATS
from glassengine.recording.layout.layout import LeftOut, Sharding
from glassengine.recording.layout.tensors import describe, light_of_blocks
from glassengine.recording.reader import Recording
from glassengine.recording.write.writer import RecordingWriter

Files = dict[str, bytes]

X = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def read(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def written(write: Callable[[Path], Any]) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        return read(Path(folder))


def recording(folder: Path) -> None:
    with RecordingWriter(folder, metadata={"class": "Net", "token_ids": [[1, 2]]}, overwrite=True) as writer:
        for step in range(3):
            writer.write("a", step, X, axes={"batch": 0}, node="add")
            writer.write("a:in[0]", step, torch.ones(2, dtype=torch.complex128))
            writer.write("b", step, torch.zeros(0), rank=1)
            writer.leave_out(LeftOut("c", step, 0, "values were not asked for", "float32", (2, 3)))
            writer.write("d", step, X, sharding=Sharding((4, 3), ("S(0)",), (2,), ("tensor",), (1,)))
            group = writer.group((describe("e", X), describe("f", X)), 0)
            (table,) = light_of_blocks(memoryview(bytes(88)), 1, group.kinds, group.columns)
            writer.leave_out_block(group, step, "because", table)
            writer.commit(step, token_ids=[[1, 2, step]])
    opened = Recording.open(folder)
    for entry in opened.entries[:2]:
        opened.summary(entry)
        opened.sketch(entry)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(folder: Path) -> None:
    np.savez(folder / "f.npz", a=X.numpy(), b=np.arange(3))
    np.savez_compressed(folder / "g.npz", a=X.numpy())


def torch_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def polygraphy() -> bytes:
    outputs = {
        "x": {"values": {"array": base64.b64encode(npy(X.numpy())).decode(), "polygraphy_class": "ndarray"}},
        "t": {"values": {"tensor": base64.b64encode(torch_bytes(X)).decode(), "polygraphy_class": "Tensor"}},
        "big": {"values": {"array": base64.b64encode(npy(np.zeros(9000, np.float32))).decode()}},
    }
    iteration = {"outputs": outputs, "runtime": 0.1, "runner_name": "r", "polygraphy_class": "IterationResult"}
    return json.dumps({"lst": [["r", [iteration]]], "polygraphy_class": "RunResults"}).encode()


def debug_tree_text() -> bytes:
    def described(tensor: torch.Tensor) -> dict[str, Any]:
        return {"shape": repr(tensor.shape), "dtype": repr(tensor.dtype), "value": str(tensor).splitlines()}

    values = [X, torch.tensor(3), torch.tensor([True]), torch.tensor([1 + 2j]), torch.zeros(0, 2)]
    leaf = {"module_path": "M.a", "inputs": {"args": [described(value) for value in values], "kwargs": {"k": "None"}}}
    return json.dumps({"module_path": "M", "outputs": {"y": described(X)}, "children": [leaf, leaf]}).encode()


def msprobe() -> Files:
    one = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2, 3], "data_name": "a.pt"}
    data = {
        "Module.m.M.forward.0": {"input_args": [one], "output": [{**one, "data_name": "b.npy"}]},
        "Torch.relu.0.forward": {"input_kwargs": {"k": [one, {"type": "int", "value": 3}]}},
        "Module.m.M.parameters_grad": {"w": [one]},
    }
    return {
        "step0/rank0/dump.json": json.dumps({"task": "tensor", "data": data}).encode(),
        "step0/rank0/dump_tensor_data/a.pt": torch_bytes(X),
        "step0/rank0/dump_tensor_data/b.npy": npy(X.numpy()),
    }


def seeds() -> dict[str, Files]:
    """Return the files of every kind; a kind of one file is opened by that file, others by their directory."""
    found: dict[str, Files] = {
        "recording": written(recording),
        "safetensors": {"f.safetensors": save({"a": X, "b": X.half()}, {"k": "v"})},
        "pt": {"f.pt": torch_bytes({"a": X, "b": [X.t(), 3], "c": X.to_sparse(), "p": torch.nn.Parameter(X)})},
        "npy": {"f.npy": npy(X.numpy())},
        "fortran": {"f.npy": npy(np.asfortranarray(X.numpy()))},
        "npz": {"f.npz": written(npz)["f.npz"]},
        "deflated": {"g.npz": written(npz)["g.npz"]},
        "polygraphy": {"r.json": polygraphy()},
        "debug_tree_text": {"M_debug_tree_FULL_TENSORS.json": debug_tree_text()},
        "msprobe": msprobe(),
        "sglang": {
            "step=0___rank=0___dump_index=1___name=x.pt": torch_bytes({"value": X, "meta": {"name": "x"}}),
            "step=0___rank=0___dump_index=2___name=non_intrusive__m.output.1.pt": torch_bytes({"value": X}),
        },
        "npy_folder": {
            "x-step0.npy": npy(X.numpy()),
            "npy-names.json": b'{"schema_version": 1, "files": {"x": {"name": "a/b", "dtype": "bfloat16"}}}',
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        recording(Path(folder) / "r")
        for kind in FORMATS:
            glass.export(Path(folder) / "r", Path(folder) / kind, format=kind)
            found[f"exported_{kind}"] = read(Path(folder) / kind)
    return found
