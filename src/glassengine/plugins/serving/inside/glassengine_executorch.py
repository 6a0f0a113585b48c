"""Runs a `.pte` file on token ids and writes down what each of its operations computed.

ExecuTorch writes values with debug handles. Its ETRecord has the exported graph, and which node of it each handle
stands for: of the operations that were made of one node the last is its value.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import struct
import subprocess
import sys
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

_BUFFER = 1 << 28
_ANY = 1 << 30
_CACHE_DIMS = 4
OTHERWISE = ".experts"
"""Modules whose operations an export chooses (`experts_implementation`): another one's have the same names."""
_WITH_POSITIONS = ("model", "transformer")
"""Modules that count positions: how many sums that takes depends on the cache."""
_READS = {"linear": 0, "addmm": 1}
"""Which argument of a product is what it reads."""
_KERNELS = ("executorch.kernels.quantized", "executorch.extension.llm.custom_ops.custom_ops")
MOVES = {
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
    """Run what standard input says: {"file", "record", "folder", "prompt", "steps", "following"}."""
    warnings.simplefilter("ignore")
    request = json.load(sys.stdin)
    folder = Path(request["folder"])
    for name in _KERNELS:
        with suppress(ImportError, AssertionError, OSError):  # of programs with such operations alone
            importlib.import_module(name)
    portable = importlib.import_module("executorch.extension.pybindings.portable_lib")
    devtools = importlib.import_module("executorch.devtools")
    data = Path(request["file"]).read_bytes()  # the module reads it in place, as long as it lives
    module = portable._load_for_executorch_from_buffer(data, enable_etdump=True, debug_buffer_size=_BUFFER)
    record = devtools.parse_etrecord(request["record"])
    require_floats(record.exported_program)
    takes = Inputs(record.exported_program, record.edge_dialect_program)
    tokens, position = takes.first(request["prompt"]), 0
    waiting = [*request["prompt"][len(tokens) :], *(request.get("following") or ())] if takes.steps else []
    more = len(request["prompt"]) - len(tokens) + request["steps"] if takes.steps else 0
    called = []
    for _ in range(1 + max(0, min(more, takes.most - len(tokens)))):
        logits = module.forward(takes.arguments(tokens, position))[0].clone()
        called.append((tokens, logits if logits.dim() == 3 else logits[:, None]))
        position += len(tokens)
        tokens = [waiting.pop(0) if waiting else int(called[-1][1][0, -1].argmax())]
    dump, buffer = str(folder / "etdump.bin"), str(folder / "debug.bin")
    module.write_etdump_result_to_file(dump, buffer)
    inspector = devtools.Inspector(etdump_data=_apart(dump), etrecord=record, debug_buffer_path=buffer)
    blocks = sorted(inspector.event_blocks, key=lambda block: int(block.bundled_input_index))
    for step, ((tokens, logits), block) in enumerate(zip(called, blocks, strict=True)):
        write(folder / f"values-{step}.safetensors", tokens, {**values_of([block], record), "./logits.0": logits})
    return 0


def refuse(
    what: str, got: str, expected: str, hint: str = "export it as the guide's page on ExecuTorch does"
) -> NoReturn:
    """End, and say why; `plugins.serving.interpreter` makes an error of it."""
    sys.exit("Refused: " + json.dumps({"what": what, "got": got, "expected": expected, "hint": hint}))


def require_floats(exported: Any) -> None:
    """Refuse a program of rounded weights: the checkpoint's are not what it computes with.

    Raises:
        SystemExit: It is one.
    """
    targets = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    found = sorted(one for one in targets if re.search(r"quantize|choose_qparams|quantized_decomposed", one))
    if found:
        refuse(
            "the program is quantized, so none of its products is the checkpoint's",
            ", ".join(found[:3]),
            "a program of floating weights",
            "check the export without quantization first: what is left is what the quantization costs",
        )


def _apart(file: str) -> bytes:
    """Return an ETDump whose calls have numbers, or calls of the same operations would be taken for repetitions.

    Raises:
        SystemExit: ExecuTorch's own reader does not take what its runtime has written.
    """
    form = importlib.import_module("executorch.devtools.etdump.serialize")
    try:
        dump = form.deserialize_from_etdump_flatcc(Path(file).read_bytes())
    except subprocess.CalledProcessError:
        refuse(
            "ExecuTorch cannot read what its runtime has written of this program",
            "its reader (flatc) ends with an error",
            "an ETDump that executorch.devtools reads",
            "export it in float32: in ETDumps of bfloat16 programs ExecuTorch 1.5 writes damaged texts",
        )
    calls = [run for run in dump.run_data if run.name == "Execute"]
    numbered = [dataclasses.replace(run, bundled_input_index=number) for number, run in enumerate(calls)]
    data: bytes = form.serialize_to_etdump_flatcc(dataclasses.replace(dump, run_data=numbered))
    return struct.pack("<I", len(data)) + data


class Inputs:
    """What a program takes: token ids, and where they begin if it keeps a cache.

    Args:
        exported: What it was made of.
        edge: The same with ExecuTorch's operations, which says what it changes.

    Attributes:
        length: Tokens of a call; None for any number.
        steps: Whether it can be called for the next token.
        most: Tokens that its cache holds.

    Raises:
        SystemExit: It takes something else.
    """

    def __init__(self, exported: Any, edge: Any) -> None:
        signature = exported.graph_signature
        held = {node.name: node.meta.get("val") for node in exported.graph.nodes if node.op == "placeholder"}
        given = {name: held[name] for name in signature.user_inputs if isinstance(held.get(name), Tensor)}
        whole = {name: one for name, one in given.items() if not one.dtype.is_floating_point}
        self._ids = next((name for name, one in whole.items() if one.dim() == 2), "")
        self._positions = next((name for name, one in whole.items() if one.dim() == 1), None)
        self._order = list(given)
        if len(given) != len(signature.user_inputs) or set(given) - {self._ids, self._positions} or not self._ids:
            shapes = ", ".join(f"{name} {[*map(str, one.shape)]}" for name, one in given.items())
            refuse(
                "the program takes something else than token ids",
                shapes,
                "token ids [1, tokens], and the position of a cache",
            )
        least, most = _range(exported, given[self._ids].shape[1])
        self.length = most if least == most else None
        at = (1, 1) if self._positions is None else _range(exported, given[self._positions].shape[0])
        self._of_each = at != (1, 1) or most == 1
        self.steps = self._positions is not None and least == 1
        held = {**exported.state_dict, **exported.constants}
        caches = [held.get(name) for name in edge.graph_signature.buffers_to_mutate.values()]
        sizes = [max(one.shape[1:3]) for one in caches if isinstance(one, Tensor) and one.dim() == _CACHE_DIMS]
        self._longest, self.most = most, min(sizes, default=_ANY)

    def first(self, prompt: list[int]) -> list[int]:
        """Return the tokens of the first call: the prompt, repeated or cut to the length that the program has."""
        length = min(len(prompt), self._longest, self.most) if self.length is None else self.length
        return [prompt[at % len(prompt)] for at in range(length)]

    def arguments(self, tokens: list[int], position: int) -> tuple[Tensor, ...]:
        """Return what a call is given."""
        where = torch.arange(position, position + (len(tokens) if self._of_each else 1))
        given = {self._ids: torch.tensor([tokens]), self._positions: where}
        return tuple(given[name] for name in self._order)


def _range(exported: Any, size: Any) -> tuple[int, int]:
    """Return the smallest and the largest value of a size, which may be a symbol."""
    if isinstance(size, int):
        return size, size
    known = exported.range_constraints.get(size.node.expr)
    if known is None:
        return 1, _ANY
    return int(known.lower), int(known.upper) if known.upper < _ANY else _ANY


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
    values: dict[str, Tensor] = {}
    for node in record.edge_dialect_program.graph.nodes:
        handle, origin = node.meta.get("debug_handle"), [one.name for one in node.meta.get("from_node") or ()]
        value = by_handle.get(handle) if isinstance(handle, int) else None
        source = next((one for one in origin if one in names or one in inputs), None)
        if value is None or source is None or not value.is_floating_point():
            continue
        if source in names:
            values[names[source]] = value
        values.update(dict.fromkeys(inputs.get(source, ()), value))
    return values


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
        if op not in MOVES and not path.endswith(OTHERWISE) and _path(path) not in _WITH_POSITIONS:
            names[node.name] = f"{_path(path)}/{op}.{number}"
        read = node.args[_READS[op]] if op in _READS else None
        if isinstance(read, torch.fx.Node):
            inputs.setdefault(read.name, []).append(f"{_path(path)}/in.0")
    return names, inputs


def _path(text: str) -> str:
    """Return the path below the language model, whatever module of the user's it was exported in."""
    text = re.sub(r"\.slice\([^)]*\)", "", text)  # strict exports write layers[:n] so
    found = re.search(r"(?:^|\.)((?:model\.(?!model\.|transformer\.|lm_head)|transformer\.|lm_head).*)$", f"{text}.")
    return (found[1] if found else text).rstrip(".") or "."


def write(file: Path, tokens: list[int], values: dict[str, Tensor]) -> None:
    """Write the values of a call as a file of safetensors."""
    save = importlib.import_module("safetensors.torch").save_file
    values["./in.input_ids"] = torch.tensor([tokens])
    save({name: one.detach().clone().contiguous() for name, one in values.items()}, file)


if __name__ == "__main__":
    sys.exit(main())
