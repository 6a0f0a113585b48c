"""A replay of which other processes do a part: what they find of a tensor is taken where nothing else can come out.

What is sent is a `Finding`: a judgement that is neither flagged nor a tie, of a tensor with this checksum. A replay of
single ops draws noise from one generator for all tensors, and remembers floors: of these replays only what has used
neither is sent, and what is computed here is what one process computes. A replay of segments runs all steps in their
order: here it begins when something is needed that was not sent, and then runs the steps before once more.
"""

from __future__ import annotations

import platform
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch.fx import Node

from glassengine.judge.graphs.cut import Piece
from glassengine.judge.replay.expected import Replayed
from glassengine.judge.replay.replay import Replay
from glassengine.judge.step_inputs import Given, by_name
from glassengine.numerics.exemptions import UNWRITTEN, Masks
from glassengine.numerics.judgement import Judgement
from glassengine.numerics.known import NOTHING, Known
from glassengine.numerics.ops import Accumulation
from glassengine.writing.checksums import crc32

_MOST_MASKED = 1 << 31
"""Elements of a mask; a finding comes from another process of the same program, and is bounded all the same."""


class Mask(msgspec.Struct, frozen=True, array_like=True):
    """A bool mask: its shape, and its elements, eight a byte and compressed."""

    shape: tuple[int, ...]
    bits: bytes

    @classmethod
    def of(cls, mask: torch.Tensor) -> Mask:
        """Return a mask as bytes."""
        return cls(tuple(mask.shape), zlib.compress(np.packbits(mask.contiguous().numpy().reshape(-1)).tobytes(), 1))

    def tensor(self) -> torch.Tensor:
        """Return it as a tensor."""
        count = int(np.prod(self.shape, dtype=np.int64))
        if not 0 <= count <= _MOST_MASKED:
            raise ValueError(f"a mask of {count} elements")
        size = (count + 7) // 8
        packed = np.frombuffer(zlib.decompressobj().decompress(self.bits, size + 1), np.uint8)
        return torch.from_numpy(np.unpackbits(packed, count=count).astype(bool).reshape(self.shape))


class Finding(msgspec.Struct, frozen=True, array_like=True):
    """What a replay found of one tensor.

    Attributes:
        node: Of the baseline's program.
        tensor: Checksum of the candidate's tensor.
        valid: Checksum of the mask of elements that count; None where all do, or where it is not read.
        judgement: None where the replay judges nothing.
        exempt: The elements that were left out, see `Replayed`.
        explanation: See `Replayed`.
    """

    node: str
    tensor: int
    valid: int | None
    judgement: Judgement | None
    exempt: dict[str, Mask] | None = None
    explanation: str = "as read"


class Findings(msgspec.Struct, frozen=True):
    """What was found of a step.

    Attributes:
        inputs: Checksum of what the step was given.
        machine: What else the last bit depends on.
        found: Of its tensors.
        lost: Node -> why it cannot be judged; that of "" is true of all.
    """

    inputs: int = 0
    machine: str = ""
    found: tuple[Finding, ...] = ()
    lost: dict[str, str] = {}


def machine() -> str:
    """Return what the last bit of a sum depends on beside its terms."""
    return (
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, "
        f"threads: {torch.get_num_threads()}"
    )


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum of dtype, shape and bytes."""
    head = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return int(crc32(data.data, crc32(head)))


def checksum_of_mask(mask: torch.Tensor | None, tensor: torch.Tensor) -> int | None:
    """Return a checksum of a mask that broadcasts against a tensor; None where all elements count."""
    if mask is None:
        return None
    try:
        return checksum(mask.expand(tensor.shape))
    except RuntimeError:  # the tensor has another shape than the baseline's
        return -1


def checksum_of(given: Given) -> int:
    """Return a checksum of what a step was given."""
    named = by_name(given)
    return crc32(repr([(name, checksum(named[name])) for name in sorted(named)]).encode())


class Foretold(Replayed):
    """What another process found; what else there is to know is computed here when it is asked for."""

    def __init__(
        self, judgement: Judgement, exempt: Masks | None, explanation: str, compute: Callable[[], Replayed | None]
    ) -> None:
        for name, value in (
            ("judgement", judgement),
            ("exempt", exempt),
            ("explanation", explanation),
            ("_compute", compute),
        ):
            object.__setattr__(self, name, value)

    _compute: Callable[[], Replayed | None]

    def _computed(self) -> Replayed:
        found = self._compute()
        assert found is not None
        return found

    @property
    def predicted(self) -> torch.Tensor:
        """What the piece should give."""
        return self._computed().predicted

    @property
    def again(self) -> Callable[[torch.Tensor], Judgement]:
        """Judges another result of the same piece."""
        return self._computed().again


@dataclass
class _Step:
    given: Given
    known: Mapping[tuple[str, int], Finding] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)


class HelpedReplay(Replay):
    """The replay of a side of which other processes do a part.

    Args:
        own: The replay, which does what they do not.
        rerun: Runs the side with `own` over these steps from the first one on.
        findings: Returns what was found of the next step.
    """

    def __init__(self, own: Replay, rerun: Callable[[Sequence[Given]], None], findings: Callable[[], Findings]) -> None:
        self.program, self.ops = own.program, own.ops
        self._own, self._rerun, self._findings = own, rerun, findings
        self.num_taken = 0
        self.machine = machine()
        self._begin()

    def _begin(self) -> None:
        self._past: list[Given] = []
        self._is_behind = self._own.has_memory
        self._step: _Step | None = None
        self._last: Callable[[], Replayed | None] | None = None

    @property
    def method(self) -> str:
        """See `Replay`."""
        return self._own.method

    @property
    def accumulation(self) -> Accumulation:
        """See `Replay`."""
        return self._own.accumulation

    def accumulate(self, how: Accumulation) -> None:
        """See `Replay`."""
        self._own.accumulate(how)

    @property
    def has_memory(self) -> bool:
        """See `Replay`."""
        return self._own.has_memory

    def lost(self, node: Node) -> str | None:
        """Return why a tensor was not judged by those who were to."""
        lost = {} if self._step is None else self._step.lost
        return lost.get("") or lost.get(node.name)

    @property
    def values(self) -> Mapping[str, Any]:
        """See `Replay`; up to the tensor that was judged last."""
        if self._last is not None:
            self._last()
        self._catch_up()
        return self._own.values

    def begin(self) -> None:
        """See `Replay`."""
        self._own.begin()
        self._begin()

    def begin_step(
        self, given: Given, made: Mapping[str, torch.Tensor], caches: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """See `Replay`."""
        self._last = None
        if self._is_behind:
            self._past.append(given)
        else:
            self._own.begin_step(given, made, caches)
        found = self._findings()
        is_ours = found.machine == self.machine and found.inputs == checksum_of(given)
        known = {(one.node, one.tensor): one for one in found.found} if is_ours else {}
        self._step = _Step(given, known, found.lost)

    def judge(
        self,
        node: Node,
        candidate: torch.Tensor,
        valid: torch.Tensor | None,
        known: Known = NOTHING,
        own: Callable[[Node], Piece | None] | None = None,
    ) -> Replayed | None:
        """See `Replay`."""

        def compute() -> Replayed | None:
            self._last = None
            self._catch_up()
            return self._own.judge(node, candidate, valid, known, own)

        step = self._step
        finding = None if step is None or not step.known else step.known.get((node.name, checksum(candidate)))
        if finding is None or not (self.has_memory or self._is_of_values_alone(finding, candidate, valid, known)):
            return compute()
        self.num_taken += 1
        self._last = compute
        if finding.judgement is None:
            return None
        exempt = None if finding.exempt is None else {name: mask.tensor() for name, mask in finding.exempt.items()}
        return Foretold(finding.judgement, exempt, finding.explanation, compute)  # type: ignore[arg-type]

    def _is_of_values_alone(
        self, finding: Finding, candidate: torch.Tensor, valid: torch.Tensor | None, known: Known
    ) -> bool:
        """Whether what is known here of the tensor of one op is what was known there, and no floor is remembered."""
        return (
            finding.node not in self.ops.relative_floors
            and known.hidden is None
            and UNWRITTEN not in known.exempt
            and finding.valid == checksum_of_mask(valid, candidate)
        )

    def allowed(self, node: Node, candidate: torch.Tensor) -> torch.Tensor | None:
        """See `Replay`."""
        return self._own.allowed(node, candidate)

    def inside(self, judged: Any) -> dict[str, set[str]]:
        """See `Replay`."""
        return self._own.inside(judged)

    def _catch_up(self) -> None:
        """Run the steps so far where they were not needed until now."""
        if self._is_behind:
            self._is_behind, past = False, self._past
            self._past = []
            self._rerun(past)
