"""Back-ends are found, chosen and refused with a reason."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from glassengine import asked
from glassengine.backends import registry
from glassengine.backends.protocol.backend import Availability, CompilingGraphs
from glassengine.errors import BackendError, UnknownNameError
from glassengine.extensions import BACKENDS, registered

BUILT_IN = {"eager", "gguf", "inductor", "onnxruntime", "openvino", "tensorrt_rtx"}
Register = Callable[..., None]


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Return a function that registers an entry point beside the built-in ones."""
    entries = dict(registered(BACKENDS))

    def add(name: str, value: str) -> None:
        entries[name] = EntryPoint(name, value, BACKENDS)
        for module in (registry, asked):
            monkeypatch.setattr(module, "registered", lambda group: dict(entries))

    return add


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


def test_built_in_backends_come_by_the_entry_points_default_first() -> None:
    infos = registry.list_backends()
    assert {info.name for info in infos} == BUILT_IN
    assert infos[0].name == registry.DEFAULT
    assert all(info.available for info in infos if info.name != "tensorrt_rtx")  # not installed by `make test`


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_each_is_called_what_it_is_registered_as(name: str) -> None:
    backend = registry.find_backend(name)
    assert backend.name == name
    assert backend.capabilities.kv in ("functional", "mutated", "own")
    assert "float32" in backend.capabilities.dtypes


def test_the_default_is_taken_in_silence() -> None:
    backend, sentence = registry.choose_backend(None)
    assert (backend.name, sentence) == (registry.DEFAULT, None)


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_another_is_taken_and_said() -> None:
    backend, sentence = registry.choose_backend(None)
    assert backend.name == "onnxruntime"
    assert sentence is not None
    assert "no C++ compiler" in sentence
    assert "onnxruntime" in sentence


@pytest.mark.usefixtures("without_compiler")
def test_one_asked_for_by_name_is_never_replaced() -> None:
    with pytest.raises(BackendError, match=r"'inductor' cannot be used here") as error:
        registry.choose_backend("inductor")
    assert "g++" in str(error.value)


@pytest.mark.usefixtures("without_compiler")
def test_one_that_cannot_build_can_still_be_found_to_run() -> None:
    assert registry.find_backend("inductor").name == "inductor"


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"nearest: onnxruntime"):
        registry.get_backend("onnx-runtime")


def test_a_name_like_no_other_gets_the_few_that_there_are() -> None:
    with pytest.raises(UnknownNameError, match=r"one of (?=.*eager)(?=.*inductor)(?=.*onnxruntime)"):
        registry.get_backend("xyzzy")


def test_one_that_cannot_be_imported_is_listed_with_the_reason(register: Register) -> None:
    register("broken", "glassengine_no_such_package:Backend")
    info = {info.name: info for info in registry.list_backends()}["broken"]
    assert not info.available
    assert "No module named 'glassengine_no_such_package'" in info.reason
    assert info.install
    with pytest.raises(BackendError, match=r"'broken' cannot be imported"):
        registry.get_backend("broken")


def test_a_third_party_comes_in_by_the_same_door(register: Register) -> None:
    register("theirs", "glassengine.backends.eager:EagerBackend")
    assert registry.get_backend("theirs").capabilities.portable
    assert "theirs" in {info.name for info in registry.list_backends()}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("glassengine.backends.eager:NoSuchBackend", "AttributeError"),
        ("glassengine.backends.eager:EagerBackend.build", "TypeError"),
    ],
)
def test_one_that_is_broken_otherwise_is_listed_with_the_reason(register: Register, value: str, reason: str) -> None:
    register("broken", value)
    infos = registry.list_backends()
    assert {info.name for info in infos} == BUILT_IN | {"broken"}
    info = {info.name: info for info in infos}["broken"]
    assert not info.available
    assert info.reason.startswith(reason)
    with pytest.raises(BackendError, match=rf"'broken' cannot be imported\n.*{reason}"):
        registry.find_backend("broken")


class Unavailable:
    def available(self) -> Availability:
        return Availability(False, "no such device here", "buy one")


def test_one_that_cannot_be_used_gives_its_reason(register: Register, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glassengine.backends.eager.Unavailable", Unavailable, raising=False)
    register("theirs", "glassengine.backends.eager:Unavailable")
    info = {info.name: info for info in registry.list_backends()}["theirs"]
    assert (info.available, info.reason, info.install) == (False, "no such device here", "buy one")
    with pytest.raises(BackendError, match=r"'theirs' cannot be used here\n.*no such device here\n.*buy one"):
        registry.get_backend("theirs")


def test_default_back_end_for_graphs_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glassengine.environment.cxx_compiler", lambda: None)
    with pytest.raises(BackendError, match=r"no C\+\+ compiler"):
        registry.choose_graph_backend(None)
    assert isinstance(registry.choose_graph_backend("eager"), CompilingGraphs)
