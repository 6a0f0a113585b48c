"""Writes what the debugger of transformers writes: a pair of JSON files, and on request one file per tensor.

    <Class>_debug_tree_FULL_TENSORS.json   the tree of the calls: inputs and results of every module, with values
    <Class>_debug_tree_SUMMARY.json        the same without values
    <Class>.<path>_inputs_args_0.safetensors, ..._inputs_kwargs_<key>, ..._outputs, ..._outputs_<index>

Beyond the original: results of containers are kept; later steps and ranks have files of their own, as in
`_debug_tree_step1`; later calls of a module have a number ("call") and file names of their own; caches are under "kv".
Statistics are the original's to the last digit where all elements are finite; else those of the finite ones, and the
others are counted. A node is inside of the call that called it where the calls are known, as in the original, else in
the module that holds it. Text that shows only the edges of a tensor carries a checksum of the whole, so that the files
are equal only where the values are.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from glassengine.blocks.arrays import statistics_of, stream_of, values_of
from glassengine.errors import UsageError
from glassengine.recording.formats.debug_tree import FULL, OTHER_PORTS, SUMMARY
from glassengine.recording.layout.layout import Entry
from glassengine.sites import ROOT, port_site, with_call
from glassengine.writing import crc32, remove_tree, save_safetensors

_SITE = re.compile(r"(?P<path>[^:@]*)(?:@(?P<call>\d+))?(?::(?P<port>\w+)(?P<keys>.*))?", re.DOTALL)


_KEY = re.compile(r"\[(\d+)\]|\.([^.\[]*)", re.DOTALL)


_MAX_INDEX = 10_000


_VALUES = ("value", "crc32")


Notes = Mapping[int, Iterable[tuple[str, str]]]
"""Step -> (site, text) of non-tensor inputs and results."""


CallsOfSteps = Mapping[int, Sequence[tuple[str, str | None]]]
"""Step -> (path with call, that of its caller or None) of every call, in the order in which they begin."""


# Of these the original prints statistics, computed in their own dtype.
MEASURED = (torch.float16, torch.float32, torch.bfloat16)


class Calls:
    """The nodes of one tree: one per call of a module, in the order of the calls."""

    def __init__(self, class_name: str, known: Iterable[tuple[str, str | None]]) -> None:
        self._class_name = class_name
        self._nodes: dict[tuple[str, int], dict[str, Any]] = {}
        self._callers: dict[tuple[str, int], tuple[str, int]] = {}
        self._node(ROOT, 0)
        for called, caller in known:
            key = _parts(called)[:2]
            self._node(*key)
            if caller is not None:
                self._callers[key] = _parts(caller)[:2]

    def place(self, site: str) -> tuple[dict[str, Any], str, list[int | str]]:
        """Return the node of a site, its port, and the keys within it."""
        path, call, port, keys = _parts(site)
        tokens: list[int | str] = [int(index) if index else key for index, key in _KEY.findall(keys)]
        if keys and not is_positional(site):
            tokens = [keys[1:]]
        return self._node(path, call), port, tokens

    def stem(self, site: str) -> str:
        """Return the name of a file for a site, as the original makes it."""
        path, call, port, keys = _parts(site)
        where = self._full(path) + (f"@{call}" if call else "")
        tokens = [index or key for index, key in _KEY.findall(keys)]
        if port == "in":
            middle = ["inputs", "kwargs" if keys.startswith(".") else "args"]
        else:
            middle = ["outputs" if port == "out" else port]
        return "_".join([where, *middle, *tokens])

    def tree(self) -> dict[str, Any]:
        """Return the root, every node under the call of the module that holds it."""
        order = list(self._nodes)
        calls_of: dict[str, list[int]] = {}
        for position, (path, _) in enumerate(order):
            calls_of.setdefault(path, []).append(position)
        children: dict[int, list[dict[str, Any]]] = {}
        places = {key: position for position, key in enumerate(order)}
        for position, (path, call) in enumerate(order):
            if (path, call) != (ROOT, 0):
                caller = self._callers.get((path, call))
                holder = places[caller] if caller in places else _holder(path, position, calls_of)
                children.setdefault(holder, []).append(self._nodes[path, call])
        for position, key in enumerate(order):
            node = self._nodes[key]
            inputs = node.pop("inputs")
            node["inputs"] = {name: _as_lists(value) for name, value in inputs.items() if value}
            if key == (ROOT, 0):
                # As the original has it, also where they are empty.
                node["inputs"] = {"args": [], "kwargs": {}} | node["inputs"]
            node["outputs"] = _as_lists(node.pop("outputs"))
            for name in OTHER_PORTS:
                if name in node:
                    node[name] = _as_lists(node.pop(name))
            for name in ("inputs", "outputs"):
                if node[name] is None or node[name] == {}:
                    del node[name]
            if position in children:
                node["children"] = children[position]
        return self._nodes[ROOT, 0]

    def _node(self, path: str, call: int) -> dict[str, Any]:
        if (path, call) not in self._nodes:
            node: dict[str, Any] = {"module_path": self._full(path)}
            if call:
                node["call"] = call
            self._nodes[path, call] = {**node, "inputs": {"args": {}, "kwargs": {}}, "outputs": None}
        return self._nodes[path, call]

    def _full(self, path: str) -> str:
        return self._class_name if path == ROOT else f"{self._class_name}.{path}"


def measured(tensor: Tensor) -> dict[str, str]:
    """Return statistics as the original prints them: one element has no deviation."""
    std = tensor.std() if tensor.numel() > 1 else tensor.new_tensor(float("nan"))
    with torch._tensor_str.printoptions(sci_mode=True, precision=4):
        return {
            name: repr(value)
            for name, value in (("mean", tensor.mean()), ("std", std), ("min", tensor.min()), ("max", tensor.max()))
        }


def place_of(step: int, rank: int) -> str:
    """Return what names of files say of step and rank; nothing of the first step of the only rank."""
    return (f"_step{step}" if step else "") + (f"_rank{rank}" if rank else "")


def _parts(site: str) -> tuple[str, int, str, str]:
    """Return path, call, port and keys of a site; a name of another form is a path."""
    found = _SITE.fullmatch(site)
    if found is None or (found["port"] not in (None, "in", "out", *OTHER_PORTS)):
        return site, 0, "out", ""
    return found["path"], int(found["call"] or 0), found["port"] or "out", found["keys"] or ""


def is_positional(site: str) -> bool:
    """Return whether the place in the tree says the name of the tensor: a key can hold dots and brackets itself."""
    path, call, port, keys = _parts(site)
    tokens = _KEY.findall(keys)
    again = "".join(f"[{index}]" if index else f".{key}" for index, key in tokens)
    plain = ("", "") not in tokens and all(int(index) < _MAX_INDEX for index, _ in tokens if index)
    return (
        plain
        and port_site(with_call(path, call), f":{port}{again}") == site
        and (path == ROOT or not path.startswith("."))
    )


def _holder(path: str, position: int, calls_of: Mapping[str, list[int]]) -> int:
    """Return the position of the node that a node is a child of: the latest call of the innermost module around it."""
    above = path
    while "." in above and path != ROOT:
        above = above.rpartition(".")[0]
        if above in calls_of:
            before = [other for other in calls_of[above] if other < position]
            # A module without tensors among its inputs is seen first when it returns.
            return before[-1] if before else calls_of[above][0]
    return 0


def put(node: dict[str, Any], port: str, keys: list[int | str], value: Any) -> None:
    """Put `value` where the keys lead; containers are dicts until the tree is complete."""
    if port == "in":
        holder, name = node["inputs"], "args" if not keys or isinstance(keys[0], int) else "kwargs"
    else:
        holder, name = node, "outputs" if port == "out" else port
    for key in keys:
        inner = holder.get(name)
        if not isinstance(inner, dict):
            inner = holder[name] = {}
        elif "shape" in inner and "dtype" in inner:
            # A tensor that has parts beside itself.
            inner = holder[name] = {"": inner}
        holder, name = inner, key  # type: ignore[assignment]
    if isinstance(holder.get(name), dict):
        holder[name][""] = value
    else:
        holder[name] = value


def _as_lists(value: Any) -> Any:
    """Return `value` with dicts of positions as lists; what is not known of a position is null."""
    if not isinstance(value, dict) or ("shape" in value and "dtype" in value):
        return value
    if value and all(isinstance(key, int) and key < _MAX_INDEX for key in value):
        return [_as_lists(value.get(index)) for index in range(max(value) + 1)]
    return {str(key): _as_lists(child) for key, child in value.items()}


def without_values(value: Any) -> Any:
    """Return a tree without what only a recording of values has."""
    if isinstance(value, list):
        return [without_values(child) for child in value]
    if not isinstance(value, dict):
        return value
    is_tensor = "shape" in value and "dtype" in value
    return {key: without_values(child) for key, child in value.items() if not (is_tensor and key in _VALUES)}


_NOT_IN_NAMES = re.compile(r"[^\w.@=,+-]")
_MAX_NAME_BYTES = 180


class _Source(Protocol):
    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of an entry."""


class TreeWriter:
    """Writes the trees of one source into a directory, aside first, then renamed.

    Args:
        folder: The directory.
        class_name: Of the model: the root of the tree, and the beginning of every file name.
        use_repr: Print the values into the JSON instead of one file per tensor.
        versions: Of what made the tensors; kept in the root of each tree.
    """

    def __init__(self, folder: Path, class_name: str, *, use_repr: bool, versions: Any = None) -> None:
        self._folder = folder
        self._class_name = class_name
        self._use_repr = use_repr
        self._versions = versions
        self._names: set[str] = set()

    def write(
        self,
        source: _Source,
        entries: Iterable[Entry],
        notes: Notes | None = None,
        calls: CallsOfSteps | None = None,
    ) -> list[Path]:
        """Write a tree of each step and rank, and return the JSON files."""
        written: list[str] = []
        parts: dict[tuple[int, int], list[Entry]] = {}
        for entry in entries:
            parts.setdefault((entry.step, entry.rank), []).append(entry)
        try:
            aside = Path(tempfile.mkdtemp(prefix=".partial-", dir=self._folder))
            try:
                for (step, rank), part in sorted(parts.items(), key=lambda item: item[0]):
                    order = Calls(self._class_name, (calls or {}).get(step, ()))
                    tree = self._tree(source, part, (notes or {}).get(step, ()), aside, order)
                    place = place_of(step, rank)
                    facts = {"step": step, "rank": rank, "versions": self._versions}
                    tree["metadata"] = {key: value for key, value in facts.items() if value is not None}
                    written += self._save(tree, place, aside)
                # The trees last: where one is, the files it names are.
                self._move_in(sorted(aside.iterdir(), key=lambda item: item.name in written))
            finally:
                remove_tree(aside)
        except OSError as error:
            got = f"{error.strerror or error} ({error.filename or self._folder})"
            raise UsageError("cannot write the debug tree", got=got) from error
        return [self._folder / name for name in written]

    def _move_in(self, items: Sequence[Path]) -> None:
        """Move files into the folder; if that fails, new files are removed again."""
        new: list[Path] = []
        try:
            for item in items:
                target = self._folder / item.name
                new += [] if target.exists() else [target]
                item.replace(target)
        except BaseException:
            for path in new:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            raise

    def _tree(
        self,
        source: _Source,
        entries: Iterable[Entry],
        notes: Iterable[tuple[str, str]],
        aside: Path,
        calls: Calls,
    ) -> dict[str, Any]:
        for entry in entries:
            node, port, keys = calls.place(entry.site)
            stem = calls.stem(entry.site) + place_of(entry.step, entry.rank)
            described = self._describe(source.tensor(entry), stem, aside)
            if not is_positional(entry.site):
                described["site"] = entry.site
            put(node, port, keys, described)
        for site, text in notes:
            node, port, keys = calls.place(site)
            put(node, port, keys, text)
        return calls.tree()

    def _describe(self, tensor: Tensor, stem: str, aside: Path) -> dict[str, Any]:
        found = statistics_of(stream_of(values_of(tensor).array), has_median=False)
        num_nonfinite = found.num_nan + found.num_inf
        described: dict[str, Any] = {"shape": repr(tensor.shape), "dtype": repr(tensor.dtype)}
        # safetensors has no such dtype: all of it is printed, to the last digit.
        no_file = tensor.dtype is torch.complex128 and not self._use_repr
        if self._use_repr or no_file:
            more = {"precision": 17, "threshold": tensor.numel() + 1} if no_file else {}
            with torch._tensor_str.printoptions(sci_mode=True, linewidth=120, **more):
                described["value"] = str(tensor).splitlines()
            if any("..." in line for line in described["value"]):
                data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                described["crc32"] = f"{crc32(data):08x}"
        else:
            name = self._file_name(stem)
            save_safetensors({"data": tensor.contiguous()}, aside / f"{name}.safetensors")
            described["value"] = f"./{name}.safetensors"
        if found.num_elements and not num_nonfinite and tensor.dtype in MEASURED:
            described |= measured(tensor)
        elif found.mean is not None:
            for key in ("mean", "std", "min", "max"):
                described[key] = f"tensor({getattr(found, key):.4e})"
        if num_nonfinite:
            where = (~tensor.isfinite()).flatten().nonzero()[0].item()
            index = torch.unravel_index(torch.tensor(where), tensor.shape)
            described["num_nan"] = found.num_nan
            described["num_inf"] = found.num_inf
            described["first_nonfinite"] = [int(i) for i in index]
        return described

    def _file_name(self, stem: str) -> str:
        """Return a name for a file, each its own, for any name of the tensor."""
        name = _NOT_IN_NAMES.sub("_", stem).encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
        found, number = name, 1
        while found.lower() in self._names:
            number += 1
            found = f"{name}-{number}"
        self._names.add(found.lower())
        return found

    def _save(self, tree: dict[str, Any], place: str, aside: Path) -> list[str]:
        base = _NOT_IN_NAMES.sub("_", self._class_name) + f"_debug_tree{place}"
        for end, document in ((FULL, tree), (SUMMARY, without_values(tree))):
            text = json.dumps(document, indent=2, ensure_ascii=False)
            (aside / f"{base}{end}").write_text(text, encoding="utf-8", errors="surrogatepass")
        return [f"{base}{FULL}", f"{base}{SUMMARY}"]
