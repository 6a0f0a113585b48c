"""Makes inputs up and has them read in one process, thousands in a row: what is common to them is done once.

Input `n` of a kind follows from the seed, the kind and `n` alone. A child works through a range of numbers and leaves
the status of each in memory that it shares with its parent, which watches the clock: what ends the child is known, and
the next child goes on behind it.
"""

from __future__ import annotations

import functools
import gc
import json
import mmap
import os
import random
import select
import signal
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edits import Maker
from layout import Input, Template, remove, silent

_HEAD = struct.Struct("<q")
_LOST = 255
"""In the place of a status: the process died of it."""


def given(seed: int, kind: Any, name: str, folder: Path, files: list[str], number: int) -> Input:
    """Return an input by its number."""
    chance = random.Random(f"{seed}/{name}/{number}")
    line = chance.randrange(len(kind.lines))
    return Input(name, line, Maker(chance).edits(folder, files, places=kind.places))


def streamed(task: dict[str, Any], kind: Any, worker: Any) -> Iterator[dict[str, Any]]:
    """Run a range of inputs, yield what is found, and at last {"exits", "seconds", "cpu"}.

    Args:
        task: {"kind", "folder" of the campaign, "seed", "first", "count"}.
        kind: The kind.
        worker: The module that runs one input and limits a child.
    """
    count = task["count"]
    control = mmap.mmap(-1, _HEAD.size + count)
    began, cpu, position = time.monotonic(), 0.0, 0
    while position < count:
        _HEAD.pack_into(control, 0, position)
        receive, send = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receive)
            _child(task, kind, worker, control, position, os.fdopen(send, "w"))
        os.close(send)
        with os.fdopen(receive, "rb", buffering=0) as pipe:
            found, interrupted = _watched(child, pipe, control, worker)
        _, how, used = os.wait4(child, 0)
        cpu += used.ru_utime + used.ru_stime
        (position,) = _HEAD.unpack_from(control)
        if found is None and position < count:
            problem = f"left with {os.WEXITSTATUS(how)}"
            if os.WIFSIGNALED(how):
                problem = f"a crash: signal {os.WTERMSIG(how)}"
            if interrupted:
                problem = "a hang: Ctrl-C did not end it"
            found = {"number": task["first"] + position, "problem": problem}
            control[_HEAD.size + position] = _LOST
        if found is not None:
            yield found
            position += 1
    exits = Counter(control[_HEAD.size :])
    names = {str(byte - 1 if byte != _LOST else -1): number for byte, number in exits.items() if byte}
    control.close()
    yield {"exits": names, "seconds": time.monotonic() - began, "cpu": cpu}


def _watched(child: int, pipe: Any, control: mmap.mmap, worker: Any) -> tuple[dict[str, Any] | None, bool]:
    """Wait for a child to end; return what it found, and whether it had to be interrupted."""
    pending = b""
    position, interrupted = -1, False
    patience = worker.Patience(child)
    while True:
        ready, _, _ = select.select([pipe], [], [], worker.CTRL_C_SECONDS if interrupted else worker.MAX_SECONDS / 20)
        if ready:
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                return (json.loads(pending) if pending.endswith(b"\n") else None), interrupted
            pending += data
            continue
        (now,) = _HEAD.unpack_from(control)
        if interrupted:
            os.kill(child, signal.SIGKILL)
            return None, True
        if now != position:
            position, patience = now, worker.Patience(child)
        elif patience.lost():
            interrupted = True
            os.kill(child, signal.SIGINT)


def _child(task: dict[str, Any], kind: Any, worker: Any, control: mmap.mmap, first: int, pipe: Any) -> None:
    try:
        _work(task, kind, worker, control, first, pipe)
    except BaseException as error:  # a mistake of the fuzzer itself
        import traceback

        position = _HEAD.unpack_from(control)[0]
        problem = f"a bug: of the fuzzer, {error!r}\n{traceback.format_exc()}"
        pipe.write(json.dumps({"number": task["first"] + position, "problem": problem}) + "\n")
    pipe.flush()
    os._exit(0)


def _work(task: dict[str, Any], kind: Any, worker: Any, control: mmap.mmap, first: int, pipe: Any) -> None:
    root = Path(task["folder"])
    shared, folder = root / "shared", root / "kinds" / task["kind"]
    template, files = Template(folder), kind.files(folder)
    watch, capture = worker.limited()
    _build_once()
    around = root / f"case-{os.getpid()}"
    if around.exists():
        remove(around)

    def run(made: Input) -> dict[str, Any]:
        around.mkdir()
        inside = template.write(around, made.edits)
        words = [word.format(here=inside, shared=shared) for word in kind.lines[made.line].split()]
        answer: dict[str, Any] = {"status": -1, "problem": "", "output": ""}
        worker.run({"folder": str(inside), "line": words, "code": kind.code}, shared, watch, answer, capture)
        return answer

    @functools.cache
    def unchanged(line: int) -> str:
        around.rename(aside := root / "case-aside")
        answer = run(Input(task["kind"], line, []))
        remove(around)
        aside.rename(around)
        return str(answer["output"])

    for line in range(len(kind.lines)) if kind.proven else ():
        around.mkdir()
        unchanged(line)
        remove(around)
    gc.freeze()
    for position in range(first, task["count"]):
        _HEAD.pack_into(control, 0, position)
        number = task["first"] + position
        made = given(task["seed"], kind, task["kind"], folder, files, number)
        answer = run(made)
        if not answer["problem"] and answer["status"] == 0:
            expected = functools.partial(unchanged, made.line)
            answer["problem"] = silent(kind, made, around / "inside", answer["output"], expected)
        os.chdir(root)
        remove(around)
        control[_HEAD.size + position] = min(max(answer["status"], -1), 200) + 1 if answer["status"] >= 0 else _LOST
        if answer["status"] == 130 and not answer["problem"]:
            answer["problem"] = f"slow: more than {worker.MAX_SECONDS:g} s; Ctrl-C ended it\n{answer.get('where', '')}"
        if answer["problem"]:
            pipe.write(json.dumps({"number": number, "problem": answer["problem"]}) + "\n")
            return
    _HEAD.pack_into(control, 0, task["count"])


def _build_once() -> None:
    """The parser of the command line is built once for all inputs: it holds nothing of one."""
    from glassengine.cli import main

    main._build = functools.cache(main._build)
    main.load_command = functools.cache(main.load_command)
