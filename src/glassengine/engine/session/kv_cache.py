"""The static key/value cache of one session.

Shape legend: B batch, H key/value heads, T cache length, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from glassengine.accelerators import require_device
from glassengine.engine.store.manifest import Manifest


class KVCache:
    """Cache tensors [B, H, T, D] by `past_*` name, allocated once.

    A back-end that mutates writes into them; a functional one returns new tensors, which then take their place.

    Attributes:
        tensors: What the next step reads.
    """

    def __init__(self, manifest: Manifest, batch_size: int, length: int) -> None:
        elsewhere = f"to run it here: glass build {manifest.model.get('spec')} --backend inductor --device cpu"
        require_device(manifest.device, f"the engine {manifest.name!r}", hint=elsewhere)
        self._presents = manifest.caches
        self._mutated = manifest.kv == "mutated"
        entries = {entry.name: entry for entry in manifest.inputs if entry.name in manifest.caches}
        sizes = {"batch": batch_size, "cache": length}
        self.tensors: dict[str, torch.Tensor] = {
            name: torch.zeros(
                [size if isinstance(size, int) else sizes[size] for size in entry.shape],
                dtype=getattr(torch, entry.dtype),
                device=manifest.device,
            )
            for name, entry in entries.items()
        }

    def update(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Take over the caches that a step returned."""
        if not self._mutated:
            for past, present in self._presents.items():
                self.tensors[past] = outputs[present]
