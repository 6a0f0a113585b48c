"""Resolves names that a user gives: a dtype, a model, a function in a file. Refuses impossible ones without torch.

The command line asks before it imports torch, and what loads things asks again. Each function returns what it is given,
also None, for what was not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

from glassengine.errors import UnknownNameError, UsageError, nearest
from glassengine.extensions import BACKENDS, registered
from glassengine.reading.files import read_bytes
from glassengine.stores.places import place, remote

FORMS = "a Hugging Face directory or id, file.py:factory, package.module:factory, an ONNX file, a .pt2 program"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DTYPES = {
    "float32": "fp32 f32 float single",
    "bfloat16": "bf16",
    "float16": "fp16 f16 half",
    "float64": "fp64 f64 double",
}
_DYNAMIC = re.compile(rb"import \*|\b(?:exec|globals|vars|setattr|__getattr__|modules)\b")
_MOST_BYTES = 1 << 20
_FEW = 8


def dtype(name: str | None) -> str | None:
    """Return the name that torch has for a dtype, "auto" for that of the checkpoint."""
    asked = (name or "auto").removeprefix("torch.").lower()
    found = next((known for known, others in _DTYPES.items() if asked in (known, *others.split())), None)
    if found is None and asked != "auto":
        raise UnknownNameError("dtype", str(name), ["auto", *_DTYPES])
    return name and (found or asked)


def backend(name: str | None) -> str | None:
    """Require that a back-end is registered."""
    if name is not None and name not in registered(BACKENDS):
        raise UnknownNameError("back-end", name, registered(BACKENDS), hint="list them with: glass doctor")
    return name


def is_factory(spec: str) -> bool:
    """Whether `spec` has the form `file.py:name` or `package.module:name`."""
    module, _, name = spec.rpartition(":")
    return name.isidentifier() and (module.endswith(".py") or all(part.isidentifier() for part in module.split(".")))


def function(spec: str | None) -> str | None:
    """Require that the file of `file.py:name` is there, and that it defines the name, as far as its text says."""
    where, _, name = (spec or "").rpartition(":")
    if (spec or "").endswith(".py"):
        own, _ = _names(Path(str(spec)).expanduser())
        expected = ", ".join(f"{spec}:{known}" for known in own[:_FEW]) + (", ..." if len(own) > _FEW else "")
        raise UsageError(f"{spec} is a file: name a function in it", expected=expected or "file.py:function")
    if where.endswith(".py"):
        own, known = _names(Path(where))
        if own and known is not None and name not in known:
            raise UnknownNameError(f"function in {where}", name, own)
    return spec


def functions(specs: Sequence[str] | None) -> Sequence[str] | None:
    """Require each of several functions."""
    for spec in specs or ():
        function(spec)
    return specs


def model(spec: str | None) -> str | None:
    """Require what MODEL may be, as far as it is not on the hub, in a store or in a package."""
    if spec is None or remote(spec) is not None:
        return spec
    path = Path(spec).expanduser()
    if is_factory(spec) or (path.suffix == ".py" and not path.is_dir()):
        return function(spec)
    is_path = not HUB_ID.fullmatch(spec) or ("/" in spec and path.parent.is_dir())
    if is_path and ":" not in spec and not path.exists():
        here = [str(p) for p in path.parent.glob("*") if p.is_dir()] if path.parent.is_dir() else []
        raise UnknownNameError("model directory", spec, here, hint=f"MODEL is {FORMS}")
    return spec


def inputs(spec: str | None) -> str | None:
    """Require that a file of inputs is there, or the function that makes them."""
    if spec is None or is_factory(spec) or spec.endswith(".py"):
        return function(spec)
    path = place(spec)
    if remote(spec) is None and not path.is_file():
        siblings = [str(p) for p in path.parent.glob("*") if p.is_file()] if path.parent.is_dir() else []
        raise UnknownNameError("inputs file", spec, siblings, hint="--inputs FILE, or --inputs file.py:factory")
    return spec


def existing(path: str | None) -> str | None:
    """Require that a file or directory is there."""
    source = None if path is None else place(path)
    if source is not None and not source.exists():
        there = [item.name for item in source.parent.iterdir()] if source.parent.is_dir() else []
        raise UsageError("no such file", got=str(source), expected=nearest(source.name, there) or None)
    return path


def script(file: str, usage: str = "glass record -o DIR -- script.py ARGS") -> str:
    """Require that a script is there; `usage` is what helps."""
    if not Path(file).is_file():
        raise UsageError("no such script", got=file, hint=usage)
    return file


def engine(directory: str | None) -> str | None:
    """Require that the directory of an engine is there."""
    if directory is not None and not place(directory).is_dir():
        path = place(directory)
        of = str(path) if path.is_file() and path.suffix in (".onnx", ".pt2") else "MODEL"
        raise UsageError("unknown engine directory", got=str(path), hint=f"glass build {of} -o DIRECTORY")
    return directory


def is_plain_model(candidate: str | None) -> bool:
    """Whether something is surely a model: no engine, no record and no file that is served."""
    spec = candidate or ""
    return (is_factory(spec) and ".py:" in spec) or bool(spec and (Path(spec) / "config.json").is_file())


def _names(path: Path) -> tuple[list[str], set[str] | None]:
    """Return the public functions of a file, and every name in it; None for these where it may make more.

    Raises:
        UsageError: It is not there, or no Python.
    """
    if not path.is_file():
        raise UsageError(f"no such file: {path}", hint="file.py:factory")
    raw = read_bytes(path, most=_MOST_BYTES)
    try:
        tree = ast.parse(raw)
    except SyntaxError as error:
        got = f"SyntaxError: {error.msg}, raised at {path}:{error.lineno}: {(error.text or '').strip()}"
        raise UsageError(f"{path} cannot be imported", got=got) from None
    found = {str(getattr(node, key, "")) for node in ast.walk(tree) for key in ("name", "id", "asname")}
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    functions.sort(key=lambda node: len(node.args.args) > len(node.args.defaults))  # factories take nothing
    return [node.name for node in functions], None if _DYNAMIC.search(raw) else found
