"""Steps of generated inputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from glassengine.results.answer import Origin


class MadeUp(list[dict[str, Any]]):
    """Generated steps.

    Args:
        steps: Keyword arguments of each.
        recipes: How each input was made, by name, in words.
        origin: Where they come from.
        num_in_file: How many of them, the first ones, are stored in the file of the model.
    """

    def __init__(
        self,
        steps: Iterable[dict[str, Any]] = (),
        *,
        recipes: Mapping[str, str] | None = None,
        origin: Origin = "made up",
        num_in_file: int = 0,
    ) -> None:
        super().__init__(steps)
        self.recipes = dict(recipes or {})
        self.origin: Origin = origin
        self.num_in_file = num_in_file
