"""Classes of ATen ops by what rounding does to them, and one op with its float64 result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from glassengine.numerics.kernels import UNMEASURED, KernelError, Kernels
from glassengine.program.representation.naming import CONVOLUTIONS, PRODUCTS


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


U_ACCUMULATE = 2.0**-24

MOVES = _names(
    """
    _unsafe_view abs adaptive_max_pool2d alias amax amin arange as_strided broadcast_to cat chunk clamp clamp_max
    clamp_min clone constant_pad_nd contiguous copy cummax cummin detach diagonal embedding expand expand_as
    expand_copy flatten flip full full_like gather getitem hardtanh index index_copy index_put index_select
    lift_fresh_copy masked_fill masked_scatter max max_pool1d max_pool2d max_pool2d_with_indices max_pool3d maximum
    min minimum movedim narrow neg new_full new_ones new_zeros ones ones_like pad permute pixel_shuffle
    pixel_unshuffle reflection_pad1d reflection_pad2d relu relu6 repeat repeat_interleave replication_pad1d
    replication_pad2d reshape roll scalar_tensor scatter select select_scatter sign slice slice_scatter sort split
    split_with_sizes squeeze stack swapaxes t threshold tile topk transpose tril triu unbind unflatten unfold
    unsafe_split unsqueeze view view_as where zeros zeros_like
    """
)
"""Ops that move or select values without arithmetic."""

CASTS = frozenset({"_to_copy", "convert_element_type", "to", "type_as"})
SUMS = _names(
    """
    _adaptive_avg_pool2d _upsample_bicubic2d_aa _upsample_bilinear2d_aa adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d avg_pool1d avg_pool2d avg_pool3d cumsum diff index_add mean scatter_add sum trace
    upsample_bicubic2d upsample_bilinear2d upsample_nearest2d
    """
)
POINTWISE = _names(
    """
    acos add addcdiv addcmul asin atan atan2 celu cos cosh div elu erf erfc exp exp2 expm1 fmod gelu hardshrink
    hardsigmoid hardswish hypot leaky_relu lerp log log10 log1p log2 log_sigmoid logit mish mul pow prelu reciprocal
    remainder rsqrt rsub selu sigmoid silu sin sinh softplus softshrink softsign special_erf special_expit sqrt
    square sub tan tanh tanhshrink true_divide xlogy
    """
)
STEPS = _names("ceil floor round trunc")
"""Ops that jump: an argument on the other side of a step is another number."""

COUNTS = frozenset({"histc"})
"""Ops that count: a whole number, and exact, though its dtype is a floating one."""

UNBOUNDED = _names("digamma erfinv lgamma polygamma")
"""Ops without a rounding bound: at most suspicious. So is an op of no class at all."""

ATTENTION = "scaled_dot_product_attention"
RANDOM = _names(
    """
    bernoulli dropout native_dropout multinomial normal poisson rand rand_like randint randint_like randn randn_like
    randperm rrelu uniform exponential
    """
)
"""Ops whose result is random: never judged."""

UNDEFINED = _names("empty empty_like empty_permuted empty_strided new_empty new_empty_strided")
"""Ops that return uninitialized memory: never judged, nor are elements that are not yet overwritten."""

# Inside of these, errors are relative to the argument, not to the result: 1 + tanh and 1 + erf cancel, and arguments
# of sines are reduced.
RELATIVE_TO_ARGUMENT = _names("celu cos elu erfc expm1 gelu log1p mish selu silu sin softplus tan tanhshrink")
OF_ABSOLUTE_ERROR = _names("celu elu erf erfc expm1 log1p log_sigmoid selu softplus")
"""Pointwise ops that runtimes are taken to compute to an absolute error where their kernels were not measured: fitted
polynomials, or as exp(x) - 1, log(1 + x) and the like, which is how ONNX has them.

OpenVINO: up to 5e-7.
"""
OF_SEVERAL_STEPS = _names("addcdiv addcmul lerp")
"""Pointwise ops that may be written out, with a result rounded on the way."""

LARGEST = _names("amax amin cummax cummin max min sort topk")


SHAPED = _names("empty_like full_like new_empty new_full new_ones new_zeros ones_like sym_numel sym_size zeros_like")
"""Ops that read no more of a tensor than its shape."""


@dataclass(frozen=True)
class Accumulation:
    """How products (matrix products, convolutions, attention) are summed: unit roundoffs of sums and of operands.

    And how accurate the elementwise kernels are.
    """

    u_sums: float = U_ACCUMULATE
    u_operands: float = 0.0
    kernels: Kernels = UNMEASURED


FLOAT32_SUMS = Accumulation()

ACCUMULATIONS = {
    "float32": FLOAT32_SUMS,
    "tf32": Accumulation(u_operands=2.0**-11),
    "bfloat16": Accumulation(2.0**-9, 2.0**-9),
    "float16": Accumulation(2.0**-11, 2.0**-11),
}
"""What a candidate may declare; anything less than float32 would otherwise show as an error."""


@dataclass(frozen=True)
class Roundoff:
    """Unit roundoffs of one op (see `bounds`), and what rounding does near zero.

    Attributes:
        tiny: Largest error of rounding near zero in the dtype of the result.
        tiny_in: The same in the coarsest of what u_in and u_w are of.
        kernel: What the runtime's kernel of the op is off by beyond that; None where it was not measured.
    """

    u: float
    u_in: float = 0.0
    u_w: float = 0.0
    tiny: float = 0.0
    u_sums: float = U_ACCUMULATE
    tiny_in: float = 0.0
    kernel: KernelError | None = None

    def size_in(self, x: Tensor) -> Tensor:
        """Return |x| as roundoffs of inputs are relative to it: near zero more, lest their errors be below `tiny_in`.

        Twice that, since bounds are of first order and numbers of one or two steps are far from that.
        """
        u = max(self.u_in, self.u_w)
        return x.abs().clamp(min=2 * self.tiny_in / u) if u and self.tiny_in else x.abs()


@dataclass(frozen=True)
class Operation:
    """One op in float64: ATen base name, what computes it, arguments and result."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    exact: Tensor

    def on(self, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the result of the op on floating arguments changed by `change`; numbers stay."""

        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value

        args, kwargs = pytree.tree_map(changed, (self.args, self.kwargs))
        found = self.target(*args, **kwargs)
        result: Tensor = found[0] if isinstance(found, (tuple, list)) else found
        return result


def num_terms(name: str, args: tuple[Any, ...], result: Tensor) -> int:
    """Return the number of terms of one internal sum of the op `name`."""
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    if name in ("addmm", "baddbmm", "addbmm", "addmv"):
        return max(1, tensors[1].shape[-1])
    if name in CONVOLUTIONS:
        return max(1, tensors[1][0].numel())
    if name in PRODUCTS:
        return max(1, tensors[0].shape[-1] if name != "einsum" else tensors[0].numel())
    if name == "cumsum":
        return max(1, tensors[0].numel())
    # Overlapping windows (pooling, resampling) hold more terms than the ratio of the sizes, but never many.
    return max(16, tensors[0].numel() // max(1, result.numel()))
