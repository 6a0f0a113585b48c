"""Back-end "openvino": precision, memory, and what it refuses. That its values are right is in test_conformance."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from glassengine.backends.openvino import OpenVinoBackend
from glassengine.errors import BackendError
from glassengine.program.export.export import export_module
from glassengine.program.representation.program import Program

MakeProgram = Callable[..., Program]
BACKEND = OpenVinoBackend()


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = x @ self.weight
        return {"y": y, "positive": y > 0}


class Rotation(nn.Module):
    """Of the first half of each head, as in Phi and GPT-NeoX."""

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> dict[str, torch.Tensor]:
        turned, rest = x[..., :8], x[..., 8:]
        half = torch.cat((-turned[..., 4:], turned[..., :4]), dim=-1)
        rotated = turned * cos + half * sin
        return {"rotated": rotated, "head": torch.cat((rotated, rest), dim=-1), "rest": rest}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("product")
    program = export_module(Product().eval(), [{"x": torch.randn(2, 64)}, {"x": torch.randn(3, 64)}])
    BACKEND.build(program, directory)
    return directory


def test_openvino_computes_in_float32_on_processors_with_bfloat16(built: Path) -> None:
    x = torch.randn(5, 64)
    result = BACKEND.load(built, None)({"x": x})
    expected = Product()(x)
    # bfloat16, the default of OpenVINO on many processors, would be wrong by about 1e-2.
    torch.testing.assert_close(result["y"], expected["y"], rtol=1e-5, atol=1e-5)
    assert result["positive"].dtype is torch.bool
    assert BACKEND.options(None)["INFERENCE_PRECISION_HINT"] == "f32"  # type: ignore[arg-type]


def test_results_stay_as_they_are_in_later_runs(built: Path) -> None:
    run = BACKEND.load(built, None)
    first = run({"x": torch.ones(2, 64)})
    kept = {name: value.clone() for name, value in first.items()}
    run({"x": -torch.ones(2, 64)})
    assert all(torch.equal(first[name], kept[name]) for name in kept)


def test_a_rotation_of_a_part_of_each_head_is_what_it_was(tmp_path: Path) -> None:
    steps = [
        {"x": torch.randn(2, 4, n, 16), "cos": torch.rand(2, 1, n, 8), "sin": torch.rand(2, 1, n, 8)} for n in (5, 7)
    ]
    BACKEND.build(export_module(Rotation(), steps), tmp_path)
    run = BACKEND.load(tmp_path, None)
    for step in steps:
        result, expected = run(step), Rotation()(**step)
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value)
        # What is shown is what the rest of the graph is given, to the last bit.
        assert torch.equal(result["rotated"], result["head"][..., :8])


def test_inputs_of_any_stride_are_left_as_they_are(built: Path) -> None:
    x = torch.randn(64, 6).t()[::2]
    before = x.clone()
    result = BACKEND.load(built, None)({"x": x})
    torch.testing.assert_close(result["y"], Product()(before)["y"], rtol=1e-5, atol=1e-5)
    assert torch.equal(x, before)


def test_bfloat16_is_refused(tmp_path: Path) -> None:
    program = export_module(Product().bfloat16().eval(), {"x": torch.randn(2, 64, dtype=torch.bfloat16)})
    with pytest.raises(BackendError, match="no bfloat16 kernels"):
        BACKEND.build(program, tmp_path)


def test_a_missing_package_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    found = BACKEND.available()
    assert not found.available and "openvino" in found.reason and found.install == "pip install 'glassengine[openvino]'"
    with pytest.raises(BackendError, match="cannot be used here"):
        BACKEND.load(tmp_path, None)


def test_the_listing_shows_what_it_was_given_and_what_it_runs(built: Path) -> None:
    program = export_module(Product().eval(), [{"x": torch.randn(2, 64)}, {"x": torch.randn(3, 64)}])
    network = BACKEND.network(program, built)
    assert network.note == "ONNX, as it was given to OpenVINO."
    assert network.optimized is not None
    products = [layer for layer in network.optimized.layers if layer.operation in ("MatMul", "FullyConnected")]
    assert [layer.nodes for layer in products] == [("matmul",)]


def test_a_signal_is_handled_after_two_engines_are_freed(built: Path) -> None:
    code = (
        "import gc, os, signal, sys\n"
        "from pathlib import Path\n"
        "from glassengine.backends.openvino import OpenVinoBackend\n"
        "runs = [OpenVinoBackend().load(Path(sys.argv[1]), None) for _ in range(2)]\n"
        "while runs:\n    del runs[0]\n    gc.collect()\n"
        "signal.signal(signal.SIGINT, lambda *_: print('handled'))\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, built], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "handled\n"), done.stderr
