"""The directory of a reproduction: one piece of a graph, its tensors, and a test that fails as long as it is wrong.

    test_repro.py            the graph as source, what runs it, and the check
    inputs.safetensors       tensors that enter the graph
    weights.safetensors      parameters and buffers that it reads
    expected.safetensors     float64 results, and how far from them rounding may lead, element by element
    actual.safetensors       what the candidate made when it was recorded
    issue.md                 all of it as a report for the people who maintain the software
    reproduction.json        what this is about; written last

Where the candidate is an ONNX graph, its nodes are written as one (see `onnx_reproduction`).

The test needs torch, safetensors and the back-end. What an earlier run left is put away in `earlier-NNN` first.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from glassengine.diagnose.reproduction.onnx import ARRAYS, MODEL, onnx_files
from glassengine.diagnose.reproduction.template import (
    CHECK,
    HEADER,
    NEEDS,
    NEEDS_ALWAYS,
    RUNNERS,
    TEST_ACTUAL,
    TEST_EXPECTED,
    comment,
    function_source,
)
from glassengine.environment import describe, versions
from glassengine.errors import UsageError
from glassengine.judge.pieces import Piece
from glassengine.program.representation.program import Program
from glassengine.stores.places import RemotePath, delivered
from glassengine.writing import ASIDE, aside, put_away

SCHEMA_VERSION = 1
TEST = "test_repro.py"
ISSUE = "issue.md"
ABOUT = "reproduction.json"
_TENSORS = ("inputs.safetensors", "weights.safetensors", "expected.safetensors", "actual.safetensors")
FILES = (TEST, *_TENSORS, ISSUE, ABOUT)
_ALL_FILES = (TEST, MODEL, *ARRAYS, *_TENSORS, ISSUE, ABOUT)
_EARLIER = re.compile(r"earlier-\d+")


@dataclass(frozen=True)
class Reproduction:
    """What a directory is made of.

    Attributes:
        about: Label -> text, for the reader.
        runner: How the candidate runs: a key of `repro_template.RUNNERS`.
        exact: What float64 computes, None where only results were seen.
        candidate: What the candidate computes, None where its graph is not known.
        expected: Float64 results (others exact).
        allowed: How far rounding may lead from each element of `expected`, float64.
        actual: What the candidate made; empty where it made nothing.
        weights: "e:" (exact) or "c:" (candidate) and the name of an input -> qualified name, of parameters and buffers.
        sites: Likewise -> site, of all others.
        settings: Options of the back-end.
        software: Kind of the serving engine that is the candidate, as "gguf".
        graph: The candidate's program where that is an ONNX graph, which is written instead of source.
    """

    about: Mapping[str, Any]
    runner: str
    exact: Piece | None
    candidate: Piece | None
    expected: Sequence[torch.Tensor]
    allowed: Sequence[torch.Tensor]
    actual: Sequence[torch.Tensor]
    weights: Mapping[str, str] = field(default_factory=dict)
    sites: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    graph: Program | None = None
    software: str | None = None


def require_free(directory: Path) -> None:
    """Refuse a directory that holds anything but an earlier reproduction.

    Raises:
        UsageError: There are other files, or it is not a directory.
    """
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", hint="--reproduction DIR, an empty one")
    others = [
        p.name for p in directory.iterdir() if not (p.name in _ALL_FILES or _EARLIER.fullmatch(p.name) or _is_left(p))
    ]
    if others:
        raise UsageError(
            f"{directory} holds other files than a reproduction",
            got=", ".join(others[:5]),
            hint="--reproduction DIR, a new directory",
        )


def write_reproduction(directory: Path, found: Reproduction) -> None:
    """Write everything into `directory`; what an earlier one left is put away.

    Raises:
        UsageError: See `require_free`; or the graph cannot be written as source.
        OSError: It cannot be written.
    """
    require_free(directory)
    if isinstance(directory, RemotePath):
        with delivered(directory) as here:
            write_reproduction(here, found)
        return
    files = _with_issue(_files(found), found)
    directory.mkdir(parents=True, exist_ok=True)
    for left in [path for path in directory.iterdir() if _is_left(path)]:
        left.unlink()
    earlier = [directory / name for name in reversed(_ALL_FILES) if (directory / name).exists()]
    if earlier:
        put_away(directory, earlier)
    for name in (name for name in _ALL_FILES if name in files):
        with aside(directory / name) as path:
            path.write_bytes(files[name])


def run_reproduction(directory: Path) -> str:
    """Run the test of `directory` in this process; return what is wrong, "" where rounding explains all of it.

    Raises:
        Exception: What the back-end raised.
    """
    test = runpy.run_path(str(directory / TEST))
    problem: str = test["compare"](test["actual"]())
    return problem


def _is_left(path: Path) -> bool:
    return ASIDE.fullmatch(path.name) is not None


def _with_issue(files: dict[str, bytes], found: Reproduction) -> dict[str, bytes]:
    """Return the files of a reproduction with the report of it."""
    contents = {name: content for name, content in files.items() if name not in (TEST, ABOUT)}
    values = list(zip(found.expected, found.actual, found.allowed, strict=True)) if found.actual else []
    names: dict[str, Any] = {}
    tool = found.software if found.runner == "recorded" else found.runner.removeprefix("aot_")
    if found.graph is not None and found.graph.onnx is not None and found.candidate is not None:
        names = {"outputs": [found.graph.onnx.values[node] for node in found.candidate.outputs]}
    elif tool == "onnxruntime":
        tool = None  # The script exports the graph; there is no file.
    elif tool == "inductor" and found.candidate is not None:
        names = {"arguments": list(_of(found.candidate, _named(found)[0], "c").values())}
    text = issue(found.about, files[TEST].decode(), contents, values, tool=tool, **names)
    return {**files, ISSUE: text.encode()}


def _files(found: Reproduction) -> dict[str, bytes]:
    if found.graph is not None:
        assert found.candidate is not None
        about = {"schema_version": SCHEMA_VERSION, **found.about}
        values = (found.expected, found.allowed, found.actual)
        return onnx_files(found.graph, found.candidate, found.runner, about, *values)
    names, tensors = _named(found)
    given = {name: tensor for name, tensor in tensors.items() if name.startswith("x")}
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith("w")}
    expected = {f"output{i}": tensor for i, tensor in enumerate(found.expected)}
    expected |= {f"allowed{i}": tensor for i, tensor in enumerate(found.allowed)}
    actual = {f"output{i}": tensor for i, tensor in enumerate(found.actual)}
    stored = dict(zip(_TENSORS, (given, weights, expected, actual), strict=True))
    origins = {name: _origin(found, names, name, tensor) for name, tensor in tensors.items()}
    about = {
        "schema_version": SCHEMA_VERSION,
        **found.about,
        "runner": found.runner,
        "settings": dict(found.settings),
        "tensors": origins,
        "versions": versions(),
    }
    return {
        TEST: _test(found, names, tensors, origins).encode(),
        **{file: save({name: _plain(tensor) for name, tensor in content.items()}) for file, content in stored.items()},
        ABOUT: (json.dumps(about, indent=1) + "\n").encode(),
    }


def _test(
    found: Reproduction, names: Mapping[str, str], tensors: Mapping[str, torch.Tensor], origins: Mapping[str, str]
) -> str:
    lines = [f"# {label:<9} {comment(str(text))}" for label, text in found.about.items()]
    lines += ["#", *(f"# {name:<9} {comment(text)}" for name, text in origins.items())]
    parts = [
        HEADER.format(
            version=versions()["glassengine"],
            needs=NEEDS.get(found.runner, NEEDS_ALWAYS),
            about="\n".join(lines),
            strides={name: tensor.stride() for name, tensor in tensors.items() if not tensor.is_contiguous()},
            devices={name: str(tensor.device) for name, tensor in tensors.items() if tensor.device.type != "cpu"},
        )
    ]
    if found.exact is not None:
        parts.append(function_source("expected", found.exact, _of(found.exact, names, "e"), float64=True) + "\n\n")
    if found.candidate is not None:
        parts.append(function_source("candidate", found.candidate, _of(found.candidate, names, "c")) + "\n\n")
    parts.append(CHECK)
    order = () if found.candidate is None else tuple(_of(found.candidate, names, "c").values())
    parts.append(
        RUNNERS[found.runner].format(
            arguments=order,
            parameters=", ".join(order),
            settings=dict(found.settings),
            inputs="the tensors of inputs.safetensors" if tensors else "its inputs",
        )
    )
    if found.exact is not None:
        parts.append(TEST_EXPECTED.format(arguments=tuple(_of(found.exact, names, "e").values())))
    return "".join([*parts, TEST_ACTUAL])


def _named(found: Reproduction) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return ("e:" or "c:" and the name in the piece) -> short name, and short name -> tensor; each tensor once."""
    names: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for side, piece in (("e", found.exact), ("c", found.candidate)):
        for given, tensor in ({} if piece is None else piece.inputs).items():
            letter = "w" if f"{side}:{given}" in found.weights else "x"
            same = (name for name, other in tensors.items() if name[0] == letter and _is_same(other, tensor))
            name = next(same, None) or f"{letter}{sum(name[0] == letter for name in tensors)}"
            names[f"{side}:{given}"] = name
            tensors.setdefault(name, tensor)
    return names, tensors


def _of(piece: Piece, names: Mapping[str, str], side: str) -> dict[str, str]:
    return {given: names[f"{side}:{given}"] for given in piece.inputs}


def _origin(found: Reproduction, names: Mapping[str, str], name: str, tensor: torch.Tensor) -> str:
    keys = [key for key, short in names.items() if short == name]
    sides = {"e": "baseline", "c": "candidate"}
    labels = dict.fromkeys(found.weights.get(key, found.sites.get(key, key[2:])) for key in keys)
    dtype = str(tensor.dtype).removeprefix("torch.")
    where = " and ".join(dict.fromkeys(sides[key[0]] for key in keys))
    return f"{', '.join(labels)} ({where}) {dtype}[{', '.join(map(str, tensor.shape))}]"


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a is b:
        return True
    alike = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and a.device == b.device
    return alike and torch.equal(a, b)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().clone()


_INDUCTOR = """\
`torch._dynamo.utils.same`, with the float64 result as reference, says `False`:

```python
import torch
from torch._dynamo.utils import same

import test_repro as repro

expected = repro.load("expected")
exact = [expected[f"output{i}"] for i in range(len(expected) // 2)]
compiled = [value.cpu() for value in repro.actual()]
eager = [value.cpu() for value in repro.candidate(*repro.given(ARGUMENTS))]
print(same(eager, compiled, fp64_ref=exact))
```
"""
_ONNXRUNTIME = """\
Polygraphy compares ONNX Runtime with the expected values and fails:

```bash
python - <<'END'
import numpy as np
from polygraphy.comparator import RunResults
from polygraphy.json import save_json

save_json([dict(np.load("inputs.npz"))], "inputs.json")
names, found = OUTPUTS, np.load("expected.npz")
results = RunResults()
results.add([{name: found[f"output{i}"].astype("float32") for i, name in enumerate(names)}], runner_name="float64")
results.save("expected.json")
END
polygraphy run model.onnx --onnxrt --load-inputs inputs.json --load-outputs expected.json
```
"""
_LLAMA = """\
`llama-eval-callback` of llama.cpp prints the values of every node; look for the tensor that is named above:

```bash
llama-eval-callback -m MODEL.gguf -p "PROMPT" -n 1
```
"""
_CALLS = {"inductor": _INDUCTOR, "onnxruntime": _ONNXRUNTIME, "gguf": _LLAMA}
"""Whose software it is -> how its maintainers look at such a mistake."""


def issue(
    about: Mapping[str, Any],
    test: str,
    files: Mapping[str, bytes],
    values: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    *,
    tool: str | None,
    **names: Any,
) -> str:
    """Return the text.

    Args:
        about: Label -> text, of the reproduction.
        test: The source of the minimal script.
        files: What has to be attached to it, by name.
        values: Expected, actual and allowed error of each output.
        tool: A key of the calls above; None where the software has none.
        names: What stands in that call in capitals -> its value.
    """
    site = about.get("site") or about.get("ops")
    mistake = str(about.get("hint") or about.get("failure") or about.get("verdict"))
    lines = [f"# {_code(site)}: {_code(mistake)}", "", "## First wrong operation", ""]
    lines += [f"- {label}: `{_code(text)}`" for label, text in about.items() if label != "schema_version"]
    if values:
        lines += ["", "## Values", "", *(_worst(number, *found) for number, found in enumerate(values))]
    attached = ", ".join(f"`{name}` ({len(content):,} bytes)" for name, content in files.items())
    lines += ["", "## Minimal script", "", f"`python test_repro.py`, with the files beside it: {attached}."]
    lines += ["", "<details><summary>test_repro.py</summary>", "", "```python", test.rstrip(), "```", "", "</details>"]
    if tool in _CALLS:
        call = _CALLS[tool]
        for name, value in names.items():
            call = call.replace(name.upper(), repr(value))
        lines += ["", "## With the maintainers' own tool", "", call.rstrip()]
    here = describe()
    program, *words = here["command_line"] or [""]
    packages = {name: version for name, version in here["versions"].items() if version is not None}
    lines += [
        "",
        "## Environment",
        "",
        f"- command: `{_code(shlex.join([Path(program).name.replace('__main__.py', 'glass'), *words]))}`",
    ]
    lines += [f"- {name} {version}" for name, version in packages.items()]
    lines += [f"- {here['platform']}, {here['machine']}, {here['cpu']}"]
    return "\n".join(lines) + "\n"


def _worst(number: int, expected: torch.Tensor, actual: torch.Tensor, allowed: torch.Tensor) -> str:
    """Return the element that is furthest from the expected one, with both values."""
    if actual.shape != expected.shape:
        return f"- output {number}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    error = (actual.double() - expected.double()).abs().nan_to_num(torch.inf)
    if not error.numel():
        return f"- output {number}: no elements"
    place = int(error.argmax())
    index = [int(one) for one in torch.unravel_index(torch.tensor(place), error.shape)]
    found, wanted, room = (float(one.reshape(-1)[place]) for one in (actual, expected, allowed))
    wrong = int((error > allowed).sum())
    return (
        f"- output {number}, at {index}: the candidate has {found:.8g}, float64 gives {wanted:.8g}; rounding explains "
        f"{room:.3g}. {wrong} of {error.numel()} values are further away than that."
    )


def _code(text: Any) -> str:
    """Return a text for one line of code, escaped: it may come from a model."""
    return str(text).encode("unicode_escape").decode("ascii").replace("`", "'")
