"""The text of `issue.md`: a report of the mistake for the people who maintain the software, ready to paste."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from glassengine.environment import describe

ISSUE = "issue.md"

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
