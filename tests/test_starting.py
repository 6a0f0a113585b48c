"""Processes are started in one place, and find no modules in the working directory."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
import torch

import glassengine as glass
from glassengine import environment, starting
from glassengine.cli.main import main
from glassengine.cli.mcp import Roots
from glassengine.diagnose.reproduction.bisect_compiler import try_elsewhere
from glassengine.errors import GlassError
from glassengine.testing import models
from glassengine.workers.processes import Processes

SOURCE = Path(glass.__file__).parent

STARTING = {"run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"}
"""Of the module subprocess; its constants and errors start nothing."""
OF_OS = ("system", "popen", "fork", "forkpty", "exec", "spawn", "posix_spawn", "startfile")
ELSEWHERE = {
    "Process", "Pool", "Manager", "get_context", "set_start_method", "ProcessPoolExecutor", "create_subprocess_exec",
    "create_subprocess_shell", "subprocess_exec", "subprocess_shell", "open_process", "run_process", "start_processes",
}  # fmt: skip
WORDS = re.compile(
    rf"subprocess|executable|os\.({'|'.join(OF_OS)})|from os|ray|multiprocessing|pty|{'|'.join(sorted(ELSEWHERE))}"
)

ALLOWED = {
    ("starting.py", "subprocess.run"): "the place",
    ("starting.py", "subprocess.Popen"): "the place",
    ("starting.py", "sys.executable"): "the place",
    ("environment.py", "subprocess.run"): "git, below the place",
    ("engine/tokenizing.py", "os.fork"): "a copy of this process, which imports nothing",
    ("cli/mcp_server.py", "anyio.open_process"): "awaited; command and environment are of the place",
    ("cli/record.py", "sys.executable"): "compared with what the user names",
    ("capture/script_recorder.py", "sys.executable"): "compared with what the script names",
    (
        "plugins/serving/interpreter.py",
        "sys.executable",
    ): "the interpreter, where the user names none; started by the place",
    ("prompt/worker.py", "sys.executable"): "the interpreter, where the user names none; started by the place",
    ("plugins/cluster/ray_tasks.py", "ray.init"): "Ray starts workers; a job that has no working directory for modules",
}


def starts(source: str) -> Iterator[str]:
    """Yield what in a source starts processes, or names an interpreter to start."""
    if not WORDS.search(source):
        return
    nodes = list(ast.walk(ast.parse(source)))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("subprocess", "os"):
            for alias in node.names:
                if alias.name in STARTING or (node.module == "os" and alias.name.startswith(OF_OS)):
                    yield f"{node.module}.{alias.name}"
        if not isinstance(node, ast.Attribute):
            continue
        whole = ast.unparse(node)
        of, _, name = whole.rpartition(".")
        is_start = (of == "subprocess" and name in STARTING) or (of == "os" and name.startswith(OF_OS))
        is_called = name in ELSEWHERE and not of.startswith(("self", "starting"))
        if name == "Popen" and id(node) not in called:
            continue  # as a type
        if is_start or is_called or whole in ("sys.executable", "ray.init", "multiprocessing.spawn", "pty.spawn"):
            yield whole


def test_s17_processes_are_started_in_one_place() -> None:
    found = set()
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        found |= {(name, start) for start in starts(path.read_text(encoding="utf-8"))}
    assert found == ALLOWED.keys(), "by `starting`, or allowed here with a reason"


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run([sys.executable])", "subprocess.Popen(command)", "from subprocess import check_output",
        "os.execv(a, b)", "os.posix_spawn(a, b, c)", "from os import system", "multiprocessing.get_context('spawn')",
        "torch.multiprocessing.start_processes(f)", "concurrent.futures.ProcessPoolExecutor()", "ray.init()",
    ],
)  # fmt: skip
def test_s17_a_planted_start_is_found(line: str) -> None:
    assert list(starts(line))
    assert not list(starts("subprocess.PIPE; starting.run(command); os.path.exists(x); subprocess.TimeoutExpired"))


def modules_of(path: list[str]) -> list[str]:
    return starting.surroundings()["PYTHONPATH"].split(os.pathsep)[: len(path)]


def test_s17_a_child_looks_for_modules_where_this_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, named, added = (tmp_path / name for name in ("here", "named", "added"))
    for folder in (here, named, added):
        folder.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["", str(here), str(added), *sys.path])
    for value in ("", os.pathsep, f"{os.pathsep}{named}", f"{named}{os.pathsep}"):
        monkeypatch.setenv("PYTHONPATH", value)
        found = modules_of(sys.path)
        assert str(here) not in found and "" not in found and str(added) in found
        assert (str(named) in found) == ("named" in value)
    # An entry is what it is here, wherever the child runs; one that is named stays.
    monkeypatch.setenv("PYTHONPATH", f"below{os.pathsep}{here}")
    assert modules_of(sys.path)[:2] == [str(here / "below"), str(here)]
    monkeypatch.setenv("PYTHONPATH", str(named))
    monkeypatch.setattr(sys, "path", sys.path[1:])
    here.rmdir()
    assert modules_of(sys.path)[0] == str(named) and str(added) in modules_of(sys.path)


def test_s17_the_directory_of_the_package_is_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SOURCE.parent)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "path", ["", *(path for path in sys.path if path != str(SOURCE.parent))])
    assert modules_of(sys.path)[0] == str(SOURCE.parent)


NAMES = """
msgspec numpy torch glassengine json sitecustomize usercustomize typing_extensions safetensors packaging typing re
ctypes pickle signal socket threading multiprocessing subprocess importlib runpy pkgutil random tempfile rich click yaml
onnx transformers ray base64 linecache
""".split()  # noqa: SIM905


@pytest.fixture
def planted(tmp_path: Path) -> Iterator[Path]:
    """A directory with modules that say that they ran, and two dumps."""
    folder = tmp_path / "planted"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(
            f"import os, sys\nwith open({str(tmp_path / 'ran')!r}, 'a') as file:\n"
            f"    file.write({name!r} + ' by ' + ' '.join(sys.orig_argv)[:500] + '\\n')\nos._exit(55)\n"
        )
    torch.save({"a": torch.ones(4)}, folder / "one.pt")
    torch.save({"a": torch.tensor([1.0, 1.0, 2.0, 1.0])}, folder / "two.pt")
    yield folder
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


PATHS = pytest.mark.parametrize("path", [None, "", ":{}", "{}:", ":"])
"""PYTHONPATH, with the place of the package; an empty entry is the working directory."""


def set_path(path: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if path is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", path.format(SOURCE.parent))


@PATHS
def test_s17_a_worker_imports_nothing_of_its_directory(
    path: str | None, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import base64

    monkeypatch.chdir(planted)
    set_path(path, monkeypatch)
    processes = Processes(base64.b64encode, 1)
    try:
        assert list(processes.run([b"abc"], attempts=1)) == [b"YWJj"]
    finally:
        processes.close()


def test_s17_what_is_planted_runs_where_python_looks_there(tmp_path: Path, planted: Path) -> None:
    done = subprocess.run([sys.executable, "-c", "import random"], cwd=planted, check=False)
    assert done.returncode == 55 and (tmp_path / "ran").read_text().startswith("random by ")
    (tmp_path / "ran").unlink()


def test_s17_a_call_of_the_mcp_server_imports_nothing_of_its_root(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mcp", reason="the extra mcp is not installed")
    from glassengine.cli.mcp_server import Tools

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f":{SOURCE.parent}:.")
    tools = Tools(Roots((planted,), run_code=False), tmp_path, 60)
    status, text = anyio.run(tools._run, ["compare", "one.pt", "two.pt"])
    assert status == 1 and "2" in text


@pytest.mark.parametrize(
    "flags", [["-m", "glassengine"], pytest.param(["-P", "-m", "glassengine"], marks=pytest.mark.slow)]
)
def test_s17_the_command_imports_nothing_of_its_directory(flags: list[str], planted: Path) -> None:
    """`python -m` itself looks there until ours is found; its own modules and this package cannot be helped."""
    if flags[0] == "-m":
        for name in ("importlib", "runpy", "pkgutil", "typing", "re", "threading", "glassengine"):
            (planted / f"{name}.py").unlink()
    command = [sys.executable, *flags, "compare", "one.pt", "two.pt", "-q"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    assert subprocess.run(command, cwd=planted, env=env, check=False, capture_output=True).returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--jobs", "2"], ["--jobs", "2", "--cluster", "auto"]])
def test_s17_judging_in_other_processes_imports_nothing_of_the_directory(
    flags: list[str], planted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--cluster" in flags:
        pytest.importorskip("ray")
    monkeypatch.chdir(planted)
    assert main(["compare", "one.pt", "two.pt", *flags]) == 1
    assert "each worker" not in capsys.readouterr().out


@pytest.mark.slow
def test_s17_a_check_in_other_processes_has_the_neighbors_of_a_factory_and_nothing_of_the_directory(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "layers.py").write_text("from glassengine.testing import models\nmade = models.llama\n")
    (own / "net.py").write_text("import layers\ndef net():\n    return layers.made(num_hidden_layers=1)\n")
    monkeypatch.chdir(planted)
    spec = f"{own / 'net.py'}:net"
    assert main(["check", spec, "--candidate", spec, "--steps", "1", "--jobs", "2", "-q"]) == 0


@pytest.mark.slow
def test_s17_the_ranks_of_an_engine_import_nothing_of_the_directory(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"backend": "eager", "max_seq_len": 32}
    glass.build(models.llama(num_hidden_layers=1), tmp_path / "two", tensor_parallel=2, **options)  # type: ignore[call-overload]
    monkeypatch.chdir(planted)
    monkeypatch.setenv("PYTHONPATH", f":{SOURCE.parent}")
    engine = glass.load(tmp_path / "two")
    assert len(engine.generate(input_ids=[[5, 17, 3]], max_new_tokens=2).token_ids[0]) == 2


@pytest.mark.slow
def test_s17_a_script_that_runs_again_has_its_neighbors_and_nothing_of_the_directory(
    planted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "numbers_of_mine.py").write_text("SEED = 3\n")
    (own / "script.py").write_text(
        "import torch\nimport numbers_of_mine\ntorch.manual_seed(numbers_of_mine.SEED)\n"
        "torch.nn.Linear(4, 4)(torch.randn(2, 4))\n"
    )
    monkeypatch.chdir(planted)
    assert main(["record", "--noise-floor", "-o", str(tmp_path / "run"), "--", str(own / "script.py")]) == 0
    assert list((tmp_path / "run").rglob("noise_floor*"))


@pytest.mark.slow
def test_s17_a_trial_of_a_snapshot_imports_nothing_of_the_directory(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Piece:
        ops = ()

    monkeypatch.chdir(planted)
    assert try_elsewhere(planted, "eager", Piece()) == (None, ""), "no snapshot"  # type: ignore[arg-type]


def test_s17_git_is_asked_by_itself(planted: Path) -> None:
    assert environment.git_revision(planted) is None
    with pytest.raises(GlassError):
        Roots((planted,), run_code=False).path("/etc/passwd")
