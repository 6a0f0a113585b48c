"""Where Inductor keeps what it builds and loads: others may not write there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from glassengine.backends.inductor import settings
from glassengine.backends.inductor.backend import InductorBackend
from glassengine.backends.inductor.cache import InductorCache
from glassengine.backends.inductor.settings import use_private_directory

NAME = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Inductor's own directory, among temporary files of this test."""
    monkeypatch.setenv(NAME, "unset")
    monkeypatch.delenv(NAME)
    monkeypatch.setenv("GLASS_CACHE_DIR", str(tmp_path / "kept"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    settings._other.cache_clear()
    yield Path(default_cache_dir())
    settings._other.cache_clear()


def plant(directory: Path, how: str) -> None:
    if how == "link":
        directory.parent.joinpath("elsewhere").mkdir(mode=0o700)
        directory.symlink_to("elsewhere")
        return
    directory.mkdir(mode=0o700)
    if how == "writable":
        directory.chmod(0o777)
    elif os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    else:
        os.chown(directory, 65534, 65534)


@pytest.mark.parametrize("how", ["writable", "link", "of another user"])
def test_s2_a_directory_that_others_prepared_is_not_used(default: Path, how: str, tmp_path: Path) -> None:
    plant(default, how)
    use_private_directory()
    assert os.environ[NAME] == str(tmp_path / "kept" / "inductor")
    assert (tmp_path / "kept" / "inductor").stat().st_mode & 0o777 == 0o700
    # torch writes down what it takes by default; that is no choice of the user.
    os.environ[NAME] = str(default)
    use_private_directory()
    assert os.environ[NAME] != str(default)


def test_s2_where_nothing_is_the_users_alone_a_directory_of_the_process_is(default: Path, tmp_path: Path) -> None:
    plant(default, "writable")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept").chmod(0o777)
    use_private_directory()
    place = Path(os.environ[NAME])
    assert place.parent == tmp_path / "tmp" and place.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(place)


def test_a_directory_of_ones_own_is_used(default: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_private_directory()
    assert NAME not in os.environ and default.stat().st_mode & 0o777 == 0o700
    default.chmod(0o755)  # as torch makes it
    use_private_directory()
    assert NAME not in os.environ
    # One that the user names is his decision, also where a group shares it.
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o775)
    monkeypatch.setenv(NAME, str(tmp_path / "shared"))
    use_private_directory()
    assert os.environ[NAME] == str(tmp_path / "shared")


def test_s2_whatever_compiles_or_loads_looks_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Looked(Exception):
        pass

    def look() -> None:
        raise Looked

    for module in ("backend", "cache"):
        monkeypatch.setattr(f"glassengine.backends.inductor.{module}.use_private_directory", look)
    backend, graph = InductorBackend(), torch.fx.symbolic_trace(torch.nn.ReLU())
    with pytest.raises(Looked):
        backend.build(None, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(Looked):
        backend.load(tmp_path, None)
    with pytest.raises(Looked):
        backend.compile_graph(graph, [torch.ones(2)])
    with pytest.raises(Looked), InductorCache().within(tmp_path):
        pass


@pytest.mark.slow
def test_s2_libraries_that_another_user_planted_are_not_loaded(default: Path, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("import torch\ndef net():\n    return torch.nn.Linear(4, 4).eval()\n")
    torch.save({"input": torch.ones(1, 4)}, tmp_path / "x.pt")
    command = [sys.executable, "-m", "glassengine", "build", "net.py:net", "--inputs", "x.pt", "--backend", "inductor"]
    environment = {**os.environ, "TMPDIR": str(default.parent)}

    def build(name: str) -> str:
        done = subprocess.run(
            [*command, "-o", name], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "Inductor does not use" not in build("first")
    source = tmp_path / "evil.c"
    source.write_text(
        f'#include <fcntl.h>\n__attribute__((constructor)) void f(void) {{ creat("{tmp_path}/ran", 0600); }}'
    )
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "evil.so"), str(source)], check=True)
    planted = list(default.rglob("*.so"))
    assert planted
    for library in planted:
        shutil.copy(tmp_path / "evil.so", library)
    default.chmod(0o777)
    assert "Inductor does not use" in build("second")
    assert not (tmp_path / "ran").exists()
