"""Runs of what is no module: OpenVINO, AOTInductor, TorchScript; and scripts of which nothing can be recorded."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from glassengine.capture.runtimes import when_imported
from glassengine.capture.script_recorder import ScriptRecorder
from glassengine.cli.main import main
from glassengine.recording.reader import Recording


class Double(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


@pytest.fixture(scope="module")
def compiled() -> Any:
    openvino = pytest.importorskip("openvino")
    ops = importlib.import_module("openvino.opset13")
    x = ops.parameter([2], np.float32, name="x")
    model = openvino.Model([ops.result(ops.add(x, x), name="y")], [x], "doubler")
    return openvino.Core().compile_model(model, "CPU")


def test_f21_every_way_to_run_openvino(tmp_path: Path, compiled: Any, caplog: pytest.LogCaptureFixture) -> None:
    openvino = importlib.import_module("openvino")
    x = np.arange(2, dtype=np.float32)
    names = {name: vars(openvino.InferRequest).get(name) for name in ("infer", "wait", "start_async")}
    with ScriptRecorder(tmp_path / "out") as recorder:
        compiled({"x": x})
        compiled.infer_new_request([x + 1])
        request = compiled.create_infer_request()
        request.set_tensor("x", openvino.Tensor(x + 2))
        request.infer()
        request.start_async([x + 3])
        request.wait()
        request.wait()  # once more, which is no other run
        request.start_async([x + 4])
        while not request.wait_for(1000):
            pass
        with pytest.raises(Exception, match=r"shape|size|input"):
            request.infer([np.zeros(3, np.float32)])
        queue = openvino.AsyncInferQueue(compiled, 1)
        queue.start_async([x])
        queue.wait_all()
    assert names == {name: vars(openvino.InferRequest).get(name) for name in names}
    assert "1 runs of queues of OpenVINO were not recorded" in caplog.text
    opened = Recording.open(recorder.recordings[0])
    assert opened.path.name == "doubler" and opened.metadata["kind"] == "openvino" and len(opened.steps) == 6
    for step in range(5):
        assert opened.tensor(".:in.x", step).tolist() == [step, step + 1]
        assert opened.tensor(".:out.y", step).tolist() == [2 * step, 2 * step + 2]
    assert list(opened.stopped) == [5]


def test_f21_packages_of_aotinductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loader:
        def get_call_spec(self) -> list[str]:
            pytree = torch.utils._pytree
            given: Any = ((torch.ones(1),), {})
            return [pytree.treespec_dumps(pytree.tree_structure(tree)) for tree in (given, torch.ones(1))]

        def boxed_run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            if inputs[0].numel() == 0:
                raise RuntimeError("planted")
            return [inputs[0].add_(1)]

        def get_metadata(self) -> dict[str, str]:
            return {"AOTI_DEVICE_KEY": "cpu"}

    from torch.export.pt2_archive._package import AOTICompiledModel

    with ScriptRecorder(tmp_path / "out") as recorder:
        package = AOTICompiledModel(Loader())  # type: ignore[arg-type]
        package(torch.zeros(2))
        package(torch.ones(2))
        with pytest.raises(RuntimeError, match="planted"):
            package(torch.ones(0))
    opened = Recording.open(recorder.recordings[0])
    assert opened.metadata["kind"] == "aotinductor" and opened.metadata["package"] == {"AOTI_DEVICE_KEY": "cpu"}
    # The input is what it was before compiled code wrote into it.
    assert opened.tensor(".:in[0]", 1).tolist() == [1, 1] and opened.tensor(".", 1).tolist() == [2, 2]
    assert opened.sites(2) == [".:in[0]"] and "planted" in opened.stopped[2]


@pytest.mark.slow
def test_f21_a_package_that_torch_made(tmp_path: Path) -> None:
    program = torch.export.export(Double(), (torch.ones(2),))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "double.pt2"))
    (tmp_path / "script.py").write_text(
        f"import torch\nprint(torch._inductor.aoti_load_package({package!r})(torch.full((2,), 3.0)))\n"
    )
    assert main(["record", "-o", str(tmp_path / "out"), "--", str(tmp_path / "script.py")]) == 0
    opened = Recording.open(tmp_path / "out" / "AOTICompiledModel")
    assert opened.tensor(".:in[0]").tolist() == [3, 3] and opened.tensor(".").tolist() == [6, 6]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_f21_scripted_modules(tmp_path: Path) -> None:
    class Holder(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.inner(x)
            return result

    scripted = torch.jit.script(Double())
    with ScriptRecorder(tmp_path / "out") as recorder:
        for number in range(2):
            scripted(torch.full((2,), float(number)))
            Holder(torch.jit.script(Double()))(torch.ones(2))
    assert sorted(path.name for path in recorder.recordings) == ["Double", "Holder", "Holder-2"]
    opened = Recording.open(tmp_path / "out" / "Double")
    assert opened.metadata["kind"] == "torchscript" and opened.steps == [0, 1]
    assert opened.tensor(".", 1).tolist() == [2, 2]


@pytest.mark.parametrize("flags", [[], ["-q"], ["--json"]])
def test_f21_nothing_recorded_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", ModuleType("tensorrt"))
    (tmp_path / "script.py").write_text("import subprocess, sys\nsubprocess.run([sys.executable, '-c', ''])\n")
    assert main(["record", *flags, "-o", str(tmp_path / "out"), "--", str(tmp_path / "script.py")]) == 4
    shown = capsys.readouterr()
    said = shown.out if "--json" in flags else shown.err
    assert "nothing was recorded" in said and "TensorRT was imported" in said and "1 processes were started" in said


def test_a_script_that_fails_keeps_its_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text("raise SystemExit(7)\n")
    assert main(["record", "-o", str(tmp_path / "out"), "--", str(tmp_path / "script.py")]) == 7
    assert "nothing was recorded" in capsys.readouterr().err


NAME = "noticed_by_a_test"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "__init__.py").write_text("value = 1\n")
    (tmp_path / NAME / "inner.py").write_text("value = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield tmp_path / NAME
    for name in (NAME, f"{NAME}.inner"):
        sys.modules.pop(name, None)


@pytest.fixture
def seen() -> list[ModuleType]:
    return []


def test_f20_a_look_up_is_no_import(seen: list[ModuleType]) -> None:
    with when_imported(NAME, seen.append):
        assert importlib.util.find_spec(NAME) is not None and importlib.util.find_spec(f"{NAME}s") is None
        spec = importlib.util.find_spec(NAME)
        assert spec is not None and type(spec.loader).__name__ == "SourceFileLoader"
        sys.modules.pop(NAME, None)
        assert not seen
        assert [importlib.import_module(NAME)] == seen and seen[0].value == 1


def test_f20_every_way_to_import(seen: list[ModuleType]) -> None:
    with when_imported(NAME, seen.append):
        inner = importlib.import_module(f"{NAME}.inner")
        assert inner.value == 2 and len(seen) == 1
        importlib.reload(sys.modules[NAME])
        assert len(seen) == 2
        for name in (NAME, f"{NAME}.inner"):
            del sys.modules[name]
        again = importlib.import_module(NAME)
        assert len(seen) == 3 and seen[-1] is again
        with when_imported(NAME, seen.append):
            assert len(seen) == 4 and seen[-1] is again
            importlib.reload(again)
            assert len(seen) == 6
    importlib.reload(again)
    assert len(seen) == 6


@pytest.mark.parametrize("earlier", [True, False])
def test_f20_lazy_loaders(seen: list[ModuleType], earlier: bool) -> None:
    def make() -> ModuleType:
        spec = importlib.util.find_spec(NAME)
        assert spec is not None and spec.loader is not None
        spec.loader = importlib.util.LazyLoader(spec.loader)
        module = importlib.util.module_from_spec(spec)
        sys.modules[NAME] = module
        spec.loader.exec_module(module)
        return module

    module = make() if earlier else None
    with when_imported(NAME, seen.append):
        module = module or make()
        assert not seen  # nor has it been executed
        assert module.value == 1 and seen == [module]


def test_runtimes_that_cannot_be_observed_are_imported(
    module: Path, seen: list[ModuleType], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: ModuleType) -> None:
        raise ValueError("planted")

    with caplog.at_level(logging.WARNING), when_imported(NAME, fail):
        assert importlib.import_module(NAME).value == 1
    assert f"what runs in {NAME} is not recorded: ValueError: planted" in caplog.text
    (module / "__init__.py").write_text("raise KeyError('its own')\n")
    del sys.modules[NAME]
    importlib.invalidate_caches()
    with when_imported(NAME, seen.append), pytest.raises(KeyError, match="its own"):
        importlib.import_module(NAME)
    with when_imported("zipimport", seen.append), when_imported("no_such_module_at_all", seen.append):
        assert importlib.util.find_spec("no_such_module_at_all") is None
    assert [one.__name__ for one in seen] in ([], ["zipimport"])
