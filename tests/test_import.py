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
from glassengine import commands

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


def test_a_page_of_a_document_is_made_without_torch() -> None:
    """It takes half a gigabyte, which is all that a page of 100 000 tensors may take."""
    assert fresh("import sys, glassengine.report.page.write; print('torch' in sys.modules)") == "False"


NOT_OF_PORTS = ("transformers.modeling_utils", "transformers.generation.utils", "onnxscript", "openvino", "ray", "peft")
"""Modules that take seconds to import, and that a check of a plain module does not need."""


def test_a_check_of_a_plain_port_imports_only_what_it_needs() -> None:
    code = (
        "import sys, torch, glassengine as glass\n"
        "ours, theirs, x = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.ones(2, 4)\n"
        "theirs.load_state_dict(ours.state_dict())\n"
        "result = glass.check(ours, candidate=theirs, inputs={'input': x})\n"
        f"print(result.ok, [m for m in {NOT_OF_PORTS!r} if m in sys.modules])"
    )
    assert fresh(code) == "True []"


def test_import_changes_no_setting() -> None:
    code = (
        "import os, sys, logging, warnings\n"
        "before = dict(os.environ), list(warnings.filters), list(sys.meta_path), list(sys.path)\n"
        "import glassengine\n"
        "assert before == (dict(os.environ), list(warnings.filters), list(sys.meta_path), list(sys.path))\n"
        "assert not logging.getLogger('glassengine').handlers\n"
    )
    fresh(code)


NAMESPACES = ("compat", "lazy", "metrics", "profiler", "snapshots", "testing")
LAZY = [
    *(glass, commands, glass.compat.torch_xla, glass.compat.libneuronxla),
    *(getattr(glass, name) for name in NAMESPACES),
]


def test_public_names() -> None:
    assert set(glass.__all__) - {"__version__"} == {
        *(
            "build",
            "check",
            "check_prompt",
            "check_rollout",
            "check_training",
            "compare",
            "export",
            "list_backends",
            "load",
            "open",
            "record",
        ),
        *("assert_matches", "check_invariant", "matches", "mark_step", "replay", "sites", "tap"),
        *("Comparison", "Divergence", "Engine", "GlassError", "Recording", "Session", "Watch"),
        *NAMESPACES,
    }


@pytest.mark.parametrize("module", LAZY)
def test_all_is_the_table(module: types.ModuleType) -> None:
    assert set(module.__all__) == {*module._PUBLIC, *(["__version__"] if module is glass else [])}
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("module", LAZY)
def test_type_checkers_see_the_same_names(module: types.ModuleType) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    (block,) = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    seen = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {name: f"{origin}.{known}" for name, (origin, known) in seen.items()} == {
        name: where.replace(":", ".") if ":" in where or where == f"{module.__name__}.{name}" else f"{where}.{name}"
        for name, where in module._PUBLIC.items()
    }


@pytest.mark.parametrize(("module", "name"), [(module, name) for module in LAZY for name in module._PUBLIC])
def test_public_name_resolves(module: types.ModuleType, name: str) -> None:
    origin, _, known = module._PUBLIC[name].partition(":")
    value = getattr(module, name)
    if origin == f"{module.__name__}.{name}":
        assert value is importlib.import_module(origin)
        return
    assert callable(value)
    assert not isinstance(value, types.ModuleType)
    assert value is getattr(importlib.import_module(origin), known or name)


def test_a_namespace_is_imported_when_it_is_named() -> None:
    code = "import sys, glassengine as glass; glass.metrics.report(); print('torch' in sys.modules, glass.open is open)"
    assert fresh(code) == "False False"
    assert fresh("import glassengine.compat as xm, sys; print(sorted(xm.__all__)[0], 'torch' in sys.modules)") == (
        "Dump False"
    )


def test_unknown_name_is_an_attribute_error() -> None:
    for module in LAZY:
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'no_such_name'"):
            _ = module.no_such_name


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


_ALWAYS = "onnx onnxruntime openvino tensorboard pandas matplotlib glassengine.plugins"
_SCREEN = "typer.rich_utils rich.markdown markdown_it pygments"
_RESULTS = "msgspec glassengine.results glassengine.program glassengine.recording"
_MODELS = "transformers sympy torch._dynamo torch._inductor torch.distributed.tensor networkx"
_COMPILERS = (
    "torch._dynamo torch._inductor torch._functorch.aot_autograd networkx accelerate glassengine.backends.inductor"
)
FORBIDDEN = {
    "main(['--help'])": f"torch numpy importlib.metadata {_SCREEN} {_RESULTS}",
    "main(['schema', 'check'])": f"torch numpy {_SCREEN}",
    "main(['show', 'nothing'])": f"torch numpy {_SCREEN} {_RESULTS}",
    "import glassengine.compare.compare": f"torch {_MODELS}",
    "import glassengine.diagnose.check_model": f"{_COMPILERS} glassengine.kernels glassengine.diagnose.training_check",
}
"""What runs -> what it does not import, beside what nothing here needs."""


@pytest.mark.parametrize("line", FORBIDDEN)
def test_what_is_imported(line: str) -> None:
    code = f"from glassengine.cli.main import main\n{line}\nimport sys\nprint(*sys.modules)"
    loaded = set(fresh(code).splitlines()[-1].split())
    assert not loaded & {*FORBIDDEN[line].split(), *_ALWAYS.split()}
