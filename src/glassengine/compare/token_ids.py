"""Refuses records of other token ids, and names how they differ; notes other settings of generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glassengine.errors import IncomparableError
from glassengine.recording.read.source import TensorSource
from glassengine.sites import ROOT

_SHOWN = 6
_LEAST = 3
"""Tokens by which a shifted row has to fit further, to be called shifted."""


def require_same_tokens(left: TensorSource, right: TensorSource) -> None:
    """Raise an `IncomparableError` where both sides know their token ids, and they differ."""
    x, y = left.metadata.get("token_ids"), right.metadata.get("token_ids")
    if x is None or y is None or x == y:
        return
    rows_x, rows_y = (side if isinstance(side, list) else [side] for side in (x, y))
    # In which order ranks have the rows of a batch, or which positions of them, their inputs tell, which are judged.
    num_ranks = [side.metadata.get("num_ranks", 1) for side in (left, right)]
    if max(num_ranks) > 1 and (_are_shares(rows_x, rows_y) or all(map(_has_inputs, (left, right)))):
        return
    where = next((i for i, (a, b) in enumerate(zip(rows_x, rows_y, strict=False)) if a != b), None)
    got, hint = f"{len(rows_x)} and {len(rows_y)} rows", None
    if where is not None:
        prompts = [_at(side.metadata.get("prompt_lengths"), where) for side in (left, right)]
        bos = (left.metadata.get("sampling") or {}).get("bos_token_id")
        how, is_generated = _difference(rows_x[where], rows_y[where], prompts, bos)
        got = f"the first difference is in row {where}: {how}{_of_texts(left, right)}"
        if is_generated and (apart := sampling_apart(left, right)):
            got += f"; {apart}"
        if not is_generated:
            hint = "compare the tokenizers: glass check-prompt BASELINE CANDIDATE"
    raise IncomparableError(
        "the two sides were run on different token ids",
        got=f"{left.path} and {right.path}: {got}",
        expected="the same token ids: what follows a different token is different for good reasons",
        hint=hint or f"record the candidate on the baseline's tokens: glass record TARGET --tokens-of {left.path}",
    )


def sampling_apart(left: TensorSource, right: TensorSource) -> str | None:
    """Return how the settings of generation differ, in words; None where they do not, or one side has none."""
    x, y = (side.metadata.get("sampling") for side in (left, right))
    if not isinstance(x, dict) or not isinstance(y, dict):
        return None
    names = [name for name in dict.fromkeys([*x, *y]) if x.get(name) != y.get(name)]
    differences = [
        f"{name} {x.get(name, 'not set')} in the baseline, {y.get(name, 'not set')} in the candidate" for name in names
    ]
    return f"the settings of generation differ: {'; '.join(differences)}" if differences else None


def _difference(x: Any, y: Any, prompts: Sequence[int | None], bos: Any) -> tuple[str, bool]:
    """Return how two rows differ, in words, and whether their prompts are the same."""
    if not isinstance(x, list) or not isinstance(y, list):
        return "other ids", False
    at = _agreeing(x, y)
    if y and _agreeing(x, y[1:]) >= min(at + _LEAST, len(x)):
        twice = y[1:2] == y[:1]
        return f"{'BOS twice' if twice else 'one id more at the front'}: the candidate begins with {y[:_SHOWN]}", False
    if x and _agreeing(x[1:], y) >= min(at + _LEAST, len(y)):
        what = "no BOS" if x[0] == bos else "one id fewer at the front"
        return f"{what}: the baseline begins with {x[:_SHOWN]}, the candidate with {y[:_SHOWN]}", False
    shown = f"{x[at : at + _SHOWN] or 'nothing'} in the baseline, {y[at : at + _SHOWN] or 'nothing'} in the candidate"
    if prompts[0] is not None and prompts[0] == prompts[1] and at >= prompts[0]:
        return f"the prompts are the same, generated token {at - prompts[0]} is another: {shown}", True
    return f"from position {at} on, {shown}", False


def _agreeing(x: Sequence[Any], y: Sequence[Any]) -> int:
    return next((i for i, (a, b) in enumerate(zip(x, y, strict=False)) if a != b), min(len(x), len(y)))


def _at(values: Any, where: int) -> int | None:
    return values[where] if isinstance(values, list) and where < len(values) else None


def _of_texts(left: TensorSource, right: TensorSource) -> str:
    x, y = left.metadata.get("prompt"), right.metadata.get("prompt")
    if not isinstance(x, str) or not isinstance(y, str):
        return ""
    if x == y:
        return "; the text of the prompt is the same: the tokenizers differ"
    at = _agreeing(x, y)
    return f"; the texts of the prompts differ: {x[at : at + 40]!r}, in the candidate {y[at : at + 40]!r}"


def _has_inputs(side: TensorSource) -> bool:
    return any(entry.site.startswith(f"{ROOT}:in") and entry.dtype == "int64" for entry in side.entries)


def _are_shares(x: Sequence[Any], y: Sequence[Any]) -> bool:
    """Whether both sides have the same rows in any order, or the same tokens where rows are cut."""
    if all(isinstance(row, list) for row in (*x, *y)):
        if {len(row) for row in x} == {len(row) for row in y}:
            return set(map(tuple, x)) == set(map(tuple, y))
        return {token for row in x for token in row} == {token for row in y for token in row}
    return False
