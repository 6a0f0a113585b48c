"""The command line as a whole: help, flags, how a command ends, and where things are printed."""

from __future__ import annotations

import importlib
import io
import json
import logging
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import pytest
import typer

from glassengine.cli import documents, options
from glassengine.cli import main as cli
from glassengine.cli.shared import AdaptedCheckpoint
from glassengine.errors import BackendError, CorruptError, GlassError, IncomparableError, UnknownNameError, UsageError

Plant = Callable[[Callable[..., int]], None]


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Return a function that makes its argument the command `glass planted`."""

    def install(function: Callable[..., int]) -> None:
        module = types.ModuleType("glassengine.cli.planted")
        module.command = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "glassengine.cli.planted", module)
        monkeypatch.setitem(cli.COMMANDS, "planted", "A command of the tests.")

    return install


def glass(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, its output piped."""
    return subprocess.run(
        [sys.executable, "-m", "glassengine.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, **variables},
    )


def raising(error: BaseException) -> Callable[..., int]:
    def command() -> int:
        raise error

    return command


def test_help_lists_the_table_and_imports_no_command() -> None:
    code = (
        "import sys; from glassengine.cli.main import main, COMMANDS; status = main(['--help']); "
        "files = [c.replace('-', '_') for c in COMMANDS]; "
        "print(status, [m for m in ('torch', 'numpy', 'pydantic', *(f'glassengine.cli.{c}' for c in files)) "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    for name in cli.COMMANDS:
        assert f" {name} " in done.stdout
    assert "Exit status: 0 ok" in done.stdout


def test_help_is_fast() -> None:
    # Time is made of imports. Their number is the same on a busy machine: 247 took 0.11 s of a processor (median of 5).
    code = "import sys; from glassengine.cli.main import main; main(['--help']); print(len(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert int(done.stdout.splitlines()[-1]) < 290


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_table_equals_the_docstrings(name: str) -> None:
    module = importlib.import_module(f"glassengine.cli.{name.replace('-', '_')}")
    assert (module.command.__doc__ or "").splitlines()[0] == cli.COMMANDS[name]


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_help_of_every_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"glass {name}" in shown
    for flag in ("--quiet", "--verbose", "--no-color", "--no-progress", "--json"):
        assert flag in shown


def test_every_command_file_is_in_the_table(root: Path) -> None:
    shared = {
        "__init__",
        "__main__",
        "main",
        "answers",
        "bars",
        "documents",
        "options",
        "errors",
        "foreign",
        "help",
        "invariance",
        "mcp_server",
        "roots",
        "shared",
    }
    files = {path.stem for path in (root / "src/glassengine/cli").glob("*.py")}
    assert files - shared == {name.replace("-", "_") for name in cli.COMMANDS}


def test_no_arguments_shows_three_commands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  glass ")]
    assert len(lines) == 3 and {words[1] for words in lines} <= cli.COMMANDS.keys()


@pytest.mark.parametrize(
    ("command", "former", "name"),
    [
        ("record", "--output-dir", "output"),
        ("record", "--steps", "step"),
        ("build", "--output-dir", "output"),
        ("show", "--export", "output"),
    ],
)
def test_former_names_of_options_work_and_are_not_listed(command: str, former: str, name: str) -> None:
    loaded = cli.load_command(command)
    with loaded.make_context(command, ["x", former, "3"]) as context:
        assert context.params[name] == "3"
    assert former not in {flag for option in loaded.params for flag in option.opts}


def test_a_flag_that_several_commands_have_takes_the_same(root: Path) -> None:
    """`-o` is where the result goes; `--steps` is a number, `--step` selects."""
    for command in cli.COMMANDS:
        for option in cli.load_command(command).params:
            assert ("-o" in option.opts) == ("--output" in option.opts), command
            if "--steps" in option.opts:
                assert option.metavar.startswith("N"), command


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    import glassengine

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"glass {glassengine.__version__}\n"


def test_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["docter"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "'docter'" in shown.err and "'doctor'" in shown.err and "glass --help" in shown.err


def test_usage_mistakes_exit_2_and_name_the_help(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    def command(model: str, count: Annotated[int, typer.Option()] = 1) -> int:
        return 0

    plant(command)
    for arguments in (["planted"], ["planted", "m", "--count", "x"], ["planted", "m", "--flag"], ["planted", "m", "n"]):
        assert cli.main(arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith("error: ") and "hint: glass planted --help" in shown.err
    assert cli.main(["--flag"]) == 2
    assert "hint: glass --help" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 1, 4])
def test_status_of_a_command_is_the_exit_status(plant: Plant, status: int) -> None:
    plant(lambda: status)
    assert cli.main(["planted"]) == status


def test_typer_exit_is_respected(plant: Plant) -> None:
    plant(raising(typer.Exit(3)))
    assert cli.main(["planted"]) == 3


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (GlassError("it went wrong", got="this"), 1),
        (UsageError("no such path", hint="glass sites MODEL"), 2),
        (UnknownNameError("site", "model.layer", ["model.layers.0"]), 2),
        (BackendError("the back-end failed"), 3),
        (IncomparableError("nothing to compare"), 4),
        (CorruptError("the index is damaged"), 4),
    ],
)
def test_errors_end_without_traceback(
    plant: Plant, capsys: pytest.CaptureFixture[str], error: GlassError, status: int
) -> None:
    plant(raising(error))
    assert cli.main(["planted"]) == status
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"error: {error}\n"


def test_markup_in_an_error_is_text(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    plant(raising(UsageError("no site model:out[0][bold]x[/bold] :smile:")))
    assert cli.main(["planted"]) == 2
    assert "model:out[0][bold]x[/bold] :smile:" in capsys.readouterr().err


def test_verbose_shows_the_traceback(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    plant(raising(BackendError("the back-end failed")))
    for arguments in (["-v", "planted"], ["planted", "-v"]):
        assert cli.main(arguments) == 3
        assert "Traceback" in capsys.readouterr().err


def test_bug_asks_for_a_report(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    plant(raising(ZeroDivisionError("oops")))
    assert cli.main(["planted"]) == 70
    shown = capsys.readouterr().err
    assert "bug in Glass Engine, please report" in shown and "ZeroDivisionError: oops" in shown and "-v" in shown
    assert "Traceback" not in shown
    assert cli.main(["planted", "-v"]) == 70
    assert "Traceback" in capsys.readouterr().err


def test_a_package_that_cannot_be_imported_is_no_bug(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    def lazily() -> int:
        try:
            raise ModuleNotFoundError("No module named 'torchvision.ops'", name="torchvision.ops")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("Could not import module 'PreTrainedModel'.") from error

    plant(lazily)
    assert cli.main(["planted"]) == 2
    shown = capsys.readouterr().err
    assert "cannot be imported: torchvision" in shown and "torchvision.ops" in shown and "pip check" in shown
    plant(raising(ImportError("cannot import name 'x'", name="glassengine.program")))
    assert cli.main(["planted"]) == 70


def test_file_that_cannot_be_read_is_no_bug(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    plant(raising(PermissionError(13, "Permission denied", "some/file")))
    assert cli.main(["planted"]) == 2
    shown = capsys.readouterr().err
    assert "cannot access 'some/file'" in shown and "Permission denied" in shown


def test_s11_numbers_that_no_machine_has(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["build", str(root / "examples/tiny-llama"), "--dry-run", "--max-batch-size"]
    for digits in (20, 310, 4300):
        assert cli.main([*line, "9" * digits]) == 2
        said = capsys.readouterr().err
        assert "--max-batch-size is too large" in said and len(said) < 400
    assert cli.main([*line, "9" * 12]) == 2
    assert "no cache can be so large" in capsys.readouterr().err


def test_interrupt(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    plant(raising(KeyboardInterrupt()))
    assert cli.main(["planted"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_reader_that_goes_away_is_no_error() -> None:
    code = (
        "import sys, types\n"
        "from glassengine.cli import main as cli\n"
        "module = types.ModuleType('planted')\n"
        "def command() -> int:\n"
        "    for _ in range(100000): print('a line of the result')\n"
        "    return 0\n"
        "module.command = command\n"
        "sys.modules['glassengine.cli.planted'] = module\n"
        "cli.COMMANDS['planted'] = 'x'\n"
        "sys.exit(cli.main(['planted']))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 141


def test_command_must_not_redefine_a_global_flag() -> None:
    def command(quiet: bool = False) -> int:
        return 0

    with pytest.raises(TypeError, match="quiet"):
        cli.with_global_flags(command)


def test_log_goes_to_stderr_by_level(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        logger = logging.getLogger("glassengine.planted")
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logger.log(level, "a %s message", logging.getLevelName(level))
        options.out.print("result [0]")
        return 0

    plant(command)
    expected = {"-q": 1, "": 2, "-v": 3, "-vv": 4}
    for flag, count in expected.items():
        for arguments in ([flag, "planted"], ["planted", flag]) if flag else (["planted"],):
            assert cli.main(arguments) == 0
            shown = capsys.readouterr()
            assert shown.out == "result [0]\n"
            assert len(shown.err.splitlines()) == count, (arguments, shown.err)


def test_long_result_lines_are_not_folded(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    line = "model.layers.0." * 40

    def command() -> int:
        options.out.print(line)
        return 0

    plant(command)
    assert cli.main(["planted"]) == 0
    assert capsys.readouterr().out == line + "\n"


def test_colors_follow_the_surroundings() -> None:
    escape = "\x1b["
    assert escape not in glass("--bad").stderr, "a pipe gets no colors"
    assert escape in glass("--bad", FORCE_COLOR="1").stderr
    assert escape + "31" not in glass("--bad", FORCE_COLOR="1", NO_COLOR="1").stderr
    assert ";31m" in glass("doctor", "--nope", FORCE_COLOR="1", TERM="xterm-256color").stderr
    assert ";31m" not in glass("--no-color", "doctor", "--nope", FORCE_COLOR="1", TERM="xterm-256color").stderr
    assert escape not in glass("--bad", FORCE_COLOR="", TERM="dumb").stderr


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _bar_shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, flags: list[str]) -> bool:
    options.reset()
    options.configure(quiet="-q" in flags, no_progress="--no-progress" in flags)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(options.err, "_force_terminal", stream.isatty(), raising=False)
    with options.progress("working", total=2) as advance:
        advance(2)
    return stream.getvalue() != ""


def test_progress_is_for_a_person_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    assert _bar_shown(monkeypatch, _Terminal(), [])
    assert not _bar_shown(monkeypatch, io.StringIO(), [])
    assert not _bar_shown(monkeypatch, _Terminal(), ["-q"])
    assert not _bar_shown(monkeypatch, _Terminal(), ["--no-progress"])
    monkeypatch.setenv("TERM", "dumb")
    assert not _bar_shown(monkeypatch, _Terminal(), [])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("CI", "true")
    assert not _bar_shown(monkeypatch, _Terminal(), [])
    options.reset()


def test_json_is_one_strict_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = {"schema_version": 1, "site": "modèle.0"}
    documents.write_json(document, "-")
    assert json.loads(capsys.readouterr().out) == document
    documents.write_json(document, str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_text(encoding="utf-8")) == document
    documents.write_json({"x": float("nan"), "y": [float("-inf")]}, "-")
    written = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert written == {"schema_version": 1, "x": "nan", "y": ["-inf"]}


PRINTING = """
import torch

class Printing(torch.nn.Module):
    def forward(self, x):
        print('from the model')
        return x.tanh()

def given():
    return {'x': torch.ones(2)}
"""


def test_what_a_model_prints_stands_beside_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "printing.py").write_text(PRINTING)
    model, inputs = f"{tmp_path / 'printing.py'}:Printing", ["--inputs", f"{tmp_path / 'printing.py'}:given"]
    status = cli.main(["sites", model, *inputs, "--json"])
    out, err = capsys.readouterr()
    assert status == 0 and json.loads(out)["schema_version"] == 1 and "from the model" in err, (out, err)
    status = cli.main(["check", model, model, *inputs])
    out, err = capsys.readouterr()
    assert status == 0 and out.startswith("ok: ") and "from the model" in err, (out, err)


def test_s11_s14_json_of_any_text_is_written_and_shown_safely(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        "schema_version": 1,
        "half": "\ud800",
        "turned": "\u202eabc",
        "c1": "\x9b2J",
        "plain": "é 漢 \U0001f600",
    }
    documents.write_json(document, "-")
    shown = capsys.readouterr().out
    assert json.loads(shown) == document
    assert "é 漢 \U0001f600" in shown and not set("\ud800\u202e\x9b") & set(shown)
    documents.write_json(document, str(tmp_path / "out.json"))
    assert json.loads((tmp_path / "out.json").read_bytes()) == document


def test_s10_a_document_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "real.json", tmp_path / "link.json"
    before = '{\n  "schema_version": 1\n}\n'
    target.write_text(before)
    link.symlink_to(target)

    def full(_: object) -> Iterator[str]:
        yield "{"
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="link"):
        patch.setattr(documents, "json_pieces", full)
        documents.write_json({"x": 1}, str(link))
    assert target.read_text() == before and sorted(tmp_path.iterdir()) == [link, target]
    documents.write_json({"x": 1}, str(link))
    assert json.loads(target.read_bytes())["x"] == 1 and link.is_symlink()
    with pytest.raises(UsageError, match="nowhere does not exist"):
        documents.write_json({"x": 1}, str(tmp_path / "nowhere" / "x.json"))
    documents.write_json({"x": 1}, "/dev/null")


def test_installed_command_and_module_are_the_same() -> None:
    script = Path(sys.executable).with_name("glass")
    done = subprocess.run([str(script), "--version"], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == glass("--version").stdout


def test_an_interrupt_while_modules_are_imported_shows_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupt:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "glassengine.cli.main":
                raise KeyboardInterrupt

    from glassengine.cli import __main__ as entry

    monkeypatch.delitem(sys.modules, "glassengine.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    with pytest.raises(SystemExit) as stopped:
        entry.run()
    assert stopped.value.code == 130


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["build", "missing.onnx", "--json"], 2),
        (["sites", "missing.onnx", "--json"], 2),
        (["run", "missing", "--json"], 2),
        (["record", "--json"], 2),
        (["record", "--json", "--", "missing.py"], 2),
        (["show", "missing", "--json"], 2),
        (["compare", "missing", "missing-too", "--json", "-"], 2),
        (["compare", "missing", "missing-too", "--json=-"], 2),
        (["check", "missing.onnx", "--json", "-"], 2),
        (["check", "--no-such-flag", "--json", "-"], 2),
        (["check", "--json", "missing.onnx"], 2),
        (["--json", "check-training", "missing.onnx"], 2),
        (["upload", "missing", "--json"], 2),
        (["profile", "missing", "--json"], 2),
        (["snapshot", "show", "missing", "--json"], 2),
        (["replay", "missing", "--json", "-"], 2),
        (["doctor", "--nothing", "--json"], 2),
    ],
)
def test_f41_errors_are_documents_too(command: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command) == status
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert (document["ok"], document["exit_status"]) == (False, status)
    assert document["error"]["what"] in shown.err


def test_f41_the_document_of_an_error_goes_where_it_was_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", "missing", "missing-too", "--json", str(tmp_path / "x.json")]) == 2
    assert json.loads((tmp_path / "x.json").read_text())["error"]["what"]
    assert capsys.readouterr().out == ""
    assert cli.main(["compare", "missing", "missing-too", "--json", str(tmp_path / "no" / "x.json")]) == 2
    assert cli.main(["record", "--", "missing.py", "--json"]) == 2  # the script's own
    assert capsys.readouterr().out == ""
    assert cli.main(["show", "check", "--json"]) == 2  # a recording of that name
    assert json.loads(capsys.readouterr().out)["exit_status"] == 2


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (ValueError("x"), 70)])
def test_f41_interruptions_and_bugs_are_documents(
    plant: Plant, capsys: pytest.CaptureFixture[str], error: BaseException, status: int
) -> None:
    plant(raising(error))
    assert cli.main(["planted", "--json"]) == status
    assert json.loads(capsys.readouterr().out)["exit_status"] == status


def test_f41_the_package_itself_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "glassengine", "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("glass ")


def test_exit_handlers_run_at_the_end_of_a_command(tmp_path: Path) -> None:
    # A command leaves without taking its memory apart.
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, sys, threading, time\n"
        "def late():\n    time.sleep(0.3)\n    print('thread')\n"
        "atexit.register(lambda: print('atexit'))\n"
        "threading.Thread(target=late).start()\n"
    )
    command = [sys.executable, "-m", "glassengine", "sites", "--nothing"]
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=600, check=False
    )
    assert (done.returncode, done.stdout) == (2, "thread\natexit\n"), done.stderr


@pytest.mark.parametrize(
    ("words", "spelled", "destination"),
    [
        ("check M", "check M", None),
        ("check M --json", "check M --json=-", "-"),
        ("check --json M", "check --json=- M", "-"),
        ("--json check M", "--json=- check M", "-"),
        ("check M --json --steps 1", "check M --json=- --steps 1", "-"),
        ("check M --json -", "check M --json=-", "-"),
        ("check --json out.json M", "check --json=out.json M", "out.json"),
        ("check M --json=anything", "check M --json=anything", "anything"),
        ("check M --json /dev/null", "check M --json=/dev/null", "/dev/null"),
        ("check M --json a.json --json b.json", "check M --json=a.json --json=b.json", "b.json"),
        ("record -- script.py --json", "record -- script.py --json", None),
        ("record --json -- script.py --json x.json", "record --json=- -- script.py --json x.json", "-"),
    ],
)
def test_json_has_a_file_or_none_and_takes_no_argument_of_the_command(
    words: str, spelled: str, destination: str | None
) -> None:
    found = documents.spelled_out(words.split())
    assert found == spelled.split() and documents.destination_of(found) == destination


def test_json_is_written_to_stdout_or_to_a_file_and_the_screen_stays(
    plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(name: str) -> int:
        documents.answer(lambda: {"name": name}, lambda: options.out.print(f"the name is {name}"))
        return 0

    plant(command)
    document, screen = {"schema_version": 1, "name": "x"}, "the name is x\n"
    assert cli.main(["planted", "--json", "x"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    for flags in (["--json", str(tmp_path / "a.json")], [f"--json={tmp_path / 'plain'}"]):
        assert cli.main(["planted", "x", *flags]) == 0
        assert capsys.readouterr().out == screen
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads((tmp_path / "plain").read_text()) == document
    # Its own document is replaced, also by that of an error.
    assert cli.main(["planted", "--json", str(tmp_path / "a.json"), "--nothing"]) == 2
    assert json.loads((tmp_path / "a.json").read_text())["exit_status"] == 2


def test_json_never_takes_the_place_of_what_somebody_else_wrote(
    plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def command(dumps: list[str]) -> int:
        ran.append(dumps)
        return 0

    plant(command)
    dump = tmp_path / "dump.json"
    dump.write_text('{"module_path": "model"}')
    # Swallowed: the only dump is taken for the file, and the error for that is written nowhere.
    for arguments in (["--json", str(dump)], ["--json", str(dump), "another"], [f"--json={dump}", "--nothing"]):
        assert cli.main(["planted", *arguments]) == 2
        shown = capsys.readouterr()
        assert "--json" in shown.err and "--json=FILE" in shown.err and shown.out == ""
        assert dump.read_text() == '{"module_path": "model"}' and not ran
    assert cli.main(["planted", "--json", str(tmp_path / "new.txt")]) == 0, "an argument of the command"
    assert ran == [[str(tmp_path / "new.txt")]]


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_the_help_of_all_commands_is_written_alike(command: str) -> None:
    shown = [parameter for parameter in cli.load_command(command).params if not getattr(parameter, "hidden", False)]
    assert [parameter.name for parameter in shown if not parameter.help.endswith(".")] == []
    # A word in place of a value: what to give, in capitals, or the values themselves.
    assert [parameter.name for parameter in shown if parameter.bare_type is str and not parameter.metavar] == []
    assert not any(word in parameter.help for parameter in shown for word in ("infinity", "Largest", "of yours"))


COMMAND_LINES = {
    "build": "model",
    "sites": "model",
    "run": "engine",
    "record": "-o out model",
    "show": "recording",
    "compare": "one other",
    "check": "model",
    "check-prompt": "one other",
    "check-rollout": "model --rollout file",
    "check-training": "model --candidate other",
    "profile": "trace",
    "snapshot": "show snapshot",
    "explain": "result",
    "export": "result --to perfetto -o out.json",
    "mcp": "root",
    "replay": "snapshot",
    "report": "result.json -o report",
    "upload": "recording",
    "watch": "one.py other.py",
    "schema": "check",
    "skill": "",
    "doctor": "",
}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_document_that_cannot_be_written_is_refused_before_anything_is_done(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = [command, *COMMAND_LINES[command].split()]
    for place, why in ((tmp_path / "none/x.json", f"the directory {tmp_path / 'none'} does not exist"), (tmp_path, "")):
        assert cli.main([*line, f"--json={place}"]) == 2
        shown = capsys.readouterr()
        # Nothing that the line names exists, and nothing was looked for.
        assert f"the JSON document cannot be written\n      got: {place}: {why}" in shown.err and shown.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_group_of_options_is_one_parameter(plant: Plant, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[AdaptedCheckpoint] = []

    def command(model: str, *, checkpoint: AdaptedCheckpoint) -> int:
        seen.append(checkpoint)
        return 0

    plant(command)
    assert cli.main(["planted", "m", "--adapter", "d", "--trust-remote-code"]) == 0
    assert cli.main(["planted", "m"]) == 0
    assert seen == [AdaptedCheckpoint(adapter="d", trust_remote_code=True), AdaptedCheckpoint()]
    assert cli.main(["planted", "--help"]) == 0
    assert "--attn-implementation" in capsys.readouterr().out
