"""Importing the package is free, and its public names are what they say."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

import glassengine as glass

HEAVY = ("torch", "numpy", "transformers", "rich", "typer", "onnx", "onnxruntime", "safetensors")


def fresh(code: str) -> str:
    """Run `code` in a new interpreter and return what it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    code = f"import sys, glassengine; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert fresh(code) == "[]"


def test_leaves_load_nothing_heavy() -> None:
    code = (
        "import sys, glassengine.errors, glassengine.environment as e; e.describe(); "
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    assert fresh(code) == "[]"


def test_import_changes_no_setting() -> None:
    code = (
        "import os, sys, logging, warnings\n"
        "before = dict(os.environ), list(warnings.filters), list(sys.meta_path), list(sys.path)\n"
        "import glassengine\n"
        "assert before == (dict(os.environ), list(warnings.filters), list(sys.meta_path), list(sys.path))\n"
        "assert not logging.getLogger('glassengine').handlers\n"
    )
    fresh(code)


def test_all_is_the_table() -> None:
    assert glass.__all__ == ["__version__", *sorted(glass._PUBLIC)]
    assert set(glass.__all__) <= set(dir(glass))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(glass.__file__).read_text(encoding="utf-8"))
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    seen = {
        alias.asname: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == glass._PUBLIC


@pytest.mark.parametrize("name", sorted(glass._PUBLIC))
def test_public_name_resolves(name: str) -> None:
    module = glass._PUBLIC[name]
    value = getattr(glass, name)
    assert callable(value)
    assert not isinstance(value, types.ModuleType)
    assert value is getattr(importlib.import_module(module), name)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = glass.no_such_name


def test_submodule_does_not_hide_the_function_of_its_name(tmp_path: Path) -> None:
    # Planted: a package that is imported first and would be bound to the name `compare` by the import system.
    code = (
        "import sys, types, glassengine\n"
        "package, module = (types.ModuleType(f'glassengine.compare{part}') for part in ('', '.compare'))\n"
        "module.compare = lambda: 'function'\n"
        "sys.modules |= {'glassengine.compare': package, 'glassengine.compare.compare': module}\n"
        "glassengine.compare = package\n"
        "print(glassengine.compare())\n"
    )
    assert fresh(code) == "function"


def test_submodules_are_still_bound() -> None:
    assert fresh("import glassengine.errors; print(glassengine.errors.__name__)") == "glassengine.errors"
