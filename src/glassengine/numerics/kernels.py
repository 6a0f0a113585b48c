"""Accuracy of a runtime's elementwise kernels beyond rounding.

A runtime may compute an elementwise function to an absolute accuracy (a rational approximation of the sigmoid, say),
where the rounding bound of its class is relative. That is a fact of the runtime, its version and its instruction set:
it is measured by a sweep (`backends.kernel_sweep`) against the bound without it, and what is left over is stored.
The judge, the noise and the reproductions all take it from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glassengine.ops.traits import named

SAFETY = 2.0
"""What is allowed over what was measured: a sweep does not see every number, nor every other instruction set."""


@dataclass(frozen=True)
class KernelError:
    """Largest errors of a kernel, fitted to sizes of results |P| and arguments |x|.

    Attributes:
        absolute: Beyond the rounding bound of the op: absolute + relative |P|.
        relative: Likewise.
        spread: Beyond the rounding of the result alone: (a, r, s) of a + r |P| + s |x|. Noise is this large.
    """

    absolute: float = 0.0
    relative: float = 0.0
    spread: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def allowed(self, size: Tensor) -> Tensor:
        """Return what is allowed beyond the rounding bound for results of `size`."""
        return SAFETY * (self.absolute + self.relative * size)

    def noise(self, size: Tensor, argument: Tensor | float) -> Tensor:
        """Return the half-width of noise beyond the rounding of the result, for |P| and |x|."""
        a, r, s = self.spread
        return a + r * size + s * argument

    def joined(self, other: KernelError) -> KernelError:
        """Return the error of whichever of two kernels is the coarser."""
        pairs = zip(self.to_list(), other.to_list(), strict=True)
        return KernelError.from_list([max(pair) for pair in pairs])

    def to_list(self) -> list[float]:
        """Return the five numbers."""
        return [self.absolute, self.relative, *self.spread]

    @classmethod
    def from_list(cls, numbers: Sequence[Any]) -> KernelError:
        """Return the error of five numbers.

        Raises:
            ValueError, TypeError: They are no such numbers.
        """
        absolute, relative, a, r, s = (float(number) for number in numbers)
        if any(not 0 <= part < 1 for part in (absolute, relative, a, r, s)):
            raise ValueError("an error that no kernel has")
        return cls(absolute, relative, (a, r, s))


_ASSUMED = KernelError(absolute=6 * 2.0**-24, spread=(6 * 2.0**-24, 0.0, 0.0))


def assumed(op: str) -> KernelError | None:
    """Return the error of an op whose kernel was not measured: absolute for functions that are fitted, else None."""
    return _ASSUMED if named(op).absolute_error else None


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels of a runtime: dtype -> op -> error. Of an op that is not named nothing is known.

    Attributes:
        errors: By dtype (torch's name) and by ATen base name.
        about: Which runtime, version and instruction set were measured.
    """

    errors: Mapping[str, Mapping[str, KernelError]] = field(default_factory=dict)
    about: str = ""

    def error(self, op: str, dtype: torch.dtype) -> KernelError | None:
        """Return the error of an op whose result has `dtype`; None where it was not measured."""
        return self.errors.get(str(dtype).removeprefix("torch."), {}).get(op)

    def joined(self, other: Kernels) -> Kernels:
        """Return kernels as coarse as the coarser of two."""
        if not other.errors or self is other:
            return self
        if not self.errors:
            return other
        return joined([self, other])

    def to_dict(self) -> dict[str, Any]:
        """Return the errors as JSON values."""
        return {
            dtype: {op: error.to_list() for op, error in sorted(ops.items())}
            for dtype, ops in sorted(self.errors.items())
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Mapping[str, Any]], about: str = "") -> Kernels:
        """Return the kernels that `to_dict` wrote.

        Raises:
            ValueError, TypeError, AttributeError: It is no such document.
        """
        kernels = {
            str(dtype): {str(op): KernelError.from_list(numbers) for op, numbers in ops.items()}
            for dtype, ops in data.items()
        }
        return cls(kernels, about)


UNMEASURED = Kernels()
"""Kernels of which nothing is known."""


def joined(several: Iterable[Kernels]) -> Kernels:
    """Return kernels as coarse as the coarsest of several: for a runtime that is not known."""
    errors: dict[str, dict[str, KernelError]] = {}
    about = []
    for kernels in several:
        about += [kernels.about] if kernels.about else []
        for dtype, ops in kernels.errors.items():
            known = errors.setdefault(dtype, {})
            for op, error in ops.items():
                known[op] = known.get(op, KernelError()).joined(error)
    return Kernels(errors, ", ".join(dict.fromkeys(about)))
