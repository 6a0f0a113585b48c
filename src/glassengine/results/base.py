"""Base of every result: verdicts, a frozen dataclass that becomes JSON, and the document of an error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from glassengine.errors import GlassError

Verdict = Literal["identical", "rounding", "suspicious", "wrong"]
VERDICTS: tuple[Verdict, ...] = ("identical", "rounding", "suspicious", "wrong")
FLAGGED = VERDICTS[2:]
Item = TypeVar("Item", covariant=True)


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the worst verdict of `verdicts`; `identical` when there is none."""
    return max(verdicts, key=VERDICTS.index, default="identical")


class Result:
    """Shared behavior of result dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict: non-finite floats become the strings "nan", "inf" and "-inf"."""
        return {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def streamed(self) -> dict[str, Any]:
        """Return the same, with sequences that make their items when they are asked for as they are."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {name: value if is_lazy(value) else plain(value) for name, value in fields.items()}


class Lazy(Sequence[Item]):
    """A sequence that is equal to any other one with the same items; nothing of it is kept."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...

    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        """Return one item, or several."""
        places = range(len(self))[index]
        return self._item(places) if isinstance(places, int) else tuple(map(self._item, places))

    def _item(self, place: int) -> Item:
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        """Compare item by item, also with a tuple or list."""
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def is_lazy(value: Any) -> bool:
    """Whether a value is a sequence that makes its items when they are asked for."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, list, tuple))


def plain(value: Any) -> Any:
    """Return `value` with what JSON does not know in its words: dataclasses, tuples, numbers that are not finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or is_lazy(value):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@dataclass(frozen=True)
class Message(Result):
    """The parts of an error message.

    Attributes:
        what: What failed.
        got: What was there.
        expected: What was expected or is available, the nearest first.
        hint: The flag or call that helps.
    """

    what: str
    got: str | None
    expected: str | None
    hint: str | None


@dataclass(frozen=True)
class Failure(Result):
    """A command that ended with an error, in place of its result.

    Attributes:
        error: The message, also on stderr.
        exit_status: Of the command.
        ok: Always false.
    """

    error: Message
    exit_status: int
    ok: bool = False
    schema_version: int = 1


def failure(error: GlassError, exit_status: int) -> Failure:
    """Return the document of an error."""
    return Failure(Message(error.what, error.got, error.expected, error.hint), exit_status)
