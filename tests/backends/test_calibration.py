"""The sweep of a runtime's kernels, and where its results are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine.backends import calibration, kernel_sweep
from glassengine.backends.registry import find_backend
from glassengine.numerics.float64 import Operation
from glassengine.numerics.kernels import KernelError

pytest.importorskip("onnxruntime")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASS_CACHE_DIR", str(tmp_path / "cache"))
    calibration._kernels_of.cache_clear()


def test_the_shipped_table_knows_the_pinned_versions() -> None:
    versions = {(entry["backend"], entry["version"]) for entry in calibration._shipped()}
    for name in ("onnxruntime", "openvino"):
        key = calibration._key(find_backend(name))
        if key["version"] != "unknown":
            assert (name, key["version"]) in versions
    for entry in calibration._shipped():
        assert calibration._from_dict(entry).about


def test_the_sigmoid_of_onnx_runtime_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_sweep, "_ONNX", {"real": "Sigmoid Relu Tanh"})
    monkeypatch.setattr(kernel_sweep, "_TORCH", {})
    found = kernel_sweep.sweep(find_backend("onnxruntime"), torch.float32)
    assert 2e-8 < found["sigmoid"].absolute < 3e-7
    assert not found["tanh"].absolute


def test_exact_kernels_are_not_taken_for_approximations() -> None:
    x = kernel_sweep.arguments("real", torch.float32)
    exact = x.double().sigmoid()
    operation = Operation("sigmoid", torch.sigmoid, (x.double(),), {}, exact)
    assert kernel_sweep.kernel_error(operation, exact.float()) == KernelError()
    assert kernel_sweep.kernel_error(operation, (exact + 1e-7).float()).absolute == pytest.approx(1e-7, rel=0.2)
    far = kernel_sweep.kernel_error(operation, torch.nn.functional.hardsigmoid(x))
    assert not kernel_sweep._is_accuracy(far, 2.0**-24)


def test_a_version_that_is_not_known_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def measured(backend: Any) -> dict[str, Any]:
        calls.append(backend.name)
        return {
            "schema_version": 1,
            **calibration._key(backend),
            "errors": {"float32": {"sigmoid": [3e-7, 0, 0, 0, 0]}},
        }

    monkeypatch.setattr(calibration, "_shipped", lambda: ())
    monkeypatch.setattr(calibration, "measured", measured)
    for _ in range(2):
        found = calibration.kernels_of("onnxruntime")
        assert found.error("sigmoid", torch.float32) == KernelError(3e-7)
        calibration._kernels_of.cache_clear()
    assert calls == ["onnxruntime"]


def test_a_damaged_cache_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = find_backend("onnxruntime")
    path = calibration._cache_file(calibration._key(backend))
    path.parent.mkdir(parents=True)
    for text in ("{", json.dumps({"schema_version": 1, **calibration._key(backend), "errors": {"float32": 3}}), "[1]"):
        path.write_text(text)
        assert calibration._cached(calibration._key(backend)) is None


def test_without_a_measurement_the_nearest_entry_holds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entry = {"backend": "onnxruntime", "version": "0.1", "instruction_set": "avx2"}
    entries = ({**entry, "errors": {"float32": {"sigmoid": [2e-7, 0, 0, 0, 0]}}},)
    monkeypatch.setattr(calibration, "_shipped", lambda: entries)
    found = calibration.kernels_of("onnxruntime", measure=False)
    assert found.error("sigmoid", torch.float32).absolute == 2e-7
    assert "glass doctor --calibrate" in caplog.text


def test_kernels_of_torch_are_exact() -> None:
    assert not calibration.kernels_of("eager").errors
