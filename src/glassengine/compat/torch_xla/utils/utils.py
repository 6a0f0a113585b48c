"""`torch_xla.utils.utils`, imported as `xu`: data for examples that need none of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class SampleGenerator:
    """The same batch again and again, in place of a data set.

    Args:
        data: The batch.
        sample_count: How often it comes.
    """

    def __init__(self, data: Any, sample_count: int) -> None:
        self._data = data
        self._count = sample_count
        self._left = sample_count

    def __iter__(self) -> Iterator[Any]:
        """Return it from the start."""
        return SampleGenerator(self._data, self._count)

    def __next__(self) -> Any:
        """Return the batch."""
        if self._left <= 0:
            raise StopIteration
        self._left -= 1
        return self._data

    def __len__(self) -> int:
        """Return how often it comes."""
        return self._count
