"""The tensors of one step by name: `session.debug_buffers`, also of a prefill that ran in pieces.

The program's sites state how a tensor runs along the tokens: on an axis of its own, or on one that batch and tokens
share. What runs along the cache and not along the tokens is, after the last piece, as it is after the step. What
depends on neither must be the same in every piece. Anything else has no value for the prefill as a whole.

Shape legend: B batch, S tokens of the prefill, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from glassengine.engine.manifest import AddedOutput
from glassengine.engine.session.loaded import LoadedEngine
from glassengine.errors import UnknownNameError, UsageError
from glassengine.program.representation.outputs import PREFIX
from glassengine.sites import SiteTable, matches, patterns_of


class UnknownBufferError(UnknownNameError, KeyError):
    """A name that no tensor of the step has; a KeyError as well, as of any dict."""


class DebugBuffers(dict[str, torch.Tensor]):
    """A dict in which a tensor is also found by any other name of its own: `buffers["layers.6.mlp_output"]`.

    That is its site or node, or a pattern that names this tensor and no other, such as the end of its site. Only
    `buffers[name]` looks that far: keys, `in` and `get` know the names alone that it was asked for by.
    """

    def __init__(self, values: Mapping[str, torch.Tensor], added_outputs: Mapping[str, AddedOutput]) -> None:
        super().__init__(values)
        self._added_outputs = added_outputs

    def __missing__(self, wanted: str) -> torch.Tensor:
        added = [self._added_outputs[name] for name in self if name in self._added_outputs]
        known = [(name, name) for name in self]
        known += [(other, entry.name) for entry in added for other in (entry.site, entry.node)]
        found = {name for other, name in known if other == wanted}
        found = found or {name for other, name in known if matches(wanted, other)}
        if len(found) == 1:
            return self[found.pop()]
        kind = "tensor of this step" if not found else "single tensor of this step"
        raise UnknownBufferError(kind, wanted, self, hint="session.debug_buffers.keys() has the names")

    def __reduce__(self) -> Any:
        # What is saved is a plain dict, which `torch.load(weights_only=True)` reads and `glass compare` does.
        return OrderedDict, (), None, None, iter(self.items())


def select_names(engine: LoadedEngine, patterns: Sequence[str]) -> list[str]:
    """Return what of an engine's inputs and outputs `patterns` name, in the engine's order.

    Raises:
        UsageError: A pattern names a site of the program that was not built as an output.
        UnknownNameError: It names nothing at all.
    """
    wanted: set[str] = set()
    for pattern in patterns_of(patterns, "debug"):
        found = {name for name in engine.debug_names if name == pattern}
        found = found or {e.name for e in engine.manifest.added_outputs if pattern in (e.site, e.node)}
        found = found or {
            name
            for name in engine.debug_names
            if matches(pattern, name)
            or (name in engine.added_outputs and matches(pattern, engine.added_outputs[name].site))
        }
        sites = [] if found else engine.sites.match(pattern)
        nodes = {site.node for site in sites}
        found = found or {entry.name for entry in engine.manifest.added_outputs if entry.node in nodes}
        if sites and not found:
            raise UsageError(
                f"{pattern!r} is in the program, but was not built as an output of the engine {engine.manifest.name!r}",
                expected=[entry.name for entry in engine.manifest.added_outputs] or "no added outputs",
                hint=f"glass build {engine.manifest.model.get('spec', 'MODEL')} --add-output '{pattern}'",
            )
        if not found:
            names = [*engine.debug_names, *(site.name for site in engine.sites)]
            raise UnknownNameError("output", pattern, names, hint=f"glass sites {engine.directory}")
        wanted |= found
    return [name for name in engine.debug_names if name in wanted]


MAX_LOGITS_BYTES = 512 << 20
"""Most bytes of logits that one piece of a prefill makes when nothing says how large a piece may be."""

_FLAT = "batch*sequence"

MIN_TOKENS = 16
"""Smallest piece chosen automatically: every piece reads all weights again."""


def automatic_chunk(batch_size: int, vocab_size: int | None, itemsize: int) -> int:
    """Return the most tokens of one piece: as many as keep its logits [B, S, V] within `MAX_LOGITS_BYTES`."""
    return max(MAX_LOGITS_BYTES // max(batch_size * (vocab_size or 1) * itemsize, 1), MIN_TOKENS)


class PieceOutputs(Mapping[str, torch.Tensor]):
    """Outputs by name, each put together when it is first asked for.

    `pieces` are the outputs of each piece, if they were kept; `nodes` maps results to nodes.
    """

    def __init__(
        self, pieces: Sequence[Mapping[str, torch.Tensor]], batch_size: int, sites: SiteTable, nodes: Mapping[str, str]
    ) -> None:
        self._pieces, self._batch_size, self._sites, self._nodes = pieces, batch_size, sites, nodes
        self._joined: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._joined:
            self._joined[name] = self._join(name)
        return self._joined[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces[0] if self._pieces else ())

    def __len__(self) -> int:
        return len(self._pieces[0]) if self._pieces else 0

    def joinable(self) -> dict[str, torch.Tensor]:
        """Return all outputs that have a value for the whole prefill."""
        joinable = {}
        for name in self:
            try:
                joinable[name] = self[name]
            except UsageError:
                continue
        return joinable

    @functools.cached_property
    def _rows_are_batch_major(self) -> bool:
        """Whether rows on a shared axis are certain to be those of the first sequence, then of the second, ..."""
        tokens_first = (site.axes.get("sequence", math.inf) < site.axes.get("batch", -1) for site in self._sites)
        return not any(tokens_first) and not any("/sort." in site.name for site in self._sites)

    def _join(self, name: str) -> torch.Tensor:
        if not self._pieces:
            raise UsageError(
                f"{name!r} of this prefill was not kept: it ran in pieces", hint="session.prefill(..., keep=True)"
            )
        values = [piece[name] for piece in self._pieces]
        site = self._sites.by_node[self._nodes.get(name, name.removeprefix(PREFIX))][0]
        if site.op == "arange" and site.shape == ("sequence",):
            # Each piece counts its own tokens; the mask code of transformers adds where it starts.
            starts = itertools.accumulate((len(value) for value in values), initial=0)
            return torch.cat([value + start for value, start in zip(values, starts, strict=False)])
        if "sequence" in site.axes:
            return torch.cat(values, dim=site.axes["sequence"])
        if _FLAT in site.shape and self._rows_are_batch_major:
            axis = site.shape.index(_FLAT)
            split = [torch.unflatten(value, axis, (self._batch_size, -1)) for value in values]
            return torch.cat(split, dim=axis + 1).flatten(axis, axis + 1)
        along_tokens = any("sequence" in str(size) for size in site.shape)
        if not along_tokens and ("cache" in site.axes or all(torch.equal(value, values[0]) for value in values[1:])):
            return values[-1]
        raise UsageError(
            f"{site.name!r} cannot be put together from the pieces of a prefill",
            got=f"shape [{', '.join(map(str, site.shape))}] in {len(values)} pieces",
            expected="one axis that runs along the tokens",
            hint="run the prompt in one piece: prefill_chunk=LENGTH (--prefill-chunk LENGTH)",
        )
