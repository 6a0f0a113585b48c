"""Reads the call tree of transformers' debugger: `<Class>_debug_tree_FULL_TENSORS.json` and `_SUMMARY.json`.

Tensors are given in the order of the calls: inputs of a module, what it calls, its results. Module paths become site
names; the class name in front of them is the root. Values are read from the `.safetensors` files beside the tree, or
from the text that torch prints: five digits, and only the edges of a tensor of more than 1000 elements, which is then
listed as skipped. A printed tensor has the precision of the print, so its dtype is given as float16 or complex32, even
where its values are held in float32: judged as float32, every one of them would be wrong.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glassengine.errors import CorruptError
from glassengine.reading.tensors import shape_from
from glassengine.recording.formats.files import ForeignTensors, SafetensorsFile, why_not_a_file
from glassengine.recording.formats.json_files import JsonFile
from glassengine.recording.layout.layout import STORED, Entry, num_bytes
from glassengine.sites import ROOT, port_site, with_call

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# torch prints in scientific notation, with a dot behind whole numbers, or as True and False.
_PRINTED_NUMBER = r"[+-]?(?:inf|nan|\d+\.?\d*(?:e[+-]?\d+)?)"
_TOKEN = re.compile(rf"[\[\]]|True|False|(?P<re>{_PRINTED_NUMBER})(?P<im>[+-](?:inf|nan|\d+\.?\d*(?:e[+-]?\d+)?)j)?")
_SEPARATORS = re.compile(r"[\s,]*")
_TAIL = re.compile(
    r"\s*(?:,\s*(?:size=\([\d, ]*\)|dtype=torch\.\w+|device='[\w:]+'|requires_grad=\w+|grad_fn=<[^<>\n]{0,100}>)\s*)*"
    r"\)\s*"
)
_MAX_ELEMENTS = 1 << 24


def parse_tensor(lines: Sequence[str], shape: tuple[int, ...], dtype: str) -> Tensor | str:
    """Return the tensor that was printed, or why the text is not that of a whole tensor."""
    text = "\n".join(lines)
    start = text.find("tensor(")
    if start < 0:
        return "it does not begin with tensor("
    if math.prod(shape) > _MAX_ELEMENTS:
        return f"it claims {math.prod(shape)} elements"
    values: list[Any] = []
    position, depth = start + len("tensor("), 0
    while True:
        found = _TOKEN.match(text, _SEPARATORS.match(text, position).end())  # type: ignore[union-attr]
        if found is None:
            break
        position = found.end()
        if found[0] in "[]":
            depth += 1 if found[0] == "[" else -1
        else:
            values.append(_value(found))
        if depth <= 0:
            break
    if depth or _TAIL.fullmatch(text, position) is None:
        return f"it cannot be read at {text[position : position + 20]!r}"
    if len(values) != math.prod(shape):
        return f"{len(values)} values for the shape {list(shape)}"
    import torch

    try:
        return torch.tensor(values, dtype=_widest(values)).reshape(shape).to(getattr(torch, dtype))
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        return str(error)


def _value(found: re.Match[str]) -> Any:
    if found[0] in ("True", "False"):
        return found[0] == "True"
    if found["im"] is not None:
        return complex(float(found["re"]), float(found["im"][:-1]))
    number = found["re"]
    return int(number) if re.fullmatch(r"[+-]?\d+", number) else float(number)


def _widest(values: list[Any]) -> torch.dtype | None:
    """Return a dtype that holds every digit; torch's own choice for integers and bools."""
    import torch

    if any(isinstance(value, complex) for value in values):
        return torch.complex128
    return torch.float64 if any(isinstance(value, float) for value in values) else None


FULL = "_FULL_TENSORS.json"
SUMMARY = "_SUMMARY.json"
OTHER_PORTS = ("kv", "grad_in", "grad_out", "grad", "param", "state")
"""What a site can have beside inputs and results; keys of a node that only our own trees have."""

_TREE = re.compile(r"(?P<name>.+)_debug_tree(?:_step(?P<step>\d{1,9}))?(?:_rank(?P<rank>\d{1,9}))?")
_SHAPE = re.compile(r"torch\.Size\(\[((?:\d{1,19}(?:, )?)*)\]\)")
_PRINTED = {"float32": "float16", "float64": "float16", "complex64": "complex32", "complex128": "complex32"}
_IN_FULL = re.compile(r"\d\.\d{15}")
_NUMBER = re.compile(r"tensor\(([-+.\deE]+|nan|-?inf)(?:, [^()]*)?\)")
_MAX_DEPTH = 200


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the values of an entry are: a file beside the tree, or the text in it."""

    folder: Path
    value: Any
    dtype: str


class DebuggerFile(ForeignTensors):
    """Tensors of one tree, or of all trees of a directory; several models keep their class names as roots.

    A file name may say a step and a rank (`<Class>_debug_tree_step1_FULL_TENSORS.json`), as `glass.export` writes it.
    """

    def __init__(self, path: Path, files: list[JsonFile]) -> None:
        super().__init__(path)
        self._printed: dict[Entry, Tensor] = {}
        names = [_TREE.fullmatch(file.path.name.removesuffix(FULL).removesuffix(SUMMARY)) for file in files]
        several = len({found["name"] for found in names if found}) > 1
        for file, found in zip(files, names, strict=True):
            step, rank = (int(found[key] or 0) if found else 0 for key in ("step", "rank"))
            self._add_tree(file, step, rank, several)
        self._sort()

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`: mapped from a file of its own, or parsed from the text."""
        place: _Place = self._values[entry.place]
        if isinstance(place.value, list):
            tensor = parse_tensor(place.value, entry.shape, place.dtype)
            if isinstance(tensor, str):
                raise CorruptError("a printed tensor cannot be read", got=f"{entry.site!r} in {self.path}: {tensor}")
            return tensor
        source, stored = _values_file(place.folder / place.value)
        if (stored.dtype, stored.shape) != (entry.dtype, entry.shape):
            raise CorruptError("a file changed while it was being read", got=str(source.path))
        return source.tensor(stored)

    def statistics(self) -> PrintedStatistics | None:
        """Return what is printed of tensors without values; None where there are values, or nothing is printed."""
        return PrintedStatistics(self.path, self._printed) if self._printed and not self.entries else None

    def _add_tree(self, file: JsonFile, step: int, rank: int, several: bool) -> None:
        root, folder = file.document["module_path"], file.path.parent
        tensors = list(_tensors(file.document, root, root if several else "", Counter(), 0))
        # The original names files by module: of several calls, the last one's values are left.
        last = {value["value"]: where for where, value in tensors if isinstance(value.get("value"), str)}
        for where, value in tensors:
            if (where, step, rank) in self._values:
                self._add(where, self._same_name, step=step)
            elif isinstance(value.get("value"), str) and last[value["value"]] != where:
                self._add(where, f"its file was overwritten by {last[value['value']]}", step=step)
            else:
                self._add(where, *self._entry(folder, where, step, rank, value), step=step)

    def _entry(
        self, folder: Path, site: str, step: int, rank: int, document: dict[str, Any]
    ) -> tuple[Entry, _Place] | tuple[str]:
        """Return the entry of a tensor of the tree and where its values are, or why it is not given as one."""
        shape, dtype = _described(document)
        value = document.get("value")
        if dtype not in STORED:
            return (f"no arithmetic for {dtype[:80]}",)
        if value is None:
            self._printed |= dict(_statistics(site, step, rank, dtype, shape, document))
            return ("statistics only: the values are in the file that ends in _FULL_TENSORS.json",)
        nbytes = num_bytes(dtype, shape)
        if isinstance(value, str):
            name = value.removeprefix("./")
            reason = why_not_a_file(folder, name)
            if reason is not None:
                return (reason,)
            stored = _values_file(folder / name)[1]
            if (stored.dtype, stored.shape) != (dtype, shape):
                return (f"its file holds {stored.describe()}, the tree says {dtype}{list(shape)}",)
            return Entry(site, step, rank, dtype, shape, nbytes=nbytes), _Place(folder, name, dtype)
        if not isinstance(value, list) or not all(isinstance(line, str) for line in value):
            return ("its values are neither text nor a file",)
        if any("..." in line for line in value):
            return ("only the edges of it are printed: record it with use_repr=False",)
        tensor = parse_tensor(value, shape, dtype)
        if isinstance(tensor, str):
            return (f"the text is not that of a tensor: {tensor}",)
        precision = dtype if any(map(_IN_FULL.search, value)) else _PRINTED.get(dtype, dtype)
        return Entry(site, step, rank, precision, shape, nbytes=nbytes), _Place(folder, value, dtype)


class PrintedStatistics(ForeignTensors):
    """The statistics of a tree without values, as tensors: four numbers of each float tensor, and its shape.

    Deviation, mean, minimum and maximum, the last three from one deviation up or down: what is near zero beside the
    spread of its tensor is then judged by that spread.
    """

    def __init__(self, path: Path, tensors: dict[Entry, Tensor]) -> None:
        super().__init__(path)
        self.entries = list(tensors)
        self._sort()
        self._tensors = tensors

    def tensor(self, entry: Entry) -> Tensor:
        """Return the numbers of one of `entries`."""
        return self._tensors[entry]


def _statistics(
    site: str, step: int, rank: int, dtype: str, shape: tuple[int, ...], document: dict[str, Any]
) -> Iterator[tuple[Entry, Tensor]]:
    import torch

    sizes = torch.tensor(shape, dtype=torch.int64)
    yield Entry(f"{site}:shape", step, rank, "int64", tuple(sizes.shape), nbytes=sizes.nbytes), sizes
    printed = [_NUMBER.fullmatch(str(document.get(name))) for name in ("std", "mean", "min", "max")]
    if not all(printed):
        return
    std, mean, least, most = (float(number[1]) for number in printed if number)
    spread = std if math.isfinite(std) else 0.0
    numbers = torch.tensor([spread, mean + spread, least - spread, most + spread], dtype=torch.float32)
    # Printed in five digits, for any dtype.
    precision = dtype if dtype == "bfloat16" else "float16"
    yield Entry(site, step, rank, precision, (4,), nbytes=numbers.nbytes), numbers


def is_tree(document: Any) -> bool:
    """Return whether a JSON document is a call tree."""
    return (
        isinstance(document, dict)
        and isinstance(document.get("module_path"), str)
        and any(key in document for key in ("inputs", "outputs", "children"))
    )


def open_trees(path: Path) -> DebuggerFile | None:
    """Open the trees of a directory; of a pair the one with values. None when there are none."""
    there = {item.name: item for item in sorted(path.iterdir()) if item.is_file() and not item.is_symlink()}
    full = [item for name, item in there.items() if name.endswith(FULL)]
    alone = [
        item
        for name, item in there.items()
        if name.endswith(SUMMARY) and name.removesuffix(SUMMARY) + FULL not in there
    ]
    files = [JsonFile(item) for item in [*full, *alone]]
    trees = [file for file in files if is_tree(file.document)]
    return DebuggerFile(path, trees) if trees else None


def open_tree(file: JsonFile) -> DebuggerFile:
    """Open one tree; for a summary, the file with values if it exists."""
    full = file.path.with_name(file.path.name.removesuffix(SUMMARY) + FULL)
    if file.path.name.endswith(SUMMARY) and full.is_file() and not full.is_symlink():
        other = JsonFile(full)
        file = other if is_tree(other.document) else file
    return DebuggerFile(file.path, [file])


def _tensors(
    node: Any, root: str, prefix: str, calls: Counter[str], depth: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (site, description) of the tensors of a node and of what it calls, in the order of the calls."""
    if not isinstance(node, dict) or not isinstance(node.get("module_path"), str) or depth > _MAX_DEPTH:
        raise CorruptError("a node of a call tree is damaged", got=str(node)[:200])
    inside = node["module_path"].removeprefix(root).removeprefix(" (top-level)").lstrip(".")
    path = ".".join(part for part in (prefix, inside) if part) or ROOT
    number = node.get("call")
    # The original gives no number: every call is there, one after the other.
    call = with_call(path, number if isinstance(number, int) and number >= 0 else calls[path])
    calls[path] += 1
    inputs = node.get("inputs")
    if isinstance(inputs, dict):
        yield from _leaves(call, ":in", inputs.get("args"), 0)
        yield from _leaves(call, ":in", inputs.get("kwargs"), 0)
    children = node.get("children") or []
    if not isinstance(children, list):
        raise CorruptError("a node of a call tree is damaged", got=str(children)[:200])
    for child in children:
        yield from _tensors(child, root, prefix, calls, depth + 1)
    yield from _leaves(call, ":out", node.get("outputs"), 0)
    for port in OTHER_PORTS:
        yield from _leaves(call, f":{port}", node.get(port), 0)


def _leaves(where: str, port: str, value: Any, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if depth > _MAX_DEPTH:
        raise CorruptError("a call tree nests too deeply", got=f"at {where[:200]!r}")
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(where, f"{port}[{index}]", item, depth + 1)
    elif isinstance(value, dict):
        if isinstance(value.get("shape"), str) and isinstance(value.get("dtype"), str):
            site = value.get("site")
            yield site if isinstance(site, str) else port_site(where, port), value
            return
        for key, item in value.items():
            yield from _leaves(where, f"{port}.{key}" if key else port, item, depth + 1)


def _described(document: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    shape = _SHAPE.fullmatch(document["shape"])
    try:
        sizes = shape_from([int(size) for size in shape[1].split(", ") if size] if shape is not None else None)
    except ValueError:
        return (), f"the shape {document['shape'][:80]!r}"
    return sizes, document["dtype"].removeprefix("torch.")


def _values_file(path: Path) -> tuple[SafetensorsFile, Entry]:
    """Open a file of values; its one tensor is called "data"."""
    source = SafetensorsFile(path)
    stored = next((entry for entry in source.entries if entry.site == "data"), None)
    if stored is None:
        raise CorruptError("a file of values holds no tensor called data", got=str(path))
    return source, stored
