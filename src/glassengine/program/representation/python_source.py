"""A stage as a Python file that runs: `graph_module.py`.

The file needs torch alone, holds no weights, and calls every value by the name of its node, so that what is read there
can be asked for with `--add-output`. Weights come from an engine, from a file, or are drawn at random.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import _get_qualified_name
from torch.utils import _pytree as pytree

from glassengine.program.representation.listing import NodeLine, Stage, shown_nodes
from glassengine.program.representation.program import weight_names

_MAX_EMBEDDED = 4096
"""Most elements of an integer example input that is written into the file: positions and masks must make sense."""

_HEAD = '''"""{title}

Names of values are names of nodes: `--add-output NAME` makes any of them an output. Weights are not in this file.

    python graph_module.py                 runs it with random weights of the right shapes
    python graph_module.py ENGINE|FILE     with those of an engine directory, a .safetensors or a .pt state dict

From Python: `run(load_weights(PATH), example_inputs())` returns the results by name.
{note}"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
{imports}
'''

_TAIL = '''

def run(weights, inputs):
    """Run once; `inputs` and the results are tensors by name. Inputs that the graph changes in place are copied."""
    arguments = {parameter: inputs[name].clone() for name, (parameter, _, _) in INPUTS.items()}
    with torch.no_grad():
        results = GraphModule(weights)(**arguments)
    return dict(zip(OUTPUTS, results))


def load_weights(path):
    """Return the weights by name: of an engine directory, or of a file with a state dict."""
    path = Path(path)
    if path.is_dir():
        import glassengine

        exported = glassengine.load(path).program.exported
        stored = {**exported.state_dict, **exported.constants}
    elif path.suffix == ".safetensors":
        from safetensors.torch import load_file

        stored = load_file(path)
    else:
        stored = torch.load(path, weights_only=True, map_location="cpu")
    weights, missing = {}, []
    for name, dtype, _ in WEIGHTS.values():
        # A language model is exported within a wrapper that calls it "user"; its own state dict knows no wrapper.
        places = [name, name.removeprefix("user."), TIED.get(name, name), TIED.get(name, name).removeprefix("user.")]
        found = next((stored[place] for place in places if place in stored), None)
        if found is None:
            missing.append(name)
        else:
            weights[name] = found.detach().to(dtype)
    if missing:
        raise SystemExit(f"{path} lacks {len(missing)} weights: {', '.join(missing[:5])}")
    return weights


def random_weights(seed=0):
    """Return weights of the right shapes, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _random(dtype, shape, generator) for name, dtype, shape in WEIGHTS.values()}
    return {name: weights[TIED.get(name, name)] for name in weights}


def example_inputs(seed=0):
    """Return inputs of the shapes that the program was exported with."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.tensor(VALUES[name], dtype=dtype).reshape(shape)
        if name in VALUES
        else _random(dtype, shape, generator)
        for name, (_, dtype, shape) in INPUTS.items()
    }


def _random(dtype, shape, generator):
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.randn(shape, generator=generator) / 8).to(dtype)
    return torch.ones(shape, dtype=dtype) if dtype is torch.bool else torch.zeros(shape, dtype=dtype)


if __name__ == "__main__":
    if len(sys.argv) > 2 or (len(sys.argv) == 2 and not os.path.exists(sys.argv[1])):
        sys.exit("expected: the path of an engine or of a file of weights\\ngot: " + " ".join(sys.argv[1:]))
    results = run(load_weights(sys.argv[1]) if len(sys.argv) > 1 else random_weights(), example_inputs())
    for name, value in results.items():
        line = f"{name}: {value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{name}: {value}"
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel():
            line += f" min {value.min():.6g} mean {value.double().mean():.6g} max {value.max():.6g}"
        print(line)
'''


def module_source(stage: Stage, lines: list[NodeLine], title: str) -> str:
    """Return the text of `graph_module.py`."""
    exported = stage.exported
    code = _Code({line.name: line for line in lines}, weight_names(exported))
    body = code.function("forward", exported.graph_module, parameters=list(stage.inputs), method=True)
    tables = _tables(stage)
    libraries = sorted(code.namespaces - {"aten", "prim", "prims", "higher_order", "math"})
    note = f"\nIt calls ops of {', '.join(libraries)}: import what registers them first.\n" if libraries else ""
    imports = "".join(f"import {name}\n" for name in sorted(code.modules - {"torch"}))
    head = _HEAD.format(title=title.replace("\\", "/").replace('"', "'"), note=note, imports=imports)
    # Inner graphs (branches, loop bodies) are functions of the module: an op calls them.
    return "\n".join([head.rstrip("\n"), "", tables, *code.functions, _CLASS, *body]) + "\n" + _TAIL


_CLASS = '''

class GraphModule(torch.nn.Module):
    """The graph; weights by name."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights
'''


def _tables(stage: Stage) -> str:
    exported = stage.exported
    values = {**exported.state_dict, **exported.constants}
    placeholders = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    first: dict[Any, str] = {}
    tied: dict[str, str] = {}
    rows = []
    for node, target in weight_names(exported).items():
        value = values[target]
        identity = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        if value.numel() and value.data_ptr() and identity in first:
            tied[target] = first[identity]
        first.setdefault(identity, target)
        rows.append(f"    {node!r}: ({target!r}, {value.dtype}, {tuple(value.shape)}),")
    examples = _examples(stage)
    inputs, small = [], []
    for node, name in stage.inputs.items():
        fake = placeholders[node].meta["val"]
        example = examples.get(node)
        sizes = fake.shape if example is None else example.shape
        shape = tuple(size if isinstance(size, int) else 2 for size in sizes)
        inputs.append(f"    {name!r}: ({node!r}, {fake.dtype}, {shape}),")
        if example is not None and not fake.is_floating_point() and example.numel() <= _MAX_EMBEDDED:
            small.append(f"    {name!r}: {example.flatten().tolist()},")
    parts = [
        "# Placeholder -> (name of the weight, dtype, shape)",
        _braces("WEIGHTS", rows),
        "# Weight -> the one whose memory it shares",
        f"TIED = {tied!r}",
        "# Input -> (parameter of forward, dtype, example shape)",
        _braces("INPUTS", inputs),
        "# Example values of inputs that are indices, positions or masks",
        _braces("VALUES", small),
        f"OUTPUTS = {list(stage.outputs)!r}",
    ]
    return "\n".join(parts)


def _braces(name: str, rows: list[str]) -> str:
    return "\n".join([f"{name} = {{", *rows, "}"]) if rows else f"{name} = {{}}"


def _examples(stage: Stage) -> dict[str, torch.Tensor]:
    """Return placeholder -> the tensor that the program was exported with."""
    given = stage.exported.example_inputs
    if given is None:
        return {}
    leaves = pytree.tree_leaves(given)
    user = [spec.arg.name for spec in stage.exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    if len(leaves) != len(user):
        return {}
    pairs = zip(user, leaves, strict=True)
    return {name: leaf for name, leaf in pairs if isinstance(leaf, torch.Tensor) and not leaf.is_meta}


class _Code:
    """Text of graphs as functions; collects what they need to import.

    Attributes:
        functions: Lines of the inner graphs, innermost first.
        modules: Modules to import.
        namespaces: Namespaces of the ops that are called.
    """

    def __init__(self, lines: Mapping[str, NodeLine], weights: Mapping[str, str]) -> None:
        self._lines = lines
        self._weights = weights
        self.functions: list[str] = []
        self.modules: set[str] = set()
        self.namespaces: set[str] = set()

    def function(self, name: str, module: GraphModule, *, parameters: Sequence[str], method: bool = False) -> list[str]:
        """Return the lines of `module` as a function."""
        indent = "    " if method else ""
        listed = self._lines if method else {}
        arguments = [*(["self"] if method else []), *parameters]
        lines = ["", f"{indent}def {name}({', '.join(arguments)}):"]
        for node in shown_nodes(module.graph):
            text = ""
            if node.op == "placeholder":
                if node.name in self._weights:
                    text = f"{node.name} = self.weights[{self._weights[node.name]!r}]"
                elif node.name not in parameters:
                    text = f"{node.name} = None"  # a non-tensor argument: its value is in the graph
            elif node.op == "get_attr":
                text = f"{node.name} = {self._attribute(name, module, str(node.target))}"
            elif node.op == "output":
                text = f"return {self.literal(node.args[0])}"
            else:
                text = f"{node.name} = {self._call(node)}"
            if text:
                lines.append(f"{indent}    {text}{_comment(listed.get(node.name))}")
        return lines

    def literal(self, value: Any) -> str:
        """Return Python text for one argument."""
        if isinstance(value, Node):
            return value.name
        if isinstance(value, (list, tuple)):
            items = [self.literal(item) for item in value]
            return f"[{', '.join(items)}]" if isinstance(value, list) else f"({', '.join(items)}{',' * bool(items)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.literal(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(self.literal(part) for part in (value.start, value.stop, value.step))})"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float('{value}')"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if callable(value) and not isinstance(value, type):
            return self._qualified(value)
        return repr(value)

    def _call(self, node: Node) -> str:
        arguments = [self.literal(value) for value in node.args]
        arguments += [f"{key}={self.literal(value)}" for key, value in node.kwargs.items()]
        return f"{self._qualified(node.target)}({', '.join(arguments)})"

    def _qualified(self, target: Any) -> str:
        name = str(_get_qualified_name(target))
        if name.startswith("torch.ops."):
            self.namespaces.add(name.split(".")[2])
        self.modules.add(name.split(".")[0])
        return name

    def _attribute(self, owner: str, module: GraphModule, target: str) -> str:
        inner = module.get_submodule(target)
        name = f"{owner}_{re.sub(r'[^0-9A-Za-z]', '_', target)}"
        assert isinstance(inner, GraphModule)
        parameters = [node.name for node in inner.graph.find_nodes(op="placeholder")]
        self.functions += self.function(name, inner, parameters=parameters)
        return name


def _comment(line: NodeLine | None) -> str:
    if line is None or line.op == "output":
        return ""
    parts = [f"{line.dtype}{line.shape}", " = ".join(line.sites), line.source or ""]
    return "  # " + "  ".join(part for part in parts if part).replace("\n", " ").replace("\r", " ")
