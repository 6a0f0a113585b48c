"""Parts of a package's module, without what the module imports: data sets, training, other frameworks."""

from __future__ import annotations

import ast
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

KNOWN = (
    "torch",
    "math",
    "copy",
    "typing",
    "functools",
    "itertools",
    "numpy",
    "einops",
    "__future__",
    "abc",
    "warnings",
)
"""What an excerpt may import."""


def excerpt(package: str, file: str, names: Sequence[str], *edits: tuple[str, str] | None, **known: Any) -> Any:
    """Return a module that holds some definitions of a package's file, each on its own line of it.

    Args:
        package: As it is imported.
        file: Inside the package; of a package that is one file, its name.
        names: Of classes, functions and constants.
        edits: Text that stands once in these definitions, and what stands there instead: a mistake of its author, say.
        known: What they need of elsewhere, by name.
    """
    found = importlib.util.find_spec(package)
    assert found is not None
    root = found.submodule_search_locations
    path = Path(root[0]) / file if root else Path(str(found.origin))
    text = path.read_text()
    lines = text.splitlines()
    kept: set[int] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            origins = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            is_kept = not getattr(node, "level", 0) and all(origin.split(".")[0] in KNOWN for origin in origins)
        elif isinstance(node, ast.Assign):
            is_kept = any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
        else:
            is_kept = getattr(node, "name", None) in names
        if is_kept:
            first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
            kept.update(range(first - 1, node.end_lineno or node.lineno))
    source = "\n".join(line if number in kept else "" for number, line in enumerate(lines)) + "\n"
    for edit in filter(None, edits):
        assert source.count(edit[0]) == 1, f"{edit[0]!r} stands {source.count(edit[0])} times in {path}"
        source = source.replace(*edit)
    copy = Path(tempfile.mkdtemp()) / path.name
    copy.write_text(source)
    module = ModuleType(f"{package}_{copy.parent.name}")
    module.__dict__.update(__file__=str(copy), **known)
    sys.modules[module.__name__] = module
    exec(compile(source, str(copy), "exec"), module.__dict__)
    missing = [name for name in names if name not in module.__dict__]
    assert not missing, f"{path} has no {missing}"
    return module
