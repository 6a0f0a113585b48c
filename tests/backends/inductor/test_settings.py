"""Where Inductor keeps what it builds and loads: others may not write there."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from glassengine.backends.inductor import settings
from glassengine.backends.inductor.backend import InductorBackend
from glassengine.backends.inductor.settings import InductorCache, use_private_directory
from glassengine.errors import UnknownNameError, UsageError
from glassengine.executable.cache import examine_cache
from glassengine.executable.compilation import Occasion, compilations
from glassengine.executable.counters import metrics, reset_metrics
from glassengine.executable.run.executable import Executable
from glassengine.frontends.eager_debug import OpRunner
from glassengine.frontends.eager_graph import EagerCall, compile_call, examine

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

    for module in ("backend", "settings"):
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


MM = torch.ops.aten.mm.default


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GLASS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("GLASS_CACHE_MAX_BYTES", raising=False)
    for name in ("GLASS_CC_FLAGS", "NEURON_CC_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    reset_metrics()
    return tmp_path / "cache"


def compile_once(op: torch._ops.OpOverload = MM, args: Sequence[torch.Tensor] | None = None) -> Executable:
    """Compile as a new process would: nothing of an earlier call is used again."""
    given = args or [torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(3, 4)]
    call = EagerCall(examine(op), given, {})
    made = compile_call(call, with_numbers=False, backend=InductorBackend(), occasion=Occasion(()))
    torch.testing.assert_close(made.run(call), op(*given))
    return made.executable


def counters() -> dict[str, int]:
    found = metrics().counters
    return {name: value for name, value in found.items() if name.startswith("Persistent")}


def test_inductor_takes_what_it_kept_and_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[str] = []
    real = torch._inductor.cpp_builder.run_compile_cmd

    def noted(command: str, cwd: str) -> object:
        commands.append(command)
        return real(command, cwd=cwd)

    monkeypatch.setattr(torch._inductor.cpp_builder, "run_compile_cmd", noted)
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    compile_once(torch.ops.aten.relu.default, [x])
    assert counters() == {"PersistentCacheMiss": 1}
    assert any(".main" in command for command in commands)
    commands.clear()
    compile_once(torch.ops.aten.relu.default, [x])
    assert counters() == {"PersistentCacheMiss": 1, "PersistentCacheHit": 1}
    assert [command for command in commands if ".main" in command] == []


@pytest.mark.parametrize("pattern", ["fxgraph", "aotautograd", r"\.py$"])
def test_damaged_files_of_inductor(directory: Path, pattern: str) -> None:
    compile_once()
    files = [path for path in directory.rglob("*") if path.is_file() and re.search(pattern, str(path))]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:-7])
    compile_once()
    compile_once()
    assert counters() == {"PersistentCacheMiss": 1, "PersistentCacheCorrupt": 1, "PersistentCacheHit": 1}


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    compile_once()
    reset_metrics()
    yield monkeypatch


@pytest.mark.parametrize(("text", "setting"), [("--max_fusion_size=3", "max_fusion_size"), ("--freezing", "freezing")])
def test_changed_flags_are_a_miss(flags: pytest.MonkeyPatch, text: str, setting: str) -> None:
    flags.setenv("GLASS_CC_FLAGS", text)
    compile_once()
    assert counters() == {"PersistentCacheMiss": 1}
    assert f"flags.{setting}: none -> " in examine_cache().entries[0].cause


def test_log_level_is_shown_and_no_reason_to_compile_again(
    flags: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    inductor = logging.getLogger("torch._inductor")
    inductor.addHandler(caplog.handler)
    try:
        compile_once()
        assert not [record for record in caplog.records if record.name.startswith("torch._inductor")]
        flags.setenv("NEURON_CC_FLAGS", "--log_level=INFO")
        compile_once()
    finally:
        inductor.removeHandler(caplog.handler)
    assert "fx graph cache hit" in caplog.text
    assert counters() == {"PersistentCacheHit": 2}


def test_changed_setting_and_variable_are_a_miss(flags: pytest.MonkeyPatch) -> None:
    with torch._inductor.config.patch({"max_fusion_size": 5}):
        compile_once()
    flags.setenv("TORCHINDUCTOR_MADE_UP", "1")
    compile_once()
    causes = [entry.cause for entry in examine_cache().entries]
    assert counters() == {"PersistentCacheMiss": 2}
    assert any("options.max_fusion_size: none -> 5" in cause for cause in causes)
    assert any("variables.TORCHINDUCTOR_MADE_UP: none -> 1" in cause for cause in causes)


def test_wrong_flags_are_explained(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("GLASS_CC_FLAGS", "--max_autotun")
    with pytest.raises(UnknownNameError, match="--max_autotune"):
        InductorCache().parts()
    monkeypatch.setenv("GLASS_CC_FLAGS", "--max_fusion_size=many")
    with pytest.raises(UsageError, match="does not fit"):
        InductorCache().parts()
    monkeypatch.setenv("GLASS_CC_FLAGS", "--log_level=LOUD")
    with pytest.raises(UsageError, match="not a log level"):
        InductorCache().parts()
    monkeypatch.delenv("GLASS_CC_FLAGS")
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1 --model-type=transformer --log_level=info")
    for _ in range(2):
        assert InductorCache().parts()["flags"] == {}
    assert [record.message for record in caplog.records] == [
        f"{flag} in NEURON_CC_FLAGS is of another compiler and ignored" for flag in ("-O1", "--model-type=transformer")
    ]


def outcomes() -> tuple[int, int]:
    """Return hits and misses since the last call."""
    found = counters()
    reset_metrics()
    return found.get("PersistentCacheHit", 0), found.get("PersistentCacheMiss", 0)


def test_whole_graphs_of_training_are_taken_from_the_cache() -> None:
    weight = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    x = torch.linspace(0, 1, 6).reshape(2, 3)
    gradients = []
    for expected in ((0, 2), (2, 0)):  # forward and backward; the second time as a new process would
        torch._dynamo.reset()
        weight.grad = None
        compilations_before = len([made for made in compilations() if not made.from_cache])
        torch.compile(torch.matmul, backend="glass")(x, weight).backward(torch.ones(2, 4))
        assert outcomes() == expected and weight.grad is not None
        gradients.append(weight.grad)
    assert len([made for made in compilations() if not made.from_cache]) == compilations_before
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], x.T @ torch.ones(2, 4))


def test_graph_with_symbols_is_right_for_sizes_that_were_not_compiled() -> None:
    weight = torch.linspace(-1, 1, 12).reshape(3, 4)
    for rows, expected in ((5, (0, 1)), (7, (1, 0)), (2, (1, 0))):
        torch._dynamo.reset()
        call = torch.compile(torch.matmul, backend="glass", dynamic=True)
        for more in (0, 4):  # the second call has another size, and needs no other graph
            x = torch.linspace(0, 1, (rows + more) * 3).reshape(-1, 3)
            torch.testing.assert_close(call(x, weight), x @ weight)
        assert outcomes() == expected


def halves(x: torch.Tensor) -> torch.Tensor:
    """Depends on the size in a way that compiled code is a special case of."""
    return (x[: x.shape[0] // 2] if x.shape[0] % 2 == 0 and x.shape[0] > 8 else x) @ torch.ones(3, 4)


@pytest.mark.slow
def test_graph_with_guards_on_symbols_is_not_taken_where_they_do_not_hold() -> None:
    for rows in (10, 9, 4, 12, 3):
        torch._dynamo.reset()
        x = torch.linspace(0, 1, rows * 3).reshape(-1, 3)
        torch.testing.assert_close(torch.compile(halves, backend="glass", dynamic=True)(x), halves(x))


def test_where_a_call_stands_is_no_reason_to_compile_again() -> None:
    x = torch.linspace(-1, 1, 9).reshape(3, 3)
    for line in (1, 2):
        meta = {"stack_trace": f'File "model.py", line {line}, in forward', "nn_module_stack": {"m": (f"m{line}", "M")}}
        OpRunner(InductorBackend()).run(MM, [x, x], {}, meta)
    assert outcomes() == (1, 1)
