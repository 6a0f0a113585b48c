"""The core works without each plugin, and a request for what is missing names the extra that has it."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path
from typing import Any

import pytest
import torch

import glassengine as glass
from glassengine import commands, extensions
from glassengine.backends.registry import find_backend
from glassengine.errors import GlassError
from tests import children

PLUGINS = sorted(extensions.EXTRAS)
DOORS = {
    "lazy": ("glassengine.lazy", "glassengine.compat.torch_xla"),
    "serving": ("glassengine.serving.ggml", "glassengine.serving.vllm"),
}


class Hidden(importlib.abc.MetaPathFinder):
    """Hides a package, as if its folder were not there."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if f"{name}.".startswith(f"{self.package}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture(params=PLUGINS)
def hidden(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Hide one plugin, and return its name."""
    package = f"glassengine.plugins.{request.param}"
    hidden = tuple(f"{name}." for name in (package, *DOORS.get(request.param, ())))
    loaded = {name: module for name, module in sys.modules.items() if f"{name}.".startswith(hidden)}
    for name, module in loaded.items():
        # What is imported again while the plugin is hidden takes the place of the module in its package.
        parent, _, own = name.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], own, module, raising=False)
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Hidden(package), *sys.meta_path])
    yield request.param


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()


INPUTS = {"input": torch.linspace(-1, 1, 8).reshape(2, 4)}


def of_two_records(folder: Path, **options: Any) -> Any:
    for name in ("a", "b"):
        torch.save({"x": torch.ones(3)}, folder / f"{name}.pt")
    return glass.compare(folder / "a.pt", folder / "b.pt", **options)


def quantized_checkpoint(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}')
    return folder


def quantized_module() -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: torch.nn.Module = torch.ao.quantization.quantize_dynamic(net(), {torch.nn.Linear}, torch.qint8)
    return made


def onnx_file(folder: Path) -> Path:
    from onnx import TensorProto, helper, save

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in ("input", "output")]
    graph = helper.make_graph([helper.make_node("Relu", ["input"], ["output"])], "graph", ends[:1], ends[1:])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx")
    return folder / "model.onnx"


REQUESTS: dict[str, list[Callable[[Path], Any]]] = {
    "cluster": [lambda folder: of_two_records(folder, cluster="auto")],
    "lazy": [
        lambda folder: importlib.import_module("glassengine.lazy").device(),
        lambda folder: importlib.import_module("glassengine.compat.torch_xla.core.xla_model"),
    ],
    "onnx": [
        lambda folder: glass.check(net(), candidate=onnx_file(folder), inputs=INPUTS),
        lambda folder: glass.build(onnx_file(folder), folder / "engine"),
    ],
    "quantized": [
        lambda folder: glass.check(net(), candidate=quantized_checkpoint(folder), inputs=INPUTS),
        lambda folder: glass.check(net(), candidate=quantized_module(), inputs=INPUTS),
    ],
    "serving": [
        lambda folder: glass.check(net(), candidate="gguf:model.gguf", inputs=INPUTS),
        lambda folder: glass.check(net(), backend="gguf", inputs=INPUTS),
        lambda folder: commands.record_served("vllm:model", folder / "record", inputs="ids.json"),
        lambda folder: importlib.import_module("glassengine.serving.ggml.write").write_gguf,
    ],
    "tensorrt_rtx": [lambda folder: find_backend("tensorrt_rtx")],
}


def test_a_request_for_what_is_hidden_names_the_extra(hidden: str, tmp_path: Path) -> None:
    for request in REQUESTS[hidden]:
        with pytest.raises(GlassError) as error:
            request(tmp_path)
        assert f"glassengine.plugins.{hidden}" in str(error.value.got)
        assert f"pip install 'glassengine[{extensions.EXTRAS[hidden]}]'" in str(error.value.hint)


def test_the_core_works_without_it(hidden: str, tmp_path: Path) -> None:
    assert of_two_records(tmp_path).ok
    assert glass.check(net(), inputs=INPUTS, backend="eager").ok
    wrong = net()
    with torch.no_grad():
        wrong[0].bias += 1  # type: ignore[operator,union-attr]
    found = glass.check(net(), candidate=wrong, inputs=INPUTS)
    assert not found.ok and found.origins[0].site == "0/linear.0"
    assert "eager" in {info.name for info in glass.list_backends()}


IN_A_CHILD = """
import importlib, pkgutil, sys
sys.path[:0] = sys.argv[1:2]
from tests.test_extensions import Hidden
sys.meta_path.insert(0, Hidden("glassengine.plugins"))
import glassengine
count = 0
for module in pkgutil.walk_packages(glassengine.__path__, "glassengine.", onerror=lambda name: None):
    parts = set(module.name.split("."))
    if not parts & {"__main__", "inside", "plugins", "torch_xla"}:
        importlib.import_module(module.name)
        count += 1
assert count > 400, count
"""


def test_every_module_of_the_core_is_imported_without_plugins(root: Path) -> None:
    children.run([sys.executable, "-c", IN_A_CHILD, root], timeout=600, check=True)


WITHOUT_QUANTIZED = """
import sys
sys.path[:0] = sys.argv[1:2]
from tests.test_extensions import Hidden
sys.meta_path.insert(0, Hidden("glassengine.plugins.quantized"))
from glassengine.errors import UsageError
from glassengine.extensions import plugin
try:
    plugin("serving.check.check")
except UsageError as error:
    assert "glassengine[quantized]" in error.hint, error
else:
    raise AssertionError("it works without")
"""


def test_a_plugin_that_needs_a_hidden_one_names_the_hidden_one(root: Path) -> None:
    children.run([sys.executable, "-c", WITHOUT_QUANTIZED, root], timeout=600, check=True)


def test_extras_are_of_the_package(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extensions.EXTRAS.values()) <= project["optional-dependencies"].keys()


def test_a_module_that_is_missing_elsewhere_is_no_plugin() -> None:
    with pytest.raises(ModuleNotFoundError):
        extensions.imported("glassengine.nowhere")


@pytest.mark.parametrize(
    ("package", "module", "remedy"),
    [
        ("glassengine", "glassengine.plugins.tensorrt_rtx", "pip install 'glassengine[tensorrt-rtx]'"),
        ("glassengine", "glassengine.backends.onnxruntime", "pip install 'glassengine[onnx]'"),
        ("other", "other.backend", "pip install --force-reinstall other"),
    ],
)
def test_an_entry_that_cannot_be_imported_has_a_remedy(package: str, module: str, remedy: str, tmp_path: Path) -> None:
    (tmp_path / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    (tmp_path / "entry_points.txt").write_text(f"[{extensions.BACKENDS}]\nname = {module}:Name\n")
    (entry,) = PathDistribution(tmp_path).entry_points
    assert extensions.remedy(entry) == remedy
    assert "registers it" in extensions.remedy(EntryPoint("name", module, extensions.BACKENDS))
