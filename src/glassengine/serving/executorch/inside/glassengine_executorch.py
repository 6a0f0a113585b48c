"""Runs a `.pte` file on token ids and writes down what each of its operations computed.

ExecuTorch writes values with debug handles. Its ETRecord has the exported graph, and which node of it each handle
stands for: of the operations that were made of one node the last is its value.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_BUFFER = 1 << 28
_MOVES = {
    *(
        "view",
        "reshape",
        "transpose",
        "permute",
        "slice",
        "expand",
        "unsqueeze",
        "squeeze",
        "cat",
        "clone",
        "contiguous",
    ),
    *("select", "split", "chunk", "alias", "detach", "t", "unflatten", "flatten", "to", "repeat"),
}
"""Operations that move numbers only: exports number them differently."""


def main() -> int:
    """Run what standard input says: {"file", "record", "folder", "prompt"}."""
    warnings.simplefilter("ignore")
    request = json.load(sys.stdin)
    folder = Path(request["folder"])
    portable = importlib.import_module("executorch.extension.pybindings.portable_lib")
    data = Path(request["file"]).read_bytes()  # the module reads it in place, as long as it lives
    module = portable._load_for_executorch_from_buffer(data, enable_etdump=True, debug_buffer_size=_BUFFER)
    about = module.method_meta("forward")
    if about.num_inputs() != 1 or len(about.input_tensor_meta(0).sizes()) != 2:
        shapes = [list(about.input_tensor_meta(one).sizes()) for one in range(about.num_inputs())]
        raise ValueError(f"the program takes {shapes}, and not token ids [1, tokens] alone")
    length = int(about.input_tensor_meta(0).sizes()[1])
    prompt = request["prompt"]
    tokens = [prompt[at % len(prompt)] for at in range(length)]
    logits = module.forward((torch.tensor([tokens]),))[0].clone()
    dump, buffer = str(folder / "etdump.bin"), str(folder / "debug.bin")
    module.write_etdump_result_to_file(dump, buffer)
    devtools = importlib.import_module("executorch.devtools")
    inspector = devtools.Inspector(etdump_path=dump, etrecord=request["record"], debug_buffer_path=buffer)
    record = devtools.parse_etrecord(request["record"])
    values = values_of(inspector.event_blocks, record)
    values["./logits.0"] = logits
    write(folder, tokens, values)
    return 0


def values_of(blocks: Any, record: Any) -> dict[str, Tensor]:
    """Return what the operations computed, by the names of the exported graph."""
    by_handle: dict[int, Tensor] = {}
    for block in blocks:
        for event in block.events:
            held = [one for one in event.debug_data or () if isinstance(one, Tensor)]
            handles = event.debug_handles
            several = list(handles) if isinstance(handles, (tuple, list)) else [handles]
            # A delegate returns several values, and says of all its operations together that they made them.
            if len(several) == 1 and len(held) == 1 and isinstance(several[0], int):
                by_handle[several[0]] = held[0]
    names, inputs = sites_of(record.exported_program.graph)
    found: dict[str, Tensor] = {}
    for node in record.edge_dialect_program.graph.nodes:
        handle, origin = node.meta.get("debug_handle"), [one.name for one in node.meta.get("from_node") or ()]
        value = by_handle.get(handle) if isinstance(handle, int) else None
        source = next((one for one in origin if one in names or one in inputs), None)
        if value is None or source is None or not value.is_floating_point():
            continue
        if source in names:
            found[names[source]] = value
        found.update(dict.fromkeys(inputs.get(source, ()), value))
    return found


def sites_of(graph: Any) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return node -> its name, a path of modules and the op; and node -> the modules of products that read it."""
    names: dict[str, str] = {}
    inputs: dict[str, list[str]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        stack = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())
        path, op = stack[-1][0], str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)
        number = counts[path, op]
        counts[path, op] += 1
        if op not in _MOVES:
            names[node.name] = f"{_path(path)}/{op}.{number}"
        if op in ("linear", "addmm") and isinstance(node.args[0], torch.fx.Node):
            inputs.setdefault(node.args[0].name, []).append(f"{_path(path)}/in.0")
    return names, inputs


def _path(text: str) -> str:
    """Return the path below the language model, whatever module of the user's it was exported in."""
    found = re.search(r"(?:^|\.)((?:model\.(?!model\.)|transformer\.|lm_head).*)$", f"{text}.")
    return (found[1] if found else text).rstrip(".") or "."


def write(folder: Path, tokens: list[int], values: dict[str, Tensor]) -> None:
    """Write the values as a file of safetensors."""
    save = importlib.import_module("safetensors.torch").save_file
    values["./in.input_ids"] = torch.tensor([tokens])
    save({name: one.detach().clone().contiguous() for name, one in values.items()}, folder / "values.safetensors")


if __name__ == "__main__":
    sys.exit(main())
