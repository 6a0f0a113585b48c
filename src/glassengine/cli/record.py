"""`glass record`: run a model on given inputs, or a script, and record every tensor."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from rich.text import Text

import glassengine as glass
from glassengine import asked, commands, environment
from glassengine.cli.documents import answer
from glassengine.cli.foreign import renamed
from glassengine.cli.options import err, out, progress, settings
from glassengine.cli.shared import AdaptedCheckpoint, Dtype, Library, ModuleInputs, Overwrite, Python
from glassengine.environment import owns_process
from glassengine.errors import IncomparableError, UnknownNameError, UsageError
from glassengine.reading.files import open_regular
from glassengine.stores.places import RemotePath, place
from glassengine.writing import aside

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?(\.exe)?")
_ALONE = re.compile(r"-[bBdEiIOPqsSuvx]+")  # flags of Python without a value
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SWITCHES = {"yes": True, "no": False, "true": True, "false": False, "1": True, "0": False}
_KINDS: dict[str, str] = {
    "nonfinite": "switch",
    "norm": "factor",
    "loss": "factor",
    "error": "switch",
    "every": "count",
    "file": "text",
    "signal": "text",
    "before": "count",
    "ring": "size",
    "most": "count",
}
CONTEXT_SETTINGS = renamed({"output-dir": "output", "steps": "step"})
Watching = Annotated[
    bool, typer.Option("--watch", help="Script: measure every step, and record values of those only that matter.")
]
Triggers = Annotated[
    list[str] | None,
    typer.Option(
        "--trigger",
        metavar="KEY=VALUE",
        help="With --watch: norm, loss, every, file, signal, nonfinite, error, before, ring, most. Repeatable.",
    ),
]
TrackerNames = Annotated[
    list[str] | None,
    typer.Option("--tracker", metavar="NAME", help="With --watch: tensorboard, wandb or mlflow. Repeatable."),
]


def command(
    target: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET | [--] script.py ARGS... | -- -m module ARGS...",
            help="Model or script.",
            show_default=False,
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="DIR", help="Directory of the recordings.")
    ] = "glass-recording",
    inputs: ModuleInputs = None,
    max_new_tokens: Annotated[
        int | None, typer.Option("--max-new-tokens", metavar="N", help="Generate N tokens from the inputs.")
    ] = None,
    tokens_of: Annotated[
        str | None,
        typer.Option("--tokens-of", metavar="RECORDING", help="Generate the tokens of this recording."),
    ] = None,
    sites: Annotated[
        list[str] | None, typer.Option("--sites", metavar="PATTERN", help="Record only these: glob or re:. Repeatable.")
    ] = None,
    values: Annotated[
        bool, typer.Option("--values/--no-values", help="Record values, or only statistics of each tensor.")
    ] = True,
    step: Annotated[str | None, typer.Option(metavar="LIST", help="Record only these steps, e.g. 0-3,7.")] = None,
    byte_budget: Annotated[
        str | None, typer.Option("--byte-budget", metavar="SIZE", help="Maximum bytes of values, e.g. 500M.")
    ] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Of a script: record the gradients of activations and parameters, too.")
    ] = False,
    optimizer: Annotated[
        bool, typer.Option("--optimizer", help="Of a script: record parameters and state after each optimizer step.")
    ] = False,
    microbatches: Annotated[
        int, typer.Option(metavar="N", help="With --gradients: number of forward passes in flight.")
    ] = 1,
    watch: Watching = False,
    trigger: Triggers = None,
    tracker: TrackerNames = None,
    as_deployed: Annotated[
        bool,
        typer.Option(
            "--as-deployed",
            help="Of gguf:FILE, genai:DIR or vllm:DIR: the engine's default settings, not the exact ones.",
        ),
    ] = False,
    library: Library = None,
    python: Python = None,
    noise_floor: Annotated[
        bool,
        typer.Option(
            "--noise-floor",
            help="Measure the rounding noise of each tensor in two more runs; of a script, in four.",
        ),
    ] = False,
    dtype: Dtype = "auto",
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Device of the model, e.g. cuda.", show_default=False)
    ] = None,
    overwrite: Overwrite = False,
    durable: Annotated[
        bool, typer.Option("--durable/--no-durable", help="Keep finished forwards if the process is killed.")
    ] = True,
    spool: Annotated[
        str | None, typer.Option("--spool", metavar="SIZE", help="With a URL: bytes that may wait to be uploaded.")
    ] = None,
    when_behind: Annotated[
        str, typer.Option("--when-behind", metavar="WHAT", help="If uploads fall behind: wait, or drop values.")
    ] = "wait",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Run the model, count bytes, write nothing.")] = False,
    *,
    checkpoint: AdaptedCheckpoint,
) -> int:
    """Record every tensor of a model or a script."""
    policy: dict[str, Any] = {
        "sites": list(sites) if sites else None,
        "values": values,
        "steps": _steps(step),
        "byte_budget": size("--byte-budget", byte_budget),
        "overwrite": overwrite,
        "durable": durable,
        "spool_bytes": size("--spool", spool),
        "when_behind": when_behind,
    }
    line = read_script_line(target)
    if line is not None:
        line.is_module or asked.script(line.script)
        given = (inputs, max_new_tokens, tokens_of, device)
        if any(option is not None for option in given) or dry_run:
            got = "--inputs, --max-new-tokens, --tokens-of, --device or --dry-run"
            raise UsageError("a script brings its own inputs, and is run once", got=got)
        if noise_floor and (watch or not values or isinstance(place(output), RemotePath)):
            got = "--watch" if watch else "--no-values" if not values else output
            raise UsageError("--noise-floor needs all values, in a directory of this machine", got=got)
        watched = watch_of(watch, trigger, tracker)
        if microbatches != 1 and not gradients:
            raise UsageError("--microbatches is for gradients", got=f"{microbatches}, no --gradients")
        own_options = {"gradients": gradients, "optimizer": optimizer, "microbatches": microbatches, "watch": watched}
        return _script(line, output, {**policy, **own_options}, noise_floor=noise_floor)
    if gradients or optimizer or microbatches > 1:
        got = "--gradients" if gradients else "--optimizer" if optimizer else "--microbatches"
        raise UsageError(
            "only a script trains", got=got, hint="glass record --gradients --optimizer -o DIR -- train.py"
        )
    if watch or trigger or tracker:
        got = "--watch, --trigger or --tracker"
        raise UsageError("only for a script, which trains", got=got, hint="glass record --watch -- script.py ARGS...")
    if len(target) > 1:
        raise UsageError("more than one TARGET", got=" ".join(target), hint="glass record -o DIR -- script.py ARGS...")
    served = commands.is_served(target[0])
    unused = ("sites", "steps", "byte_budget", "spool_bytes")
    if served and (dry_run or noise_floor or device or any(policy[name] for name in unused)):
        raise UsageError(
            "a serving engine is recorded whole", got=target[0], expected="--inputs, --tokens-of, --max-new-tokens"
        )
    if not served and (as_deployed or library or python):
        raise UsageError("--as-deployed, --library and --python are for serving engines", got=target[0])
    with progress(f"recording {target[0]}"):
        result = (
            commands.record_served(
                target[0],
                output,
                inputs=inputs,
                max_new_tokens=max_new_tokens,
                tokens_of=tokens_of,
                library=library,
                python=python,
                dtype=dtype,
                as_deployed=as_deployed,
                overwrite=overwrite,
            )
            if served
            else commands.record_target(
                target[0],
                None if dry_run else output,
                inputs=inputs,
                max_new_tokens=max_new_tokens,
                tokens_of=tokens_of,
                dtype=dtype,
                device=device,
                **vars(checkpoint),
                then=commands.measure_noise_floor if noise_floor else None,
                **policy,
            )
        )

    def show() -> None:
        counts = f"{result.num_steps} steps, {result.num_tensors} tensors, {result.value_bytes:,} bytes of values"
        others = f", {result.num_left_out} without values" if result.num_left_out else ""
        out.print(f"{'would record' if dry_run else f'recorded {output}'}: {counts}{others}")
        if not dry_run and not settings.quiet:
            err.print(f"look at it: glass show {output}")

    answer(lambda: {"ok": result.ok, **result.to_dict()}, show)
    return 0 if result.ok else 1


def _script(line: ScriptLine, output: str, policy: dict[str, Any], *, noise_floor: bool) -> int:
    directory, here = place(output), Path.cwd()
    absolute, variables = directory.absolute(), environment.everything()
    result = commands.record_script(
        line.script,
        line.arguments,
        path=output,
        is_module=line.is_module,
        ends_process=owns_process() and not noise_floor,
        **policy,
    )
    sys.stdout.flush()
    if noise_floor and result.ok:
        kept = ("sites", "steps", "byte_budget", "gradients", "optimizer", "microbatches")
        commands.measure_script_floor(
            line.script,
            line.arguments,
            path=absolute,
            recordings=result.recordings,
            is_module=line.is_module,
            directory=here,
            options={name: policy[name] for name in kept} | {"steps": policy["steps"] and sorted(policy["steps"])},
            variables=variables,
        )

    def show() -> None:
        # The script's own output is on stdout; what is ours goes beside it.
        for path in () if settings.quiet else result.recordings:
            # As it was named: the directory that the script has changed to is not the one of the shell.
            named = directory / place(path).relative_to(absolute)
            err.print(f"recorded {named}: glass show {named}")

    answer(lambda: {"ok": result.ok, **result.to_dict()}, show)
    artifacts = environment.debug_artifacts_dir()
    if artifacts is not None:
        for recording in map(place, result.recordings):
            _write_steps(recording, artifacts / recording.relative_to(absolute))
    if result.reason is not None and settings.json != "-":
        err.print(Text.assemble(("error:", "bold red"), " ", result.reason))
    return result.status or (0 if result.recordings else IncomparableError.exit_status)


def _write_steps(recording: Path, directory: Path) -> None:
    """Write the steps of a recording as `glass run --debug_mode` writes them, into what DEBUG_ARTIFACTS_DIR names."""
    opened = glass.Recording.open(recording)
    by_step: dict[int, list[Any]] = {}
    for entry in opened.entries:
        by_step.setdefault(entry.step, []).append(entry)
    listed = {entry.site: f"{entry.site} : {entry.dtype}{list(entry.shape)}\n" for entry in opened.entries}
    with glass.compat.StepFiles(directory) as files:
        with aside(directory / "graph.txt") as graph:
            graph.write_text("".join(listed.values()), encoding="utf-8")
        for step, entries in by_step.items():
            tensors = {entry.site: opened.tensor(entry) for entry in entries}
            files(SimpleNamespace(step=step, debug_buffers=tensors))  # type: ignore[arg-type]
    if not settings.quiet:
        err.print(f"wrote the tensors of {files.num_steps} steps to {directory}")


def _steps(text: str | None) -> frozenset[int] | None:
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None or (match[2] and int(match[2]) - int(match[1]) > 1_000_000):
            raise UsageError("invalid list of steps", got=f"--step {text}", expected="numbers and ranges, as in 0-3,7")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


@dataclass(frozen=True)
class ScriptLine:
    """A script, or with `is_module` a module, and its arguments."""

    script: str
    arguments: tuple[str, ...]
    is_module: bool = False


def read_script_line(target: Sequence[str]) -> ScriptLine | None:
    """Return what `script.py ARGS`, `-m module ARGS` or either of them after `python` runs; None for anything else.

    Raises:
        UsageError: It is a script in a way that cannot be recorded; says which can.
    """
    first, *rest = target
    name = Path(first).name
    if _PYTHON.fullmatch(name) and rest:
        _require_this_python(first)
        return _of_python(rest)
    if name in _LAUNCHERS and rest:
        raise UsageError(
            "a launcher starts processes of its own, which record themselves",
            got=" ".join(target),
            hint=f"{first} ... -m glassengine record -o DIR -- script.py ARGS",
        )
    if first == "-m":
        if not rest:
            raise UsageError("no module is named", got="-m", hint="glass record -o DIR -- -m module ARGS...")
        return ScriptLine(rest[0], tuple(rest[1:]), is_module=True)
    if first.endswith(".py") or _is_script(Path(first)):
        return ScriptLine(first, tuple(rest))
    return None


def _of_python(words: Sequence[str]) -> ScriptLine:
    left = list(words)
    while left:
        word = left.pop(0)
        if word in _WITH_VALUE:
            left[:1] = []
        elif word == "-m" and left:
            return ScriptLine(left[0], tuple(left[1:]), is_module=True)
        elif not word.startswith("-"):
            return ScriptLine(word, tuple(left))
        elif not (_ALONE.fullmatch(word) or word.startswith(("-W", "-X"))):
            break
    raise UsageError(
        "only a script or a module is recorded", got=f"python {' '.join(words)}", hint="glass record -- script.py ARGS"
    )


def _require_this_python(named: str) -> None:
    found = shutil.which(named)
    here = Path(sys.executable)
    # A plain name is whichever comes first, with this one's packages or not; a path is meant.
    if "/" in named and (found is None or Path(found).parent.resolve() != here.parent.resolve()):
        raise UsageError(
            "a script runs in the Python that glass is installed in",
            got=named,
            expected=str(here),
            hint=f"{named} -m glassengine record -o DIR -- script.py, with glassengine installed there",
        )


def _is_script(path: Path) -> bool:
    """Whether a file without an ending of its own begins by naming Python."""
    if path.suffix or not path.is_file():
        return False
    with open_regular(path) as file:
        line = file.readline(200)
    return line.startswith(b"#!") and b"python" in line


def watch_of(watch: bool, triggers: Sequence[str] | None, trackers: Sequence[str] | None) -> Any:
    """Return the watch that the flags ask for, or None.

    Raises:
        UsageError: A trigger has no value, or one that is not of its kind.
        UnknownNameError: There is no such trigger, signal or tracker.
    """
    if not (watch or triggers or trackers):
        return None
    settings: dict[str, Any] = {}
    for text in triggers or ():
        key, equals, value = text.partition("=")
        if key not in _KINDS:
            raise UnknownNameError("trigger", key, _KINDS)
        if not equals or not value:
            raise UsageError("a trigger has no value", got=f"--trigger {text}", expected=f"--trigger {key}=VALUE")
        settings["ring_bytes" if key == "ring" else key] = _value(text, _KINDS[key], value)
    return glass.Watch(**settings, trackers=tuple(trackers or ()))


def size(flag: str, text: str | None) -> int | None:
    """Return a number of bytes.

    Raises:
        UsageError: It is none.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    if match is None:
        raise UsageError("invalid size", got=f"{flag} {text}", expected="bytes, or as in 500M, 2G")
    return int(float(match[1]) * _UNITS[match[2]])


def _value(text: str, kind: str, value: str) -> Any:
    if kind == "text":
        return value
    if kind == "size":
        return size("--trigger ring =", value)
    if kind == "switch":
        if value.lower() in _SWITCHES:
            return _SWITCHES[value.lower()]
        raise UsageError("invalid trigger", got=f"--trigger {text}", expected="yes or no")
    if value.lower() in ("none", "no"):
        return None
    try:
        return int(value) if kind == "count" else float(value)
    except ValueError:
        expected = "a whole number" if kind == "count" else "a number, or none"
        raise UsageError("invalid trigger", got=f"--trigger {text}", expected=expected) from None
