"""The command `glass`: a table of commands, each imported only when it is called.

`glass --help` reads the table and nothing else. The module `cli/<name>.py` of a command has a function `command`, with
parameters annotated for Typer, that returns its exit status; a test keeps the first line of its docstring equal to the
table. The global flags are accepted before and after the command's name.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup
from typer.main import get_command

import glassengine
from glassengine import asked
from glassengine.cli import options
from glassengine.cli.documents import destination_of, require_place, spelled_out
from glassengine.cli.errors import exit_status
from glassengine.cli.help import arrange, introduction
from glassengine.errors import UsageError

COMMANDS = {
    "build": "Compile a model into an engine directory.",
    "sites": "List the tensor names of a model, engine or recording, without building.",
    "run": "Generate text with an engine, or run one forward of it; print or record its tensors.",
    "record": "Record every tensor of a model or a script.",
    "upload": "Bring a recording to an object store, or the rest of one that was cut off.",
    "show": "Show the tensors of a recording or dump, and their statistics.",
    "compare": "Compare recordings, tensor files, dumps, engines or build artifacts.",
    "check": "Find the first op that is wrong in a port, engine, pass or dump.",
    "check-prompt": "Compare tokenizer, chat template and generation settings of two sides.",
    "check-rollout": "Explain the gap between the log-probabilities of a rollout and those of its policy.",
    "check-training": "Find the first training step, and in it the op, that is wrong in a port.",
    "watch": "Compare two scripts step by step while they run, and stop both at the first step that is wrong.",
    "explain": "Explain a result in words: why it is ok or not, or why a tensor has its verdict.",
    "export": "Write a result for what people open already: Model Explorer, Perfetto, TensorBoard, Netron.",
    "profile": "Show a profile by module, or take one of a running program.",
    "snapshot": "Show the content of a snapshot, or pack it into one file.",
    "replay": "Run a snapshot again, without the original code.",
    "report": "Write a result as a page for the browser: index.html, and its data beside it.",
    "schema": "Print the JSON schema of the --json document of a command.",
    "skill": "Print the instructions for a coding agent: when to use glass, in which order, how to read answers.",
    "mcp": "Serve check, compare, show and explain to a coding agent (MCP, on stdin and stdout).",
    "doctor": "Show versions, processor, compiler and back-ends of this machine.",
}

_EPILOG = (
    "Exit status: 0 ok, 1 not ok, 2 usage, 3 back-end missing or failed, 4 incomparable, too little coverage or "
    "corrupt, 70 a bug in Glass Engine, 130 interrupted."
)


def with_global_flags(function: Callable[..., int]) -> Callable[..., int]:
    """Return `function` with the parameters of `options.configure` after its own, put into effect before it runs.

    A parameter whose type is a dataclass is a group of options: its fields take its place on the command line.
    """
    own, groups = _ungrouped(inspect.signature(function, eval_str=True).parameters.values())
    shared = inspect.signature(options.configure, eval_str=True).parameters
    clash = {parameter.name for parameter in own} & shared.keys()
    if clash:
        raise TypeError(f"{function.__module__}.{function.__qualname__} redefines global flags: {sorted(clash)}")

    def call(**arguments: Any) -> int:
        options.configure(**{name: arguments.pop(name) for name in shared})
        if options.settings.json is not None:
            require_place(options.settings.json)
        _require_usual_numbers(arguments)
        for name, known in (_ASKED | _ASKED_OF.get(function.__module__.rpartition(".")[2], {})).items():
            if isinstance(arguments.get(name), (str, list)):
                arguments[name] = known(arguments[name])
        for name, group in groups.items():
            arguments[name] = group(**{field.name: arguments.pop(field.name) for field in fields(group)})
        return function(**arguments)

    parameters = [*own, *shared.values()]
    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    call.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__doc__ = function.__doc__
    return call


def _ungrouped(parameters: Iterable[inspect.Parameter]) -> tuple[list[inspect.Parameter], dict[str, Any]]:
    """Return the options of a command, with those of groups instead of the group, and its groups by name."""
    own: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in parameters:
        if not is_dataclass(parameter.annotation):
            own.append(parameter)
            continue
        group = groups[parameter.name] = parameter.annotation
        types = get_type_hints(group, include_extras=True)
        own += [parameter.replace(name=f.name, default=f.default, annotation=types[f.name]) for f in fields(group)]
    return own, groups


_UNSIGNED = frozenset({"seed"})
"""Options that take all numbers of 64 bits: torch draws seeds among them, and they are printed to be given again."""


_ASKED: dict[str, Callable[[Any], Any]] = {
    "dtype": asked.dtype,
    "backend": asked.backend,
    "inputs": asked.inputs,
    "passes": asked.functions,
    **dict.fromkeys(("optimizer", "candidate_optimizer", "loss"), asked.function),
}
"""Option -> what refuses a value of it before torch is imported."""
_BOTH: dict[str, Callable[[Any], Any]] = dict.fromkeys(("baseline", "candidate", "candidate_argument"), asked.model)
_ASKED_OF: dict[str, dict[str, Callable[[Any], Any]]] = {
    "build": {"model": asked.model},
    "check": {"candidate": asked.model},  # an argument may be a script
    "check_training": _BOTH,
    "sites": {"target": asked.model},
    "show": {"recording": asked.existing},
    "replay": {"snapshot": asked.existing},
}
"""Likewise, of a command."""


def _require_usual_numbers(arguments: Mapping[str, Any]) -> None:
    """Refuse whole numbers that neither a tensor, nor a file, nor a float can have."""
    for name, value in arguments.items():
        bits = 64 if name in _UNSIGNED else 63
        if isinstance(value, int) and value.bit_length() > bits:
            raise UsageError(
                f"the number of --{name.replace('_', '-')} is too large",
                got=f"about 2^{value.bit_length()}",
                expected=f"less than 2^{bits}",
            )


def load_command(name: str) -> Any:
    """Import `cli/<name>.py` and return its `command` as a command object of Typer."""
    module = importlib.import_module(f"glassengine.cli.{name.replace('-', '_')}")
    app = typer.Typer(add_completion=False)
    app.command(name, context_settings=getattr(module, "CONTEXT_SETTINGS", None))(with_global_flags(module.command))
    command = get_command(app)
    arrange(command, name)
    return command


class _LazyGroup(TyperGroup):
    """A group whose help shows the table, and which imports a command when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, placeholder and load_command(str(name)), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _print_version(value: bool) -> None:
    if value:
        from glassengine import __version__

        options.out.print(f"glass {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]


def _build() -> Any:
    app = typer.Typer(cls=_LazyGroup, add_completion=False, rich_markup_mode=None, epilog=_EPILOG)

    @app.callback(help=(glassengine.__doc__ or "").partition("\n")[0])
    def glass(
        version: _Version = False,
        quiet: options.Quiet = False,
        verbose: options.Verbose = 0,
        no_color: options.NoColor = False,
        no_progress: options.NoProgress = False,
        metrics: options.Metrics = False,
        json: options.Json = None,
    ) -> None:
        options.configure(quiet, verbose, no_color, no_progress, metrics, json)

    for name, help_line in COMMANDS.items():
        app.command(name, help=help_line)(lambda: None)
    group = get_command(app)
    arrange(group)
    return group


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status.

    Args:
        arguments: What follows `glass`; the process's own arguments when None.
    """
    words = tuple(sys.argv[1:] if arguments is None else arguments)
    given = spelled_out(words)
    options.reset()
    options.settings.words = words
    options.settings.json = destination_of(given)  # before it is parsed, as that may fail

    def run() -> int:
        command = _build()
        if not given:
            options.out.print(introduction(), markup=False, highlight=False, soft_wrap=True)
            return 2
        with command.make_context("glass", given) as context, options.document_alone():
            return command.invoke(context) or 0

    status = exit_status(run)
    options.print_metrics()
    return status
