"""What two sides and the arguments of a comparison must satisfy before anything is judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from glassengine.errors import IncomparableError, UnknownNameError, UsageError, first_line
from glassengine.recording.read.source import TensorSource
from glassengine.recording.write.policy import NO_VALUES
from glassengine.results import VERDICTS, Skipped
from glassengine.sites import ROOT, matches


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
    got = f"{len(rows_x)} and {len(rows_y)} rows" if where is None else f"the first difference is in row {where}"
    raise IncomparableError(
        "the two sides were run on different token ids",
        got=f"{left.path} and {right.path}: {got}",
        expected="the same token ids: what follows a different token is different for good reasons",
        hint=f"record the candidate on the baseline's tokens: glass record TARGET --tokens-of {left.path}",
    )


def _has_inputs(side: TensorSource) -> bool:
    return any(entry.site.startswith(f"{ROOT}:in") and entry.dtype == "int64" for entry in side.entries)


def _are_shares(x: Sequence[Any], y: Sequence[Any]) -> bool:
    """Whether both sides have the same rows in any order, or the same tokens where rows are cut."""
    if all(isinstance(row, list) for row in (*x, *y)):
        if {len(row) for row in x} == {len(row) for row in y}:
            return set(map(tuple, x)) == set(map(tuple, y))
        return {token for row in x for token in row} == {token for row in y for token in row}
    return False


def require_names(patterns: Sequence[str], *sides: TensorSource) -> None:
    """Raise an `UnknownNameError` where a pattern names no tensor of any of `sides`."""
    names = list(dict.fromkeys(entry.site for side in sides for entry in side.entries))
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise UnknownNameError("tensor", pattern, names)


def check_arguments(rtol: float | None, atol: float | None, fail_on: str, min_coverage: float, device: str) -> None:
    """Raise a `UsageError` that names the flag where an argument of `compare` makes no sense."""
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not value >= 0:
            raise UsageError(f"invalid --{name}", got=str(value), expected="a number from 0 on")
    if not 0 <= min_coverage <= 1:
        raise UsageError("invalid --min-coverage", got=str(min_coverage), expected="a share from 0 to 1")
    if fail_on not in VERDICTS[1:]:
        raise UsageError("invalid --fail-on", got=fail_on, expected=VERDICTS[1:])
    if device == "cpu":
        return
    import torch

    try:
        torch.zeros(1, dtype=torch.float64, device=device) + 1
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = first_line(error)
        raise UsageError(
            "the device cannot be used",
            got=f"{device}: {reason}",
            expected="a device with float64",
            hint="--device cpu",
        ) from error


def nothing_to_compare(
    left: TensorSource, right: TensorSource, impossible: Sequence[Skipped] = ()
) -> IncomparableError:
    """Return the error to raise where no pair is left to judge.

    Args:
        left: The baseline.
        right: The candidate.
        impossible: Tensors that both sides have, and that the parts of the ranks do not make up.
    """
    if impossible:
        first, *others = impossible
        return IncomparableError(
            "there is nothing to compare: the tensors of the ranks do not make up those of the other side",
            got=f"step {first.step}, {first.site}: {first.reason}" + (f"; so {len(others)} more" if others else ""),
            expected="ranks that share rows and positions out, or have all of them",
            hint="pad the rows of all ranks to one length, or compare a rank alone: RUN/rank0 with its own baseline",
        )

    def describe(side: TensorSource) -> str:
        steps = sorted({entry.step for entry in side.entries})
        some = ", ".join(entry.site for entry in side.entries[:3])
        without = f", {len(side.skipped)} without values ({side.skipped[0].reason})" if side.skipped else ""
        return f"{side.path}: {len(side.entries)} tensors, steps {steps[:5]}, {some or 'none'}{without}"

    empty = [side for side in (left, right) if not side.entries]
    without_values = any(item.reason == NO_VALUES for side in empty for item in side.skipped)
    return IncomparableError(
        "there is nothing to compare: no tensor of the baseline has a partner in the candidate",
        got=f"baseline: {describe(left)}; candidate: {describe(right)}",
        expected="the same name, step and rank on both sides",
        hint="record values, without --no-values" if without_values else "say which names belong together: --map FILE",
    )
