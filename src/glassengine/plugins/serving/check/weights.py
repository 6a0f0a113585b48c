"""The level `weights`: each tensor that an engine loads against the checkpoint's parameter, without running anything.

What a conversion typically gets wrong is tried on a tensor that is not the checkpoint's: the exchange of rotary pairs
and halves, the 1 of a norm, a transposition, parts of a fused weight in another order, another type of the same size. A
quantized tensor is judged by the step of each element (`numerics.weight_error`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from glassengine.judge.hypotheses.mistakes.weights_read import relation
from glassengine.numerics.judgement import unit_roundoff
from glassengine.numerics.weight_error import WeightError, judge_weight
from glassengine.results import Divergence, Hint, Kind, LevelResult, Pair, Skipped, Verdict, WeightsComparison, worst
from glassengine.results.pairs import BY_GRID
from glassengine.serving.protocol import ServedWeight

LEVEL = "weights"
_OF_DTYPE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_LOOSE = 4.0
_LEAST_DIMS = 2
_MOST_TOLD = 64
_FEW = 3
"""Most matrices of a type that are named."""


@dataclass(frozen=True)
class JudgedWeight:
    """One parameter: its verdict, and what is wrong with it. Its values are not kept."""

    name: str
    served: ServedWeight
    verdict: Verdict
    error: WeightError | None = None
    hints: tuple[Hint, ...] = ()
    is_matrix: bool = False

    @property
    def rms_steps(self) -> float | None:
        """Its error in steps, where it is quantized."""
        return None if self.error is None else self.error.rms_steps


@dataclass(frozen=True)
class WeightsFound:
    """What the level found.

    Attributes:
        judged: Parameters that the engine has a tensor for, in the order of the checkpoint.
        skipped: Those that it has none for, and its own that stand for none.
    """

    judged: tuple[JudgedWeight, ...]
    skipped: tuple[Skipped, ...]

    @property
    def wrong(self) -> list[JudgedWeight]:
        """What is not the checkpoint's."""
        return [one for one in self.judged if one.verdict == "wrong"]

    @property
    def right(self) -> dict[str, Verdict]:
        """The parameters that are right, "identical" or "rounding"."""
        return {one.name: one.verdict for one in self.judged if one.verdict in ("identical", "rounding")}

    @property
    def are_rounded(self) -> bool:
        """Whether a file has them in less than float32."""
        return any(one.verdict == "rounding" and set(one.served.types) - {"F32"} for one in self.judged)

    @property
    def unexplained(self) -> tuple[str, ...]:
        """Names of those that are not quantized and differ nevertheless."""
        return tuple(one.name for one in self.wrong if one.error is None)

    def types(self) -> Iterator[str]:
        """Yield the types of the matrices, and which few have another than all others."""
        stored: dict[str, str] = {}
        for one in self.judged:
            if one.is_matrix:
                stored.update(zip(one.served.stored, one.served.types, strict=False))
        counts = Counter(stored.values())
        if not counts:
            return
        most, _ = counts.most_common(1)[0]
        rare = {kind: number for kind, number in counts.items() if kind != most and number <= _FEW}
        named = [f"{name.removesuffix('.weight')} is {kind}" for name, kind in stored.items() if kind in rare]
        text = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
        yield f"types of {len(stored)} matrices: {text}" + (f" ({', '.join(named)})" if named else "")

    def comparison(self) -> WeightsComparison:
        """Return the same as part of a result."""
        return WeightsComparison(
            compared=len(self.judged),
            different=tuple(one.name for one in self.wrong),
            only_baseline=tuple(item.site.removesuffix(":param") for item in self.skipped if item.side == "baseline"),
            only_candidate=tuple(item.site for item in self.skipped if item.side == "candidate"),
            how=tuple(f"{one.name}: {'; '.join(hint.text for hint in one.hints)}" for one in self.wrong),
        )

    def pairs(self) -> list[Pair]:
        """Return a pair for each parameter."""
        return [
            Pair.of_weight(
                one.name,
                one.verdict,
                one.rms_steps,
                "; ".join(hint.text for hint in one.hints) or None,
                level=LEVEL,
                judged_by=BY_GRID if one.rms_steps is not None else "equality",
                candidate_site=" + ".join(one.served.stored),
            )
            for one in self.judged
        ]

    def divergences(self) -> list[Divergence]:
        """Return an origin for each mistake."""
        return [
            Divergence.without_run(
                f"{one.name}:param",
                one.verdict,
                one.hints,
                level=LEVEL,
                candidate_site=" + ".join(one.served.stored) or "-",
            )
            for one in self.wrong
        ]

    def level(self, baseline: str, candidate: str) -> LevelResult:
        """Return the level."""
        verdict = worst(one.verdict for one in self.judged) if self.judged else "identical"
        left = [item for item in self.skipped if item.side == "baseline"]
        share = len(self.judged) / max(1, len(self.judged) + len(left))
        first = next(iter(self.divergences()), None)
        return LevelResult(
            LEVEL,
            baseline,
            candidate,
            verdict,
            "every tensor, without running anything",
            len(self.judged),
            share,
            first,
        )


@torch.no_grad()
def judge_weights(
    parameters: Mapping[str, Tensor],
    served: Mapping[str, ServedWeight],
    extra: Sequence[str],
    heads: Mapping[str, int | None],
) -> WeightsFound:
    """Judge what an engine has for each parameter.

    Args:
        parameters: Of the checkpoint, tied ones by each of their names.
        served: What the engine has.
        extra: Its other tensors.
        heads: Numbers of the configuration, as `plugins.serving.alignment.numbers_of`.
    """
    judged: list[JudgedWeight] = []
    skipped = [
        Skipped(name, "candidate", "it stands for no parameter of the checkpoint", level=LEVEL) for name in extra
    ]
    for name, parameter in parameters.items():
        one = served.get(name)
        if one is None or (one.value is None and (not one.stored or one.types)):
            reason = "the candidate does not show it" if one is None else one.reason or "the candidate has none"
            skipped.append(Skipped(f"{name}:param", "baseline", reason, level=LEVEL))
        else:
            other_parameters = {other: tensor for other, tensor in parameters.items() if other != name}
            found = _judge(name, parameter.detach().float(), one, other_parameters, heads)
            is_matrix = parameter.dim() >= _LEAST_DIMS
            judged.append(replace(found, served=replace(one, value=None, step=None), is_matrix=is_matrix))
    return WeightsFound(tuple(judged), tuple(skipped))


def _judge(
    name: str,
    parameter: Tensor,
    served: ServedWeight,
    other_parameters: Mapping[str, Tensor],
    heads: Mapping[str, int | None],
) -> JudgedWeight:
    if served.value is None:
        kind: Kind = "bias missing" if parameter.dim() == 1 else "other"
        if not bool(parameter.any()):
            return JudgedWeight(name, served, "identical")  # nothing is added, nothing is missing
        return JudgedWeight(
            name, served, "wrong", None, (Hint(kind, f"{name}: {served.reason}", 1.0, evidence="weights"),)
        )
    if served.value.shape == parameter.shape and not bool(served.value.isfinite().all()):
        lost = ~served.value.isfinite()
        rows = lost.reshape(len(lost), -1).any(1).nonzero().flatten()
        where = f"{int(lost.sum())} of {lost.numel()} elements, in rows {int(rows[0])} to {int(rows[-1])}"
        bad = Hint("other", f"{name} has NaN or infinity in {where}", 1.0, evidence="not a number")
        return JudgedWeight(name, served, "wrong", None, (next(_bytes(name, parameter, served), bad),))
    verdict, error, hints = _within(parameter, served, served.value, served.step, other_parameters, name)
    if verdict != "wrong":
        return JudgedWeight(name, served, verdict, error)
    if served.tied:
        text = f"tied head: the file has no tensor for {name}, and {served.stored[0]} is read, which is another"
        return JudgedWeight(name, served, "wrong", error, (Hint("swapped", text, 1.0, evidence="tied"),))
    known = next(_mistakes(name, parameter, served, other_parameters, heads), None)
    return JudgedWeight(name, served, "wrong", error, (known,) if known is not None else hints)


def _within(
    parameter: Tensor,
    served: ServedWeight,
    value: Tensor,
    step: Tensor | None,
    other_parameters: Mapping[str, Tensor],
    name: str,
) -> tuple[Verdict, WeightError | None, tuple[Hint, ...]]:
    """Return the verdict of `value` as the parameter, its error where it is quantized, and hints."""
    if value.shape != parameter.shape:
        text = f"{name} has the shape {list(value.shape)}, in the checkpoint {list(parameter.shape)}"
        return "wrong", None, (Hint("other", text, 0.9, evidence="weights"),)
    if step is None or parameter.dim() < _LEAST_DIMS:
        if torch.equal(value, parameter):
            return "identical", None, ()
        dtype = max((_OF_DTYPE.get(one, torch.float32) for one in served.types), key=unit_roundoff)
        room = _LOOSE * unit_roundoff(dtype) * parameter.abs() + 2 * torch.finfo(dtype).smallest_normal * unit_roundoff(
            dtype
        )
        room = served.room + (0.0 if dtype is torch.float32 else 1.0) * room
        if bool(((value - parameter).abs() <= room).all()):
            return "rounding", None, ()
        kind, how = relation(name, name, parameter.double(), value.double(), _like(parameter, other_parameters))
        return "wrong", None, (Hint(kind, how, 1.0 if kind != "other" else 0.6, evidence="weights"),)
    if set(served.types) == {"MXFP4"}:  # the format cuts off what is between 6 and 8 scales
        cut = (step < 0) & (parameter.sign() == value.sign()) & (parameter.abs() < 8 / 6 * value.abs())
        parameter = torch.where(cut & (parameter.abs() > value.abs()), value, parameter)
    like = {key: one.float() for key, one in _like(parameter, other_parameters).items()}
    has_codebook = any(kind.startswith(("IQ1", "IQ2", "IQ3", "TQ")) for kind in served.types)
    found = judge_weight(parameter, value, step, like, by_group=not has_codebook)
    hints = tuple(replace(hint, text=f"{name}: {hint.text}") for hint in found.mistakes)
    return ("wrong" if found.mistakes else "rounding"), found, hints


def _like(parameter: Tensor, other_parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    same_shape = {name: tensor for name, tensor in other_parameters.items() if tensor.shape == parameter.shape}
    return dict(list(same_shape.items())[:_MOST_TOLD])


_Change = Callable[[Tensor], Tensor]


def _mistakes(
    name: str,
    parameter: Tensor,
    served: ServedWeight,
    other_parameters: Mapping[str, Tensor],
    heads: Mapping[str, int | None],
) -> Iterator[Hint]:
    """Yield the conversion whose opposite makes the parameter out of what the engine has."""
    assert served.value is not None
    yield from _bytes(name, parameter, served)
    for kind, text, change in _changes(parameter, served.value, heads):
        value = change(served.value)
        step = None if served.step is None else served.step if kind == "offset" else change(served.step)
        about = replace(served, room=served.room + 2.0**-21) if kind == "offset" else served
        if _within(parameter, about, value, step, {}, name)[0] != "wrong":
            yield Hint("scale" if kind == "offset" else kind, f"{name}: {text}", 1.0, evidence="weights", proven=True)
    for other, tensor in _like(parameter, other_parameters).items():
        if _within(tensor.float(), served, served.value, served.step, {}, other)[0] != "wrong":
            yield Hint("swapped", f"{name} holds {other}", 1.0, evidence="weights", proven=True)


def _changes(
    parameter: Tensor, value: Tensor, heads: Mapping[str, int | None]
) -> Iterator[tuple[Kind | Literal["offset"], str, _Change]]:
    """Yield (kind, words, what undoes it) for what conversions typically get wrong."""
    if parameter.dim() == 1:
        yield "offset", "the 1 of the norm was not added", lambda x: x + 1
        yield "offset", "1 was added to the norm, and the engine adds none", lambda x: x - 1
    if value.dim() == 2 and value.T.shape == parameter.shape:
        yield "transposed", "it is transposed", lambda x: x.T
    if value.shape != parameter.shape:
        return
    width, rotated = heads.get("head_dim") or 0, heads.get("rotated") or 0
    if width and rotated and rotated % 2 == 0 and parameter.shape[0] % width == 0:
        order = torch.arange(rotated)
        for words, inside in (
            ("the permutation of rotary pairs is missing", order.view(2, -1).T.flatten()),
            ("rotary pairs are permuted, and the engine rotates halves", order.view(-1, 2).T.flatten()),
        ):
            whole = torch.cat([inside, torch.arange(rotated, width)])
            index = (torch.arange(0, parameter.shape[0], width)[:, None] + whole[None]).flatten()
            yield "permuted", f"{words} (heads of {width})", lambda x, index=index: x.index_select(0, index)  # type: ignore[misc]
    for parts in (2, 3):
        if parameter.shape[0] % parts == 0 and parts * 2 <= parameter.shape[0]:
            yield (
                "swapped",
                f"its {parts} parts are in another order",
                lambda x, parts=parts: torch.cat(list(reversed(x.chunk(parts)))),  # type: ignore[misc]
            )
    yield from _fused(parameter, heads)
    if parameter.dim() == 3 and parameter.shape[1] % 2 == 0:
        yield "swapped", "gate and up are exchanged", lambda x: torch.cat(list(reversed(x.chunk(2, 1))), 1)


_OF_TWO_BYTES = {"F16": torch.float16, "BF16": torch.bfloat16}


def _bytes(name: str, parameter: Tensor, served: ServedWeight) -> Iterator[Hint]:
    """Yield that the bytes of numbers are those of another type, or in another order; NaN is as good as any number."""
    (kind,) = set(served.types) if len(set(served.types)) == 1 else ("",)
    if kind not in _OF_TWO_BYTES or served.value is None or served.value.shape != parameter.shape:
        return
    stored = served.value.to(_OF_TWO_BYTES[kind]).view(torch.int16)
    swapped = ((stored & 0xFF) << 8) | ((stored >> 8) & 0xFF)
    for other, dtype in _OF_TWO_BYTES.items():
        for bits, order in ((stored, ""), (swapped, "in the other order")):
            if bits is stored and other == kind:
                continue
            value = torch.where(served.value.isnan(), parameter, bits.view(dtype).float())
            if _within(parameter, replace(served, types=(other,)), value, None, {}, name)[0] != "wrong":
                called = f"{dtype}, called {kind}".removeprefix("torch.") if other != kind else ""
                text = f"{name}: its bytes are {' and '.join(filter(None, (called, order)))}"
                yield Hint("dtype", text, 1.0, evidence="weights", proven=True)


def _fused(
    parameter: Tensor, heads: Mapping[str, int | None]
) -> Iterator[tuple[Kind | Literal["offset"], str, _Change]]:
    q, k = heads.get("q_width") or 0, heads.get("kv_width") or 0
    if not q or not k or parameter.shape[0] != q + 2 * k:
        return
    for sizes, order, words in (
        ((k, q, k), (1, 0, 2), "k, q, v"),
        ((q, k, k), (0, 2, 1), "q, v, k"),
        ((k, k, q), (2, 0, 1), "k, v, q"),
        ((k, k, q), (2, 1, 0), "v, k, q"),
    ):

        def undo(x: Tensor, sizes: tuple[int, ...] = sizes, order: tuple[int, ...] = order) -> Tensor:
            parts = torch.split(x, list(sizes))
            return torch.cat([parts[place] for place in order])

        yield "swapped", f"its parts are in the order {words}", undo
