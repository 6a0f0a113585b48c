"""Differences between the artifacts of two builds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from glassengine.results.base import Result


@dataclass(frozen=True)
class Change(Result):
    """One difference between two stages.

    Attributes:
        kind: "added", "removed" or "changed".
        baseline: Line of the baseline's `graph.txt`; None where it has none.
        candidate: Line of the candidate's; None where it has none.
        sites: Names of the tensors.
    """

    kind: str
    baseline: str | None
    candidate: str | None
    sites: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The change as lines of a diff."""
        return [f"{sign} {text}" for sign, text in (("-", self.baseline), ("+", self.candidate)) if text is not None]


@dataclass(frozen=True)
class StageComparison(Result):
    """One stage of two builds.

    Attributes:
        name: Its name.
        status: "identical", "inherited" (it differs as the stages before it do), "different", "baseline only" or
            "candidate only".
        changes: What differs: between the two graphs where the status is "different", from the stage before it where
            only one side has the stage.
    """

    name: str
    status: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Difference(Result):
    """A setting, version or file that differs; a side that lacks it is None.

    Attributes:
        name: Of the setting, package or file.
        baseline: Its value.
        candidate: Likewise.
    """

    name: str
    baseline: Any
    candidate: Any


@dataclass(frozen=True)
class ArtifactComparison(Result):
    """What differs between the artifacts of two builds.

    Attributes:
        baseline: Directory.
        candidate: Directory.
        ok: Both builds ended well, and nothing differs that they decided: stages, options, versions, network.
        complete: Both builds ended well; of one that did not, only what it wrote was compared.
        stages: Each stage of either side, in order.
        differences: Options and versions that differ.
        files: Files of the back-end (network, plugins, sources) that differ.
        notes: What could not be compared, and why.
    """

    baseline: str
    candidate: str
    ok: bool
    complete: bool
    stages: tuple[StageComparison, ...]
    differences: tuple[Difference, ...]
    files: tuple[str, ...]
    notes: tuple[str, ...]
    schema_version: int = 1
