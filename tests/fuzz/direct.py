"""Readers without what surrounds them: the functions that the commands call, at a fraction of a command's time.

Each reads what lies in the folder, and prints a digest of every value, so that a value read wrongly shows. They
end as commands do: `glassengine.cli.errors.exit_status` makes a status of what they raise.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn


def say(*values: Any) -> int:
    """Print what was read."""
    for value in values:
        sys.stdout.write(_text(value) + "\n")
    return 0


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.device.type == "meta":
            return f"{value.layout} {value.device} {list(value.shape)}"
        data = value.detach().contiguous().flatten()[: 1 << 16].view(torch.uint8) if value.numel() else b""
        data = data.numpy().tobytes() if isinstance(data, torch.Tensor) else data
        return f"{value.dtype} {list(value.shape)} {hashlib.sha256(data).hexdigest()[:16]}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return repr(value)


def _alone(here: Path) -> Path:
    """Return the one file of a folder, or where it was."""
    return next((path for path in here.iterdir() if path.name != ".made"), here / "it.json")


def read_dump(here: Path, shared: Path) -> int:
    from glassengine.recording.reader import Recording
    from glassengine.recording.source import open_source

    files = [path for path in sorted(here.rglob("*")) if path.name != ".made"]
    source = open_source(files[0] if len(files) == 1 else here)
    for entry in source.entries[:50]:
        say(entry.describe())
        if entry.nbytes < 1 << 20:
            tensor = source.tensor(entry)
            assert tuple(tensor.shape) == entry.shape, "another shape than was said"
            say(tensor)
            if isinstance(source, Recording):
                say(source.summary(entry), source.sketch(entry))
    for item in source.skipped:
        assert item.reason, "skipped without a reason"
    return 0


def read_recording(here: Path, shared: Path) -> int:
    from glassengine.recording.layout.noise_floor import read_noise_floor

    floor = read_noise_floor(here / "it")
    return read_dump(here / "it", shared) or say(floor is not None)


def read_snapshot(here: Path, shared: Path) -> int:
    from glassengine.executable.snapshot.reader import Snapshot

    packed = here / "it.safetensors"
    found = Snapshot.open(packed if os.path.lexists(packed) else here / "it")
    say(found.to_dict(statistics=False), found.arguments())
    say([found.output(name) for name in found.output_names] if found.outputs else None)
    return say(found.graph_hash and hashlib.sha256(found._graph_bytes().numpy().tobytes()).hexdigest())


def read_engine(here: Path, shared: Path) -> int:
    from glassengine.engine.files import check_files, load_weights
    from glassengine.engine.manifest import read_manifest, require_fit, require_intact
    from glassengine.program.representation.stored import load_names

    directory = here / "it"
    found = read_manifest(directory)
    require_fit(found.manifest, portable=True)
    check_files(found.manifest, directory, verify=True)
    names = load_names(directory / "main")
    require_intact(found.manifest, found.intact, names)
    weights = load_weights(directory / "weights.safetensors")
    return say(found.manifest, {key: value for key, value in names.items() if key != "sites"}, weights)


def read_program(here: Path, shared: Path) -> int:
    from glassengine.backends.protocol.io import read_io
    from glassengine.engine.run.generate import read_settings
    from glassengine.program.representation.stored import load_names

    names = load_names(here / "it")
    settings = read_settings(here, None, {}, max_length=64, vocab_size=512)
    return say(list(names["sites"]), names["metadata"], read_io(here / "it"), settings.config.to_dict())


def read_profile(here: Path, shared: Path) -> int:
    from glassengine.executable.profile_trace import read_profiles

    found, _ = read_profiles(here / "it")
    return say(json.dumps(found.data, allow_nan=False))


def read_artifacts(here: Path, shared: Path) -> int:
    from glassengine.program.representation.artifacts import read_manifest
    from glassengine.program.representation.listing import read_listing

    directory = here / "it"
    manifest = read_manifest(directory)
    for stage in manifest["stages"]:
        say(read_listing(directory / stage["directory"] / "graph.json", inside=directory))
    return say(manifest)


class _Layers(nn.Module):
    """What an adapter of one layer is merged into, by the paths of a language model."""

    def __init__(self) -> None:
        super().__init__()
        here: nn.Module = self
        for name in ("model", "layers", "0", "self_attn"):
            here.add_module(name, nn.Module())
            here = here.get_submodule(name)
        here.add_module("q_proj", layer := nn.Linear(16, 16, bias=False))
        nn.init.ones_(layer.weight)


def read_adapter(here: Path, shared: Path) -> int:
    from glassengine.program.loading.adapters import merge, read_adapter

    adapter = read_adapter(here / "it")
    module = _Layers()
    merge(module, adapter)
    return say(module.state_dict())


def read_inputs(here: Path, shared: Path) -> int:
    from glassengine.program.inputs.user_inputs import load_inputs

    path = _alone(here)
    return say(load_inputs(str(path)))


def read_token_ids(here: Path, shared: Path) -> int:
    from glassengine.engine.prompts import read_input_ids

    path = _alone(here)
    return say(read_input_ids(path))


def read_checkpoint(here: Path, shared: Path) -> int:
    from glassengine.program.loading.checkpoint_files import (
        read_headers,
        read_tensors,
        require_plain_files,
        weight_files,
    )

    require_plain_files(here / "it")
    files = weight_files(str(here / "it"))
    return say(read_headers(files), read_tensors(files))


def read_prompts(here: Path, shared: Path) -> int:
    from glassengine.engine.prompts import read_chat, read_prompt_file

    path = _alone(here)
    return say(read_chat(path) if path.name.startswith("c") else read_prompt_file(path))


def read_aliases(here: Path, shared: Path) -> int:
    from glassengine.engine.build.requests import read_requests

    return say(read_requests([f"@{here / 'aliases.json'}"]))


def read_map(here: Path, shared: Path) -> int:
    from glassengine.compare.matching.maps import load_map

    path = _alone(here)
    return say(load_map(path))


def read_onnx(here: Path, shared: Path) -> int:
    from glassengine.program.onnx.file import read_onnx

    found = read_onnx(here / "it" / "m.onnx")
    return say(found.weights())


def read_changed(here: Path, shared: Path) -> int:
    """Translate the model that was changed among many."""
    from glassengine.program.loading.stored import read_stored

    times = {path: path.lstat().st_mtime_ns for path in sorted(here.glob("*.onnx"))}
    newest = max(times, key=lambda path: times[path])
    _, program = read_stored(newest)
    return say([port.name for port in program.inputs], len(list(program.graph.nodes)))


def read_archive(here: Path, shared: Path) -> int:
    from glassengine.program.representation.archive import inert_archive

    return say(hashlib.sha256(inert_archive(here / "m.pt2", has_weights=True).getvalue()).hexdigest())


def read_metrics(here: Path, shared: Path) -> int:
    from glassengine.executable.counters import read_metrics

    path = _alone(here)
    return say(read_metrics(path))


def read_kernels(here: Path, shared: Path) -> int:
    """What was measured of a runtime, and is kept in the cache: damaged, it is measured again."""
    from glassengine.backends import calibration

    key = {"backend": "it", "version": "1", "instruction_set": "x"}
    before = os.environ.get("GLASS_CACHE_DIR")
    os.environ["GLASS_CACHE_DIR"] = str(here)
    try:
        return say(calibration._cached(key))
    finally:
        os.environ.pop("GLASS_CACHE_DIR")
        os.environ |= {} if before is None else {"GLASS_CACHE_DIR": before}


@functools.cache
def _server(folder: str) -> int:
    """Start a server, once in a process, and return its port."""
    from glassengine.executable import profile_server
    from glassengine.executable.profile_server import request_profile

    profile_server.ACCEPT_S = 0.0  # one client sends all of it
    port = profile_server.start_server(0, directory=Path(folder) / "profiles").port
    request_profile(f"localhost:{port}", timeout_s=0.01)  # the first one takes longer
    return port


def serve(here: Path, shared: Path) -> int:
    """Send the bytes to a server that stays; afterwards it still answers, if only that it is busy."""
    from glassengine.errors import UsageError
    from glassengine.executable.profile_server import request_profile
    from tests.fuzz.readers import send_to

    port = _server(str(shared.parent / "temporary" / f"server-{os.getpid()}"))
    send_to(port, (here / "request").read_bytes())
    try:
        request_profile(f"localhost:{port}", timeout_s=0.0)
    except UsageError as error:
        assert "another profile" in str(error), error
        return 2
    return 0


def parse_line(here: Path, shared: Path) -> int:
    """The options of a command line are read, and the command itself is not run."""
    from glassengine.cli import main, options
    from glassengine.cli.documents import spelled_out
    from glassengine.cli.errors import exit_status

    try:
        words = json.loads((here / "line.json").read_bytes())
    except (ValueError, RecursionError, OSError):
        return 0
    if not isinstance(words, list) or not words:
        return 0
    line = [str(word).replace("{shared}", str(shared)).replace("\0", "") for word in words]
    line = [os.fsdecode(word.encode("utf-8", "surrogatepass")) for word in line]

    def parse() -> int:
        group = main._build()
        with group.make_context("glass", spelled_out(line)) as context:
            name, command, rest = group.resolve_command(context, [*context._protected_args, *context.args])
            command.make_context(name, rest, parent=context)
        return 0

    options.reset()
    return exit_status(parse)
