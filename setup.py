"""Leaves comments and docstrings of internal functions out of the wheel, line by line (docs/decisions/043).

The source distribution has the files as they are, and so has an editable installation. Modules that public names come
from, and files that are read as text or copied, stay whole.
"""

import ast
import functools
import io
import re
import tokenize
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE = Path("src/glassengine")
# The commands (their help), results (their keys), and files that run in another environment or are copied.
WHOLE = {"cli", "compat", "inside", "pytest_plugin", "reproduction", "results", "testing"}


@functools.cache
def public_modules() -> set[str]:
    """Return the modules that the tables of public names lead to."""
    texts = (path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py"))
    return {name for text in texts if "\n_PUBLIC = {" in text for name in re.findall(r'"(glassengine\.[\w.]+)', text)}


def shortened(text: str) -> str:
    """Return a module without comments and docstrings of functions, and with first lines of those of classes."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or not ast.get_docstring(node):
            continue
        first, last = node.body[0].lineno - 1, node.body[0].end_lineno
        if not isinstance(node, ast.ClassDef):
            lines[first] = " " * node.body[0].col_offset + '""' if len(node.body) == 1 else ""
        elif last > first + 1:
            lines[first] = lines[first].rstrip() + '"""'
        lines[first + 1 : last] = [""] * (last - first - 1)
    return "\n".join(lines) + "\n"


class BuildPy(build_py):
    """Copies modules, the internal ones shortened."""

    def build_module(self, module, module_file, package):
        """Copy a module; lines keep their numbers."""
        target, copied = super().build_module(module, module_file, package)
        path = Path(module_file).relative_to(SOURCE)
        names = {f"{package}.{module}".removesuffix(".__init__"), package}
        if len(path.parts) > 1 and not WHOLE & set(path.parts) and not names & public_modules():
            Path(target).write_text(shortened(Path(module_file).read_text(encoding="utf-8")), encoding="utf-8")
        return target, copied


setup(cmdclass={"build_py": BuildPy})
