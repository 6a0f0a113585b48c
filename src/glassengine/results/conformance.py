"""The result of a back-end's conformance tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from glassengine.results.base import Result


@dataclass(frozen=True)
class Finding(Result):
    """Something that a back-end did wrong. `what` is a site, an input or an output."""

    step: int
    what: str
    problem: str


@dataclass(frozen=True)
class ConformanceReport(Result):
    """What was checked, what was not and why, and what was wrong."""

    num_checked: int
    findings: tuple[Finding, ...]
    skipped: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing was wrong."""
        return self.num_checked > 0 and not self.findings
