"""`--device`: what is built for a GPU, refused without one, and, where there is one, run on it.

Tests that are marked `cuda` are skipped here; `make test-cuda` runs them. They were never run on hardware.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

import glassengine as glass
from glassengine import commands
from glassengine.accelerators import require_device
from glassengine.backends.inductor.backend import InductorBackend
from glassengine.backends.onnxruntime import OnnxRuntimeBackend
from glassengine.backends.protocol.io import DEVICE, device_of, exported_on, read_io, running_on, write_io
from glassengine.backends.registry import find_backend
from glassengine.cli.main import main
from glassengine.engine.session.session import KVCache
from glassengine.errors import BackendError, UsageError
from glassengine.program.export.export import export_module
from glassengine.program.representation.program import Program
from glassengine.testing import conformance

MakeProgram = Callable[..., Program]

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
CAUSES = ("is a build without CUDA", "finds no GPU")


class Positions(nn.Module):
    """Makes a tensor on the device of its input, as models do with positions and masks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x) + torch.arange(4, device=x.device)


@pytest.fixture(scope="module")
def program() -> Program:
    return export_module(Positions().eval(), [{"x": torch.randn(2, 4)}])


def for_gpu(program: Program) -> Program:
    return replace(program, metadata={**program.metadata, DEVICE: "cuda"})


def test_a_moved_program_is_elsewhere_and_the_program_is_not(program: Program) -> None:
    def places(exported: ExportedProgram) -> list[set[str]]:
        values = [node.meta.get("val") for node in exported.graph.nodes]
        made = {torch.device(node.kwargs["device"]).type for node in exported.graph.nodes if "device" in node.kwargs}
        kept = {value.device.type for value in values if isinstance(value, torch.Tensor)}
        return [{tensor.device.type for tensor in exported.state_dict.values()}, kept, made]

    # A device that is everywhere and is not the CPU.
    found = exported_on(program, "meta")
    assert places(found) == [{"meta"}] * 3
    assert [node.name for node in found.graph.nodes] == [node.name for node in program.graph.nodes]
    assert places(program.exported) == [{"cpu"}] * 3
    assert exported_on(program, "cpu") is program.exported


def test_a_loaded_engine_knows_what_it_was_built_for(program: Program, tmp_path: Path) -> None:
    assert device_of(program) == "cpu" and write_io(program, tmp_path).device == "cpu"
    write_io(for_gpu(program), tmp_path)
    assert read_io(tmp_path).device == "cuda"
    # Engines of before there was a choice.
    data = json.loads((tmp_path / "io.json").read_text())
    del data["device"]
    (tmp_path / "io.json").write_text(json.dumps(data))
    assert read_io(tmp_path).device == "cpu"


def test_on_the_cpu_nothing_stands_in_between() -> None:
    def run(inputs: object) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    assert running_on(run, "cpu", {}) is run


@without_gpu
def test_a_missing_gpu_is_said_with_what_torch_finds() -> None:
    require_device("cpu", "anything")
    with pytest.raises(BackendError, match="this thing needs a GPU") as refused:
        require_device("cuda", "this thing")
    assert any(cause in str(refused.value.got) for cause in CAUSES) and refused.value.hint == "--device cpu"


@without_gpu
@pytest.mark.parametrize("backend", [InductorBackend(), OnnxRuntimeBackend()])
def test_loading_what_was_built_for_a_gpu_is_refused(
    backend: InductorBackend | OnnxRuntimeBackend, program: Program, tmp_path: Path
) -> None:
    write_io(for_gpu(program), tmp_path)
    with pytest.raises(BackendError, match="needs a GPU"):
        backend.load(tmp_path, None)


@without_gpu
@pytest.mark.parametrize("backend", ["inductor", "onnxruntime"])
def test_a_build_for_a_gpu_that_is_not_there_leaves_nothing(
    backend: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["build", str(root / "examples" / "tiny-llama"), "-o", str(tmp_path / "engine"), "--backend", backend]
    assert main([*command, "--device", "cuda"]) == 3
    shown = capsys.readouterr().err
    assert "needs a GPU" in shown and "hint: --device cpu" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--backend", "openvino", "--device", "cuda"], "hint: --backend "),
        (["--backend", "eager", "--device", "tpu"], "hint: --device cpu"),
    ],
)
def test_a_device_that_a_back_end_does_not_know(
    options: list[str], line: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["build", str(root / "examples" / "tiny-llama"), "-o", str(tmp_path / "engine"), *options]) == 2
    shown = capsys.readouterr().err
    assert f"does not build for '{options[-1]}'" in shown and line in shown


def test_an_engine_for_the_cpu_says_so(tmp_path: Path) -> None:
    inputs = {"x": torch.randn(2, 4)}
    engine = glass.build(Positions().eval(), tmp_path / "engine", backend="eager", device="cpu", inputs=inputs)
    assert engine.manifest.device == "cpu"
    KVCache(engine.manifest, 1, 4)
    with pytest.raises(UsageError, match="does not build for"):
        glass.build(Positions(), tmp_path / "other", backend="eager", device="cuda", inputs=inputs)
    if not torch.cuda.is_available():
        with pytest.raises(BackendError, match="needs a GPU") as refused:
            KVCache(replace(engine.manifest, device="cuda"), 1, 4)
        assert "glass build" in str(refused.value.hint)


@without_gpu
def test_recording_on_a_gpu_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["import torch", "model = lambda: torch.nn.Linear(2, 2)", "inputs = lambda: {'input': torch.ones(1, 2)}"]
    (tmp_path / "m.py").write_text("\n".join(lines))
    command = ["record", f"{tmp_path / 'm.py'}:model", "--inputs", f"{tmp_path / 'm.py'}:inputs"]
    assert main([*command, "-o", str(tmp_path / "r"), "--device", "cuda"]) == 3
    assert "needs a GPU" in capsys.readouterr().err and not (tmp_path / "r").exists()
    assert main([*command, "-o", str(tmp_path / "r"), "--device", "warp"]) == 3
    assert "needs the device 'warp'" in capsys.readouterr().err
    assert main([*command, "-o", str(tmp_path / "r"), "--device", "cpu"]) == 0


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["inductor", "onnxruntime"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_engine_on_a_gpu_agrees_with_the_model(backend: str, dtype: str, root: Path, tmp_path: Path) -> None:
    if dtype not in find_backend(backend).capabilities.dtypes:
        pytest.skip("no such dtype")
    model = str(root / "examples" / "tiny-llama")
    engine = glass.build(model, tmp_path / "engine", backend=backend, device="cuda", dtype=dtype)
    assert {tensor.device.type for tensor in KVCache(engine.manifest, 1, 4).tensors.values()} == {"cuda"}
    assert glass.check(model, candidate=str(tmp_path / "engine"), dtype=dtype).ok
    texts = ["Once upon a time", "The"]
    there = engine.generate(texts, max_new_tokens=8, record=tmp_path / "there")
    here = glass.build(model, tmp_path / "here", backend="eager", dtype=dtype)
    alone = here.generate(texts, max_new_tokens=8, record=tmp_path / "here-record")
    if dtype == "float32":
        assert there.token_ids == alone.token_ids
        assert glass.compare(tmp_path / "here-record", tmp_path / "there", rtol=1e-3, atol=1e-3).ok


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["inductor", "onnxruntime"])
def test_every_op_is_right_on_a_gpu(backend: str, program_of: MakeProgram, tmp_path: Path) -> None:
    subject = conformance.prepare(for_gpu(program_of("llama")), find_backend(backend), tmp_path)
    report = conformance.check_generation(subject, batch=2, left_padding=3)
    assert report.ok, report


@pytest.mark.cuda
def test_a_model_is_recorded_on_a_gpu_as_on_the_cpu(root: Path, tmp_path: Path) -> None:
    inputs = {"input_ids": torch.arange(3, 13)[None]}
    for device in ("cpu", "cuda"):
        model = str(root / "examples" / "tiny-llama")
        commands.record_target(model, tmp_path / device, inputs=inputs, device=device, max_new_tokens=3)
    assert glass.compare(tmp_path / "cpu", tmp_path / "cuda", rtol=1e-3, atol=1e-3).ok
    assert glass.compare(tmp_path / "cuda", tmp_path / "cuda", device="cuda").verdict == "identical"
