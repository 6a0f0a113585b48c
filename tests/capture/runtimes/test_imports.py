"""A module is noticed however the running code comes to import it, and only then."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from glassengine.capture.runtimes.imports import when_imported

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


def test_what_cannot_be_observed_is_imported_all_the_same(
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
