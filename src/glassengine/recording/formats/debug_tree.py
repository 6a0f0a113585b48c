"""Writes what the debugger of transformers writes: a pair of JSON files, and on request one file per tensor.

    <Class>_debug_tree_FULL_TENSORS.json   the tree of the calls: inputs and results of every module, with values
    <Class>_debug_tree_SUMMARY.json        the same without values
    <Class>.<path>_inputs_args_0.safetensors, ..._inputs_kwargs_<key>, ..._outputs, ..._outputs_<index>

Beyond the original: results of containers are kept; later steps and ranks have files of their own, as in
`_debug_tree_step1`; later calls of a module have a number ("call") and file names of their own; caches are under "kv".
Statistics are the original's to the last digit where all elements are finite; else those of the finite ones, and the
others are counted. A node is inside of the call that called it where the calls are known, as in the original, else in
the module that holds it. Text that shows only the edges of a
tensor carries a checksum of the whole, so that the files are equal only where the values are.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from glassengine import blocks
from glassengine.errors import UsageError
from glassengine.recording.formats.debug_calls import (
    MEASURED,
    Calls,
    CallsOfSteps,
    Notes,
    is_told_by_its_place,
    measured,
    place_of,
    put,
    without_values,
)
from glassengine.recording.formats.debugger_file import FULL, SUMMARY
from glassengine.recording.layout.layout import Entry
from glassengine.writing.checksums import crc32
from glassengine.writing.files import remove_tree, save_safetensors

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
        """Write a tree of each step and rank, and return the JSON files.

        Args:
            source: Has the values.
            entries: What of it is written.
            notes: What the trees say beside it.
            calls: Who called whom; None nests by module path.

        Raises:
            UsageError: The directory cannot be written.
        """
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
            if not is_told_by_its_place(entry.site):
                described["site"] = entry.site
            put(node, port, keys, described)
        for site, text in notes:
            node, port, keys = calls.place(site)
            put(node, port, keys, text)
        return calls.tree()

    def _describe(self, tensor: Tensor, stem: str, aside: Path) -> dict[str, Any]:
        found = blocks.moments(blocks.real_stream(tensor))
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
        if found.num_finite == found.num_elements and found.num_elements and tensor.dtype in MEASURED:
            described |= measured(tensor)
        elif found.num_finite:
            std = math.sqrt(found.m2 / max(found.num_finite - 1, 1))
            for key, value in {"mean": found.mean, "std": std, "min": found.min, "max": found.max}.items():
                described[key] = f"tensor({value:.4e})"
        if found.num_finite < found.num_elements:
            where = (~tensor.isfinite()).flatten().nonzero()[0].item()
            index = torch.unravel_index(torch.tensor(where), tensor.shape)
            described["num_nan"] = found.num_nan
            described["num_inf"] = found.num_elements - found.num_finite - found.num_nan
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
