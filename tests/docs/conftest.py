"""Runs the fenced blocks of a guide page in order, in one directory, and compares what they print with the page.

    ```console            `$ command` lines, each followed by what it prints; `glass` runs in this process
    ```python             one namespace for the whole page; what it prints is in the ```text block after <!-- output -->
    <!-- file: NAME -->   the next block is the content of a file
    <!-- original -->     the next block is quoted from the document that the page translates: never run
    <!-- check            Python that runs in the namespace of the page and shows nothing: what a bullet promises

Any other block is a mistake, so nothing on a page goes unchecked. In expected output, `...` stands for anything.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from glassengine import starting
from glassengine.cli.main import main
from glassengine.executable.snapshot import policy
from tests import children

FENCE = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$|^<!-- check\n(?P<check>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
# What torch says of the machine when its build has CUDA and the machine has not, and what a busy machine makes us say.
# A copy of a process that has loaded Triton tells of leaks at its end (nanobind).
OF_THE_MACHINE = re.compile(
    r"^(?:W\d{4} .*\] No CUDA runtime is found, .*|still .*, \d+ s \.\.\.|nanobind: .*| - (?:leaked |\.\.\. skipped).*"
    r"|See https://nanobind\S*)(?:\n|\Z)",
    re.MULTILINE,
)
# A script alone, with its output in files, or in front of a pipe.
SCRIPT = re.compile(r"(?:\w+=\S* )*python (?P<script>[^|>&;]*?)(?P<files>(?: 2?> ?\S+)*)(?: \| (?P<rest>[^&;]*))?$")
NUMBER = re.compile(r"(?<![\w./])-?\d[\d,.]*(?:e[+-]?\d+)?(?!\w)%?")


@dataclass(frozen=True)
class Block:
    """One fenced block: where its text is in the page, and what is to be done with it."""

    mark: str
    language: str
    text: str
    start: int
    line: int


def blocks_of(page: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(page):
        part = "text" if match["check"] is None else "check"
        start = match.start(part)
        language = match["language"] if part == "text" else "python"
        found.append(Block(match["mark"] or "", language, match[part], start, page.count("\n", 0, start) + 1))
    return found


def scrubbed(line: str) -> str:
    """Without figures, which differ between processors, and without the padding of tables."""
    return re.sub(r"([\[(]) ", r"\1", " ".join(NUMBER.sub("#", line).split()))


def mismatch(shown: str, printed: str) -> str | None:
    """Return the first line of the page that was not printed where it should be, or None."""
    # Rules of tables are as wide as the figures.
    wanted = [scrubbed(line) for line in shown.splitlines() if line.strip(" ─")]
    found = [scrubbed(line) for line in printed.splitlines() if line.strip(" ─")]
    pattern = ""
    for line in wanted:
        pattern += r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
        if not re.match(pattern, "".join(f"{text}\n" for text in found)):
            return line
    return None if re.fullmatch(pattern, "".join(f"{text}\n" for text in found)) else "(the end of the output)"


class Runner:
    """Runs blocks one after the other; each command's output is checked, or, to update the page, kept."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # The reader's commands are processes of their own, to which no Python block has set a variable.
        self.environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        self.environ.pop("GLASS_CACHE_MAX_BYTES", None)  # with which the tests turn the persistent cache off
        self.namespace: dict[str, Any] = {"__name__": "guide"}
        self.printed = ""
        self.status = 0

    def command(self, text: str) -> str:
        """Run one command line and return what it printed to either stream."""
        words = shlex.split(text.replace("\\\n", " "))
        variables = {}
        while words and re.match(r"\w+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words == ["echo", "$?"]:
            status, self.status = self.status, 0
            return f"{status}\n"
        if words[0] != "glass":
            # A script of the page is an example of what it does, not of its start.
            if words[0] == "python" and (parts := SCRIPT.match(text.replace("\\\n", " "))):
                return self.script(shlex.split(parts["script"]), parts["files"], parts["rest"], variables)
            done = subprocess.run(
                ["bash", "-c", text], capture_output=True, text=True, check=False, env=self.environ | variables
            )
            self.status = done.returncode
            return done.stdout + OF_THE_MACHINE.sub("", done.stderr)
        stream = io.StringIO()
        # The reader's command is a process of its own, to which no Python block has said how tensors are printed.
        torch.set_printoptions(profile="default")
        with pytest.MonkeyPatch.context() as patch, redirected(stream):
            for name in os.environ.keys() - self.environ.keys():
                patch.delenv(name)
            for name, value in (self.environ | variables).items():
                patch.setenv(name, value)
            self.status = main([found for word in words[1:] for found in expanded(word)])
        return OF_THE_MACHINE.sub("", stream.getvalue())

    def script(self, words: list[str], files: str, rest: str | None, variables: dict[str, str]) -> str:
        """Run `python WORDS > FILES`, or `python WORDS | REST`, as a shell does."""
        environ = self.environ | variables
        done = children.run([sys.executable, *words], imports=children.COMPILING, env=environ)
        self.status, out, error = done.returncode, done.stdout, OF_THE_MACHINE.sub("", done.stderr)
        for number, name in re.findall(r"(2?)> ?(\S+)", files):
            Path(name).write_text(error if number else out)
            out, error = (out, "") if number else ("", error)
        if rest is not None:
            end = subprocess.run(
                ["bash", "-c", rest], input=out, capture_output=True, text=True, check=False, env=environ
            )
            self.status, out, error = end.returncode, end.stdout, error + end.stderr
        return out + error

    def python(self, block: Block, page: str) -> None:
        stream = io.StringIO()
        # Tracebacks give the line of the page.
        code = compile("\n" * block.line + block.text, page, "exec")
        with redirected(stream):
            exec(code, self.namespace)
        self.printed = stream.getvalue()


def expanded(word: str) -> list[str]:
    """What a shell makes of a word of a command line."""
    return sorted(map(str, Path().glob(word))) or [word] if "*" in word and not word.startswith("/") else [word]


@contextlib.contextmanager
def redirected(stream: io.StringIO) -> Iterator[None]:
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield


def commands_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield (command line, output below it) of a console block."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines(keepends=True)
        end = next(i for i, line in enumerate(lines) if not line.endswith("\\\n")) + 1
        yield "".join(lines[:end]).rstrip("\n"), "".join(lines[end:])


def run_page(path: Path, directory: Path, update: bool = False) -> list[str]:
    """Run a page in `directory`; return every mismatch as `page:line: ...`. With `update`, rewrite its outputs."""
    page = path.read_text(encoding="utf-8")
    runner, problems, pieces, end = Runner(directory), [], [], 0

    def check(block: Block, what: str, shown: str, printed: str) -> None:
        nonlocal end
        # A status is no figure that may differ between machines.
        exact = what == "echo $?\n"
        line = mismatch(shown, printed) if not exact or shown == printed else shown.rstrip()
        if line is not None and update:
            start = page.index(what + shown, max(end, block.start))
            pieces.extend([page[end:start], what + printed])
            end = start + len(what + shown)
        elif line is not None:
            problems.append(f"{path.name}:{block.line}: {what.strip()}: {line!r} is not what is printed:\n{printed}")

    for block in blocks_of(page):
        if block.mark == "original":
            continue
        if block.mark.startswith("file: "):
            (directory / block.mark.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
        elif block.mark == "output" and block.language == "text":
            check(block, "", block.text, runner.printed)
        elif block.language == "python" and not block.mark:
            runner.python(block, path.name)
        elif block.language == "console" and not block.mark:
            commands = list(commands_of(block.text))
            for i, (command, shown) in enumerate(commands):
                printed = runner.command(command)
                check(block, command + "\n", shown, printed)
                asked = i + 1 < len(commands) and commands[i + 1][0] == "echo $?"
                if runner.status and not asked:
                    problems.append(f"{path.name}:{block.line}: {command}: exit status {runner.status}:\n{printed}")
        else:
            problems.append(f"{path.name}:{block.line}: this block is neither run nor marked as original")
    if update and not problems:
        path.write_text("".join([*pieces, page[end:]]), encoding="utf-8")
    return problems


@pytest.fixture(autouse=True)
def snapshot_callback() -> Iterator[None]:
    """Leave no callback of a page to the tests that follow."""
    before = policy._registered
    yield
    policy._registered = before


@pytest.fixture
def run_guide(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    exporting_once: Callable[[], contextlib.AbstractContextManager[None]],
) -> Iterator[Callable[[Path], list[str]]]:
    """Yield a function that runs a page in an empty directory with the examples of the repository."""
    (tmp_path / "examples").symlink_to(root / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(starting, "subprocess", children.started_as_copies(children.MODELS))
    for name in ("DEBUG_ARTIFACTS_DIR", "TRTLLM_ADD_OUTPUT", "CUDA_LAUNCH_BLOCKING"):
        monkeypatch.delenv(name, raising=False)
    update = bool(request.config.getoption("--update-guides"))
    before = dict(os.environ)
    with exporting_once():
        yield lambda page: run_page(page, tmp_path, update=update and page.is_relative_to(root))
    torch.set_printoptions(profile="default")
    os.environ.clear()
    os.environ.update(before)
