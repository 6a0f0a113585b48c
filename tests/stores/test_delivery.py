"""Files and directories that go to a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from glassengine.errors import UsageError
from glassengine.stores import objects
from glassengine.stores.delivery import delivered

pytestmark = pytest.mark.usefixtures("nothing_in_memory")


@pytest.fixture(autouse=True)
def spool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLASS_SPOOL_DIR", str(tmp_path / "spool"))
    return tmp_path / "spool"


def test_a_path_of_this_machine_is_itself(tmp_path: Path) -> None:
    with delivered(tmp_path / "x") as path:
        assert path == tmp_path / "x"


def test_a_directory_goes_as_a_whole_and_its_note_last(spool: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, order = objects.put, []
    monkeypatch.setattr(objects, "put", lambda path, url: order.append(url) or put(path, url))
    objects.write(b"old", "memory://run/old/x")
    with delivered("memory://run", last="engine.json", replace=True) as path:
        (path / "inner").mkdir(parents=True)
        for name in ("engine.json", "a", "z", "inner/b"):
            (path / name).write_text(name)
    assert order[-1] == "memory://run/engine.json" and len(order) == 4
    assert objects.read("memory://run/inner/b", 0, 7) == b"inner/b"
    assert objects.find("memory://run/old/x") is None, "it belongs to what was replaced"
    assert list(spool.iterdir()) == []


def test_a_file(spool: Path) -> None:
    with delivered("memory://run/a.npz") as path:
        path.write_text("x")
    assert objects.read("memory://run/a.npz", 0, 1) == b"x"
    with pytest.raises(UsageError, match="exists already"), delivered("memory://run/a.npz", overwrite=False) as path:
        path.write_text("y")
    assert objects.read("memory://run/a.npz", 0, 1) == b"x"


def test_nothing_goes_where_the_block_fails(spool: Path) -> None:
    with pytest.raises(RuntimeError), delivered("memory://run") as path:
        path.mkdir()
        (path / "a").write_text("x")
        raise RuntimeError
    assert objects.find("memory://run") is None and list(spool.iterdir()) == []
