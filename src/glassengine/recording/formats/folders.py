"""Directories of files that other tools and `glass run` write: a file a step, a tensor, a forward.

    StepFiles      `step{i}.pt` and `rank{r}/step{i}.pt`: Ditto, `glass run --debug-format pt`
    NpyFolder      `<name>-step<i>.npy`: TensorRT-LLM, `glass run --debug-format npy`
    PassFolder     `TP0_PP0_Rank0_pid123/Pass00000.pt`: SGLang with `--debug-tensor-dump-output-folder`
    DumperFolder   `step=0___rank=0___dump_index=1___name=attn_out.pt`: the dumper of SGLang
    ServerFolder   `rank0/forward-{n}.safetensors`: the plug-in in vLLM

What is neither a tensor nor known to belong to one is listed as skipped. Readers raise CorruptError for a file that is
damaged or would run code.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from glassengine.errors import CorruptError, UsageError
from glassengine.reading.documents import read_document
from glassengine.reading.tensors import read_torch
from glassengine.recording.formats.files import (
    KINDS,
    ForeignTensors,
    SafetensorsFile,
    TensorFile,
    TorchFile,
    describe,
    map_array,
    torch_entry,
    why_not_a_tensor,
)
from glassengine.recording.layout.layout import STORED, Entry
from glassengine.results import Skipped
from glassengine.sites import ROOT, port_site, with_call

if TYPE_CHECKING:
    from torch import Tensor


_STEP = re.compile(r"step(\d{1,9})")
_RANK = re.compile(r"rank(\d{1,9})")
_EARLIER = re.compile(r"earlier-\d+")
_SUFFIXES = tuple(suffix for suffix in KINDS if suffix != ".npy")


class StepFolder(ForeignTensors):
    """Tensors of a directory of step files; step and rank are those of the names of file and directory.

    One file at a time is open. It is complete where every rank has every step from the first to the last.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files: dict[tuple[int, int], Path] = {}
        self._open: tuple[Path, TensorFile, frozenset[Entry]] | None = None
        num_arrays = 0
        for name, file, step, rank in _listing(path):
            if step is not None and (step, rank) not in self._files:
                self._files[step, rank] = file
            elif step is not None:
                self._add(name, f"step {step} is read from {self._files[step, rank].name}", step=step)
            elif file.suffix.lower() == ".npy" and not file.is_symlink():
                num_arrays += 1
            else:
                self._add(name, _why_not_listed(file, "not a file of a step: step<i>.pt"), step=None)
        if num_arrays:
            # `--debug-format pt --debug-format npy` writes every tensor twice: one line reports it.
            reason = f"{num_arrays} arrays of their own: where there are files of whole steps, those are read"
            self._add("*.npy", reason, step=None)
        for (step, rank), file in sorted(self._files.items()):
            source, _ = self._file(file)
            self.entries += [dataclasses.replace(entry, step=step, rank=rank) for entry in source.entries]
            self.skipped += [dataclasses.replace(item, step=step) for item in source.skipped]
        steps, ranks = ({place[at] for place in self._files} for at in (0, 1))
        self.complete = len(self._files) == (max(steps) - min(steps) + 1) * len(ranks)

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped where the format allows."""
        file = self._files[entry.step, entry.rank]
        source, there = self._file(file)
        plain = dataclasses.replace(entry, step=0, rank=0)
        if plain not in there:
            raise _changed(file)
        return source.tensor(plain)

    def _file(self, path: Path) -> tuple[TensorFile, frozenset[Entry]]:
        # Tensors are asked for step by step: one open file bounds what is mapped, for any number of steps.
        if self._open is None or self._open[0] != path:
            if path.is_symlink() or not path.is_file():
                raise CorruptError("not a plain file", got=str(path))
            source = KINDS[path.suffix.lower()](path)
            self._open = path, source, frozenset(source.entries)
        return self._open[1:]


def _changed(file: Path) -> CorruptError:
    return CorruptError("a file changed while it was being read", got=str(file))


def _why_not_listed(item: Path, otherwise: str) -> str:
    """Return why something in a directory is not read."""
    if item.is_symlink():
        return "a link, which could leave the directory"
    return "a directory of another kind" if item.is_dir() else otherwise


def holds_step_files(path: Path) -> bool:
    """Return whether `path` is a directory of step files."""
    return any(step is not None for _, _, step, _ in _listing(path))


def _listing(path: Path) -> Iterator[tuple[str, Path, int | None, int]]:
    """Yield (name inside `path`, file, step or None when it is not a step file, rank), in order of the names."""
    for item in sorted(path.iterdir()):
        found = _RANK.fullmatch(item.name)
        if found is not None and item.is_dir() and not item.is_symlink():
            for inner in sorted(item.iterdir()):
                yield from _one(inner, f"{item.name}/{inner.name}", int(found[1]))
        elif _EARLIER.fullmatch(item.name) is None:
            yield from _one(item, item.name, 0)


def _one(item: Path, name: str, rank: int) -> Iterator[tuple[str, Path, int | None, int]]:
    found = _STEP.fullmatch(item.stem)
    suffix = item.suffix.lower()
    if found is not None and suffix in _SUFFIXES and item.is_file() and not item.is_symlink():
        yield name, item, int(found[1]), rank
    elif not (found is not None and suffix == ".txt") and item.name != "npy-names.json":
        yield name, item, None, rank


_ARRAY_STEP = re.compile(r"(.+)-step(\d{1,9})")
_FOLDER = re.compile(r"tllm_debug|(?P<kind>PP|TP|rank|iteration)_?(?P<number>\d{1,9})")
_MAX_DEPTH = 4
_NAMES = "npy-names.json"
_MAX_NAMES_BYTES = 1 << 26


class NpyFolder(ForeignTensors):
    """Tensors of a directory of `.npy` files, sorted by step, rank and name: such a dump has no other order.

    `tllm_debug/PP_x/TP_y/` of TensorRT-LLM are ranks, counted stage by stage from the lowest numbers that are there;
    `iteration_<n>/` (the executor's dump) is step n, and a name without either is step 0. Where `npy-names.json` stands
    beside the arrays (`glass run --debug-format npy`), it gives back the names and dtypes that a file cannot have. Only
    headers are read until a tensor is asked for. Texts that accompany an array are passed over.
    """

    _same_name = "two files have this name, step and rank"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        arrays: list[tuple[Path, dict[str, int]]] = []
        for item, where, reason in _array_listing(path, {}, 0):
            if reason is None:
                arrays.append((item, where))
            else:
                self._add(str(item.relative_to(path)), reason, step=None)
        ranks = _ranks([where for _, where in arrays])
        known = {folder: _names(folder) for folder in {file.parent for file, _ in arrays}}
        for (file, where), rank in zip(arrays, ranks, strict=True):
            found = _ARRAY_STEP.fullmatch(file.stem)
            stem, step = (found[1], int(found[2])) if found else (file.stem, where.get("iteration", 0))
            site, dtype = known[file.parent].get(stem, (stem, ""))
            entry = describe(file, site, step=step, rank=rank)
            if isinstance(entry, Entry) and entry.dtype == "float32" and dtype in STORED:
                entry = dataclasses.replace(entry, dtype=dtype)
            self._add(str(file.relative_to(path)), entry, file, step=step)
        self.entries.sort(key=lambda entry: (entry.step, entry.rank, _natural(entry.site)))

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped."""
        import torch

        file = self._values[entry.place]
        stored = describe(file, entry.site, step=entry.step, rank=entry.rank)
        if isinstance(stored, str) or stored.shape != entry.shape:
            raise _changed(file)
        wanted: torch.dtype = getattr(torch, entry.dtype)
        return map_array(file, stored).to(wanted)


def holds_arrays(path: Path) -> bool:
    """Return whether `path` is a directory of `.npy` files."""
    return any(reason is None for _, _, reason in _array_listing(path, {}, 0))


def _array_listing(path: Path, above: dict[str, int], depth: int) -> Iterator[tuple[Path, dict[str, int], str | None]]:
    """Yield (item, numbers of the directories above it, why it is not an array or None), in order of the names."""
    for item in sorted(path.iterdir()):
        if item.is_symlink():
            yield item, above, _why_not_listed(item, "")
        elif item.is_dir():
            found = _FOLDER.fullmatch(item.name)
            if found is not None and depth < _MAX_DEPTH:
                numbers = {found["kind"]: int(found["number"])} if found["kind"] else {}
                yield from _array_listing(item, {**above, **numbers}, depth + 1)
            elif _EARLIER.fullmatch(item.name) is None:
                yield item, above, _why_not_listed(item, "")
        elif item.is_file() and item.suffix.lower() == ".npy":
            yield item, above, None
        elif item.name != _NAMES and not (item.suffix.lower() == ".txt" and item.with_suffix(".npy").exists()):
            yield item, above, "not an .npy file"


class _ArrayName(msgspec.Struct):
    name: str
    dtype: str | None = None


class _ArrayNames(msgspec.Struct):
    files: dict[str, _ArrayName]


def _names(folder: Path) -> dict[str, tuple[str, str]]:
    """Return the content of `npy-names.json`, if it exists: stem of the files -> name of the tensor and its dtype."""
    if not (folder / _NAMES).exists():
        return {}
    limits: dict[str, Any] = {"what": "the list of names of the arrays", "version": 1}
    document = read_document(folder / _NAMES, _ArrayNames, most=_MAX_NAMES_BYTES, inside=folder, **limits)
    return {stem: (of.name, str(of.dtype)) for stem, of in document.files.items()}


def _ranks(places: list[dict[str, int]]) -> list[int]:
    """Return the rank of each place: stage by stage, since a stage holds all its tensor-parallel ranks."""
    first = {kind: min((place.get(kind, 0) for place in places), default=0) for kind in ("PP", "TP")}
    in_stage = max((place.get("TP", 0) - first["TP"] for place in places), default=0) + 1
    return [
        place["rank"]
        if "rank" in place
        else (place.get("PP", 0) - first["PP"]) * in_stage + place.get("TP", 0) - first["TP"]
        for place in places
    ]


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts "layers.10" after "layers.9"."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


_PROCESS = re.compile(r"TP(\d{1,6})_PP(\d{1,6})_Rank(\d{1,6})_pid(\d{1,10})")
_PASS = re.compile(r"Pass(\d{1,9})\.pt")
_BEHIND = ("model", "logits_processor", "lm_head", "pooler")
"""Modules that are called, or end, when the file of their forward has been written."""
_MOST_VALUES = 400_000


class PassFolder(ForeignTensors):
    """Tensors of the forwards of each process of SGLang; a file is a dict, module -> a tensor or a list of them.

    It is written when the decoder ends, so what is called behind it, scores above all, is in the next one: here it is
    in its own step. Two processes of one rank, of two servers, are refused.
    """

    def __init__(self, path: Path, processes: Sequence[tuple[int, Path]]) -> None:
        super().__init__(path)
        self.metadata = {"kind": "model", "layout": "sglang", "as_deployed": True}
        self._open: tuple[Path, Mapping[tuple[str, int | None], Tensor]] | None = None
        ranks: dict[int, Path] = {}
        for rank, folder in processes:
            if rank in ranks:
                raise UsageError(
                    "the dump is of two servers",
                    got=f"{path}: {ranks[rank].name} and {folder.name}",
                    expected="one process for each rank",
                    hint=f"name one of them: {folder}",
                )
            ranks[rank] = folder
            for step, file in _passes(folder):
                if file.is_symlink():
                    self._add(file.name, _why_not_listed(file, ""), step=step)
                    continue
                for name, place, value in _values(file):
                    own = step - 1 if name in _BEHIND else step
                    site = name if place is None else f"{name}:out[{place}]"
                    reason = "of a forward before the first" if own < 0 else why_not_a_tensor(value)
                    self._add(site, reason or torch_entry(site, value, own, rank), (file, name, place), step=step)
        self._sort()

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped."""
        import torch

        file, name, place = self._values[entry.place]
        if self._open is None or self._open[0] != file:
            self._open = (file, {(one, at): value for one, at, value in _values(file)})
        value = self._open[1].get((name, place))
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != entry.shape:
            raise _changed(file)
        return value


def open_passes(path: Path) -> PassFolder | None:
    """Open what SGLang wrote, of all processes or of one; None where something else did."""
    if not path.is_dir():
        return None
    own = _PROCESS.fullmatch(path.name)
    folders = [path] if own else sorted(item for item in path.iterdir() if _PROCESS.fullmatch(item.name))
    found = []
    for folder in folders:
        named = _PROCESS.fullmatch(folder.name)
        if named is not None and folder.is_dir() and not folder.is_symlink() and next(_passes(folder), None):
            found.append((int(named[3]), folder))
    return PassFolder(path, found) if found else None


def _passes(folder: Path) -> Iterator[tuple[int, Path]]:
    for item in sorted(folder.iterdir()):
        named = _PASS.fullmatch(item.name)
        if named is not None:
            yield int(named[1]), item


def _values(file: Path) -> Iterator[tuple[str, int | None, Any]]:
    """Yield module, place among several results, and value."""
    document = read_torch(file)
    if not isinstance(document, Mapping) or len(document) > _MOST_VALUES:
        raise CorruptError("not a forward of SGLang", got=f"{file}: {type(document).__name__}", expected="a dict")
    count = 0
    for name, value in document.items():
        parts = list(enumerate(value)) if isinstance(value, list | tuple) else [(None, value)]
        count += len(parts)
        if count > _MOST_VALUES:
            raise CorruptError("the file holds too much", got=str(file), expected=f"at most {_MOST_VALUES} tensors")
        for place, part in parts:
            yield str(name), place, part


_SEPARATOR = "___"
_STEPS = ("step", "forward_pass_id")
_INNER = re.compile(r"(?:(?P<path>.*)\.)?(?P<side>inputs|output)(?:\.(?P<key>[^.]+(?:\.[^.]+)?))?")
_HOOKED = "non_intrusive__"
# In every name, and no part of what the tensor is.
_NOT_A_NAME = {*_STEPS, "rank", "dump_index", "name", "pp_rank", "tp_rank", "cp_rank", "ep_rank", "etp_rank"}


class DumperFolder(ForeignTensors):
    """Tensors of a directory of files that SGLang's dumper wrote, in the order they were dumped.

    `step=0___rank=0___dump_index=1___name=attn_out___layer_id=3.pt` is the site `attn_out.layer_id=3`; what was
    recorded of modules without marks in the code (`non_intrusive__model.norm.output`) gets the site of the module. A
    name that a step has several times is the first, second, ... call: `attn_out`, `attn_out@1`.
    """

    def __init__(self, path: Path, files: list[tuple[Path, dict[str, str]]]) -> None:
        super().__init__(path)
        calls: Counter[tuple[str, int, int]] = Counter()
        for file, tags in sorted(files, key=lambda item: (int(item[1].get("dump_index", 0)), item[0].name)):
            step, rank = int(next(tags[key] for key in _STEPS if key in tags)), int(tags["rank"])
            name = _site(tags)
            base, port = name.partition(":")[::2]
            site = with_call(base, calls[name, step, rank]) + (f":{port}" if port else "")
            calls[name, step, rank] += 1
            found = _value(file)
            entry = found if isinstance(found, str) else dataclasses.replace(found[1], site=site, step=step, rank=rank)
            self._add(site, entry, file, step=step)
        self._sort()

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped."""
        file = self._values[entry.place]
        found = _value(file)
        if isinstance(found, str) or found[1].shape != entry.shape:
            raise _changed(file)
        return found[0].tensor(found[1])


def tags_of(path: Path) -> dict[str, str] | None:
    """Return what the name of a dumped file says; None when it is not the name of one."""
    if path.suffix != ".pt" or _SEPARATOR not in path.stem:
        return None
    tags = dict(part.split("=", 1) for part in path.stem.split(_SEPARATOR) if "=" in part)
    numbers = [tags.get("rank"), tags.get("dump_index", "0"), next((tags[key] for key in _STEPS if key in tags), None)]
    if "name" not in tags or not all(number is not None and re.fullmatch(r"\d{1,9}", number) for number in numbers):
        return None
    return tags


def open_dumped(path: Path) -> DumperFolder | None:
    """Open a directory of dumped files, or one of them; None when it is not one."""
    if path.is_file():
        tags = tags_of(path)
        return DumperFolder(path, [(path, tags)]) if tags is not None else None
    items = [(item, tags_of(item)) for item in sorted(path.iterdir())]
    files = [(item, tags) for item, tags in items if tags is not None and item.is_file() and not item.is_symlink()]
    if not files:
        return None
    found = DumperFolder(path, files)
    others = [(item, tags) for item, tags in items if (item, tags) not in files]
    found.skipped[:0] = [Skipped(item.name, "both", _why_not_dumped(tags)) for item, tags in others]
    return found


def _why_not_dumped(tags: dict[str, str] | None) -> str:
    if tags is None:
        return "not a file of the dumper: step=...___rank=...___name=...pt"
    return "a link, which could leave the directory"


def _site(tags: dict[str, str]) -> str:
    name = tags["name"]
    others = [
        f".{key}={value}"
        for key, value in tags.items()
        if key not in _NOT_A_NAME and (key, value) != ("recompute_status", "disabled")
    ]
    if not name.startswith(_HOOKED):
        return name + "".join(others)
    # The path of the module says the layer already.
    found = _INNER.fullmatch(name.removeprefix(_HOOKED))
    if found is None:
        return name + "".join(others)
    port = ":in" if found["side"] == "inputs" else ":out"
    for key in (found["key"] or "").split("."):
        port += f"[{key}]" if key.isdecimal() else f".{key}" if key else ""
    return port_site(found["path"] or ROOT, port)


def _value(path: Path) -> tuple[TorchFile, Entry] | str:
    """Return the tensor of a dumped file, or why it is not given as one."""
    source = TorchFile(path)
    for entry in _candidates(source):
        return source, entry
    reasons = [item.reason for item in source.skipped if item.site in ("value", "tensor")]
    return reasons[0] if reasons else "not one tensor"


def _candidates(source: TorchFile) -> Iterator[Entry]:
    # Older dumpers saved the tensor alone; newer ones save it beside a dict of facts.
    yield from (entry for entry in source.entries if entry.site == "value")
    if len(source.entries) == 1 and source.entries[0].site == "tensor":
        yield source.entries[0]


_MOST_FORWARDS = 1 << 16
_MOST_TEXT = 1 << 26


class ServerFolder(ForeignTensors):
    """Tensors of one process of a server, each forward a step.

    The header of a file says which rows are of which request, and how the server was started.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        super().__init__(path)
        files = sorted((path / f"rank{rank}").glob("forward-*.safetensors"))[:_MOST_FORWARDS]
        if not files:
            raise CorruptError("a process of the server has recorded nothing", got=str(path / f"rank{rank}"))
        self._files = [SafetensorsFile(file) for file in files]
        settings = _header_field(self._files[0], "facts")
        self.metadata = {
            "kind": "model",
            "layout": "vllm",
            "architecture": str(settings.get("architecture", "")),
            "dtype": str(settings.get("dtype", "")),
            "settings": settings,
            "as_deployed": True,
            "forwards": [_header_field(file, "forward").get("requests") for file in self._files],
        }
        self.entries = [
            dataclasses.replace(entry, step=step) for step, file in enumerate(self._files) for entry in file.entries
        ]

    def tensor(self, entry: Entry) -> Tensor:
        """Return the values of one of `entries`, mapped."""
        return self._files[entry.step].tensor(entry)


def ranks_of(source: Any) -> list[Any]:
    """Return a source for each process of a server whose model is spread over them; else the source itself."""
    world = (source.metadata.get("settings") or {}).get("world", 1)
    spread = (source.metadata.get("settings") or {}).get("tensor_parallel", 1)
    if not isinstance(source, ServerFolder) or not isinstance(world, int) or world != spread or not 1 < world <= 1024:
        return [source]
    return [source, *(ServerFolder(source.path, rank) for rank in range(1, world))]


def open_server_folder(path: Path) -> ServerFolder | None:
    """Open what the plug-in wrote; None where something else did."""
    if not path.is_dir() or next(path.glob("rank*/forward-*.safetensors"), None) is None:
        return None
    return ServerFolder(path)


def _header_field(file: SafetensorsFile, name: str) -> dict[str, Any]:
    text = file.metadata.get(name, "")
    try:
        found = json.loads(text) if isinstance(text, str) and len(text) <= _MOST_TEXT else None
    except (ValueError, RecursionError) as error:
        raise CorruptError("not a forward of a server", got=f"{file.path}: {error}") from error
    if not isinstance(found, dict):
        raise CorruptError("not a forward of a server", got=f"{file.path}: its header has no {name!r}")
    return found
