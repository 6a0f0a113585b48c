"""The table of ops, and the traits of one, found by its name or by what a node calls.

A row of `table` says what torch does not: nothing in an op's schema tells how its result is rounded. Where a row is
silent, and for ops without a row, torch's own tags decide whether an op is random and whether it is in place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from glassengine.ops.row import NOTHING, Choice, OpTraits, Rounding, Terms, argument

_LEAST = 16
"""Terms of overlapping windows (pooling, resampling): more than the ratio of the sizes, but never many."""


def last_axis(position: int) -> Terms:
    """Return what counts the elements along the last axis of an argument: the inner size of a product."""

    def count(args: tuple[Any, ...], result: Tensor) -> int:
        return max(1, int(args[position].shape[-1]))

    return count


def of_batches(args: tuple[Any, ...], result: Tensor) -> int:
    """Count the terms of addbmm, which sums over the batch, too."""
    return max(1, int(args[1].shape[0] * args[1].shape[-1]))


def of_all(args: tuple[Any, ...], result: Tensor) -> int:
    """Count all elements of the first tensor: of einsum, and of what accumulates."""
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    return max(1, tensors[0].numel())


def of_kernel(args: tuple[Any, ...], result: Tensor) -> int:
    """Count the terms of a convolution: the weights of one channel of the result."""
    if len(args) > 6 and args[6] is True:  # aten.convolution, transposed
        return of_transposed_kernel(args, result)
    weight: Tensor = args[1]
    return max(1, weight[0].numel())


def of_transposed_kernel(args: tuple[Any, ...], result: Tensor) -> int:
    """Count the terms of a transposed convolution, whose weights are [in, out / groups, ...]."""
    weight: Tensor = args[1]
    groups = result.shape[1 - weight.dim()] // max(1, weight.shape[1])
    return max(1, weight.shape[0] // max(1, groups) * math.prod(weight.shape[2:]))


def of_ratio(args: tuple[Any, ...], result: Tensor) -> int:
    """Count the elements of the first tensor for one of the result."""
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    return max(_LEAST, tensors[0].numel() // max(1, result.numel()))


def of_filter(args: tuple[Any, ...], result: Tensor) -> int:
    """Count the terms of a resampling whose filter is up to four times as wide as the ratio along each axis."""
    x: Tensor = args[0]
    return _LEAST * max(1, x.numel() // max(1, result.numel()))


_moves = partial(OpTraits, Rounding.MOVES, hidden="moves", holds=True)
_makes = partial(OpTraits, Rounding.MOVES, hidden="moves")
_changes = partial(OpTraits, Rounding.MOVES)
_pointwise = partial(OpTraits, Rounding.POINTWISE, in_place=True)
_fitted = partial(_pointwise, absolute_error=True)
_cancels = partial(_pointwise, relative_to_argument=True)
_sums = partial(OpTraits, Rounding.SUMS, terms=of_ratio)
_product = partial(OpTraits, Rounding.PRODUCT, keeps_whole=True)
_convolution = partial(OpTraits, Rounding.CONVOLUTION, keeps_whole=True, addend=2)
_composite = partial(OpTraits, Rounding.COMPOSITE)
_exact = partial(OpTraits, Rounding.EXACT)
_random = OpTraits(is_random=True)

_values = partial(Choice, values=True, places=False)
_places = partial(Choice, values=False, places=True)
_both = partial(Choice, values=True, places=True)


def _rows() -> Iterator[tuple[str, OpTraits]]:
    # A statement for each row: this is the table, and no procedure.
    # Ops that move or select values.
    yield "adaptive_max_pool2d max_pool1d max_pool2d max_pool2d_with_indices max_pool3d", _makes()
    yield "arange expand_as getitem scalar_tensor view_as", _makes()
    yield "broadcast_to diagonal expand_copy pad pixel_shuffle pixel_unshuffle reflection_pad1d", _moves()
    yield "reflection_pad2d replication_pad1d replication_pad2d select_scatter slice_scatter", _moves()
    yield "swapaxes tril triu unsafe_split alias cat constant_pad_nd contiguous copy detach", _moves()
    yield "expand flip lift lift_fresh lift_fresh_copy movedim permute repeat roll squeeze stack t tile", _moves()
    yield "transpose unbind unsqueeze _reshape_alias as_strided_scatter diagonal_scatter", _moves()
    yield "atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors cartesian_prod channel_shuffle", _moves()
    yield "column_stack diag diag_embed dstack fliplr flipud hstack im2col meshgrid narrow_copy", _moves()
    yield "native_channel_shuffle ravel reflection_pad3d replication_pad3d reshape_as rot90 vstack", _moves()
    yield "alias_copy detach_copy permute_copy select_copy slice_copy split_copy split_with_sizes_copy", _moves()
    yield "squeeze_copy t_copy transpose_copy unbind_copy unfold_copy unsqueeze_copy view_copy", _moves()
    yield "select_backward slice_backward", _moves()
    yield "eye fill", _makes()
    yield "zero", _makes(reads_sizes=True)
    yield "index_fill", _makes(selects="indices")
    yield "masked_select", _moves(selects="indices", condition=1)
    yield "take take_along_dim", _moves(selects="indices", table=(0, 1, None))
    yield "clone", _moves(kind="copy")
    yield "_unsafe_view flatten reshape unflatten view", _moves(kind="reshape")
    yield "as_strided chunk narrow select slice split split_with_sizes unfold", _moves(selects="part")
    yield "full ones zeros", _makes(kind="constant")
    yield "new_full new_ones new_zeros", _makes(kind="constant", reads_sizes=True)
    yield "full_like ones_like zeros_like", _makes(reads_sizes=True)
    yield "masked_fill masked_scatter", _moves(selects="indices", condition=1)
    yield "where", _moves(selects="indices", condition=0)
    yield "gather index_select", _moves(selects="indices", table=(0, 2, None))
    yield "index", _moves(selects="indices", table=(0, 1, None))
    yield "scatter", _moves(selects="indices", table=(0, 2, None))
    yield "embedding", _changes(selects="indices", table=(0, 1, 0))
    yield "index_put", _moves(selects="indices", table=(0, 1, None), reorders=True)
    yield "index_copy", _makes(selects="indices", reorders=True)
    yield "repeat_interleave", _makes(reorders=True)
    yield "clamp_max", _moves(in_place=True)
    yield "clamp clamp_min", _moves(in_place=True, hidden="stays")
    yield "maximum", _moves(in_place=True, hidden="stays", commutes=True)
    yield "minimum", _changes(in_place=True, commutes=True, holds=True)
    yield "relu relu6 hardtanh", _changes(kind="activation", in_place=True, holds=True)
    yield "nan_to_num positive sign threshold", _changes(in_place=True)
    yield "abs", _changes(in_place=True, keeps_whole=True, holds=True)
    yield "neg", _changes(in_place=True, keeps_whole=True)
    yield "amax", _changes(choice=_values(descending=True), hidden="ignored")
    yield "amin", _changes(choice=_values(descending=False))
    yield "max", _makes(choice=_both(descending=True), selects="indices", hidden="stays")
    yield "min", _changes(choice=_both(descending=False), selects="indices")
    yield "topk", _changes(choice=_both(descending=True, flag="largest"), selects="indices")
    yield "sort", _changes(choice=_both(descending=False, flag="descending"), selects="indices")
    yield "cummax", _changes(choice=_both(descending=True, running=True), selects="indices")
    yield "cummin", _changes(choice=_both(descending=False, running=True), selects="indices")
    yield "_to_copy convert_element_type to", OpTraits(Rounding.CASTS, in_place=True, hidden="stays", holds=True)
    yield "type_as", OpTraits(Rounding.CASTS, hidden="stays")

    # Pointwise ops.
    yield "acos asin atan atan2 cosh exp exp2 hardshrink hypot logit prelu sinh softshrink special_erf", _pointwise()
    yield "special_expit xlogy", _pointwise()
    yield "hardsigmoid hardswish leaky_relu sigmoid softsign tanh", _pointwise(kind="activation")
    yield "log log10 log2 pow rsqrt sqrt", _pointwise(domain="positive")
    yield "reciprocal", _pointwise(domain="nonzero", correctly_rounded=True)
    yield "fmod remainder", _pointwise(correctly_rounded=True)
    yield "square", _pointwise(correctly_rounded=True, keeps_whole=True)
    yield "add", _pointwise(
        kind="term", correctly_rounded=True, keeps_whole=True, commutes=True, hidden="stays"
    )  # fmt: skip
    yield "sub", _pointwise(kind="term", correctly_rounded=True, keeps_whole=True, hidden="stays")
    yield "rsub", _pointwise(kind="term", correctly_rounded=True, keeps_whole=True)
    yield "mul", _pointwise(
        kind="factor", correctly_rounded=True, keeps_whole=True, commutes=True, hidden="stays"
    )  # fmt: skip
    yield "div true_divide", _pointwise(kind="factor", correctly_rounded=True, domain="nonzero", hidden="stays")
    yield "addcdiv addcmul", _pointwise(several_steps=True)
    yield "lerp", _cancels(several_steps=True)
    yield "erf", _fitted()
    yield "log_sigmoid", _fitted(kind="activation")
    yield "erfc expm1 log1p", _cancels(absolute_error=True)
    yield "celu elu selu softplus", _cancels(absolute_error=True, kind="activation")
    yield "gelu mish silu", _cancels(kind="activation")
    yield "cos sin tan", _cancels(is_periodic=True)
    yield "tanhshrink", _cancels()
    yield "ceil floor round trunc", OpTraits(Rounding.STEPS, in_place=True, correctly_rounded=True)
    yield "digamma erfinv lgamma polygamma", OpTraits(Rounding.UNBOUNDED, in_place=True)
    yield "floor_divide", OpTraits(in_place=True, correctly_rounded=True)
    yield "log_sigmoid_forward", OpTraits(kind="activation")

    # Sums and products.
    yield "_adaptive_avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", _sums()
    yield "avg_pool1d avg_pool2d avg_pool3d upsample_bicubic2d upsample_bilinear2d upsample_nearest2d", _sums()
    yield "_upsample_bicubic2d_aa _upsample_bilinear2d_aa", _sums(terms=of_filter)
    yield "mean", _sums(kind="sum")
    yield "sum", _sums(kind="sum", keeps_whole=True)
    yield "diff trace", _sums(keeps_whole=True)
    yield "cumsum", _sums(keeps_whole=True, terms=of_all)
    yield "index_add scatter_add", _sums(keeps_whole=True, selects="indices", table=(0, 2, None))
    yield "bmm matmul mm", _product(kind="matrix product", terms=last_axis(0))
    yield "linear", _product(kind="matrix product", terms=last_axis(0), addend=2)
    yield "addmm baddbmm", _product(kind="matrix product", terms=last_axis(1), addend=0)
    yield "dot mv", _product(terms=last_axis(0))
    yield "addmv", _product(terms=last_axis(1), addend=0)
    yield "addbmm", _product(terms=of_batches, addend=0)
    yield "einsum", _product(terms=of_all)
    yield "_convolution conv1d conv2d conv3d convolution", _convolution(terms=of_kernel)
    yield "conv_transpose1d conv_transpose2d conv_transpose3d", _convolution(terms=of_transposed_kernel)
    # Torch's tag is for its dropout.
    yield "scaled_dot_product_attention", OpTraits(Rounding.ATTENTION, is_random=False)

    # Ops of several steps.
    yield "softmax _softmax _safe_softmax", _composite(kind="softmax", hidden="ignored")
    yield "log_softmax _log_softmax", _composite(kind="log_softmax")
    yield "logsumexp", _composite(kind="log_softmax", terms=of_ratio, hidden="ignored")
    yield "group_norm layer_norm native_layer_norm rms_norm", _composite(kind="norm")
    yield "_native_batch_norm_legit_no_training", _composite()
    yield "batch_norm instance_norm", OpTraits(kind="norm")
    yield "linalg_vector_norm norm std var", _composite(terms=of_ratio)
    yield "_weight_norm cumprod dequantize prod", _composite()
    # Recurrences, whose dropout is off in what is exported.
    yield "gru lstm rnn_relu rnn_tanh", OpTraits(is_random=False)

    # Places, conditions and counts.
    yield "eq ne", _exact(kind="comparison", in_place=True, commutes=True)
    yield "ge gt le lt", _exact(kind="comparison", in_place=True)
    yield (
        "bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor",
        _exact(kind="logic", in_place=True, commutes=True),
    )
    yield "bitwise_not logical_not", _exact(kind="logic", in_place=True)
    yield "argmax", _exact(choice=_places(descending=True), selects="indices", hidden="ignored")
    yield "argmin", _exact(choice=_places(descending=False), selects="indices")
    yield "argsort", _exact(choice=_places(descending=False, flag="descending"), selects="indices")
    yield "all any", _exact()
    yield "sym_numel sym_size", _exact(reads_sizes=True)
    yield "bucketize searchsorted", _exact(selects="indices")
    yield "nonzero", _exact(selects="indices", condition=0)
    yield "histc", OpTraits(Rounding.COUNTS, selects="indices")

    # What no replay says anything of.
    yield "bernoulli dropout exponential multinomial native_dropout normal poisson rand rand_like randint", _random
    yield "randint_like randn randn_like randperm rrelu uniform", _random
    yield "empty empty_permuted empty_strided new_empty_strided", OpTraits(is_unwritten=True)
    yield "empty_like new_empty", OpTraits(is_unwritten=True, reads_sizes=True)

    # Known by what they select only.
    yield "index_reduce", OpTraits(selects="indices")
    yield "scatter_reduce", OpTraits(selects="indices", table=(0, 2, None))
    yield "_embedding_bag _embedding_bag_forward_only", OpTraits(table=(0, 1, 0))


def _table() -> dict[str, OpTraits]:
    table: dict[str, OpTraits] = {}
    for names, traits in _rows():
        for name in names.split():
            if name in table:
                raise ValueError(f"{name} has two rows")
            table[name] = traits
    return table


TABLE = _table()
"""ATen base name -> traits."""


@functools.lru_cache(maxsize=4096)  # asked for several times of each node that is judged
def base_name(target: Any) -> str:
    """Return the ATen base name of what a node calls: no overload, no trailing underscore."""
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.split("::")[-1]
        return name if name.endswith("__") else name.rstrip("_")
    return getattr(target, "__name__", str(target)).rstrip("_")


def named(name: str) -> OpTraits:
    """Return the traits of an op by its ATen base name, as far as they are those of all its overloads."""
    return TABLE.get(name, NOTHING)


def traits_of(node: Node) -> OpTraits:
    """Return the traits of what a node calls; those of nothing for inputs and constants."""
    found = traits_of_target(node.target) if node.op == "call_function" else NOTHING
    return replace(found, is_random=False) if found.is_random and _drops_nothing(node) else found


def _drops_nothing(node: Node) -> bool:
    """Whether an op that may draw what it drops keeps everything: an attention, a dropout in evaluation."""
    return 0 in (argument(node, "p"), argument(node, "dropout_p")) or argument(node, "train") is False


@functools.lru_cache(maxsize=4096)
def traits_of_target(target: Any) -> OpTraits:
    """Return the traits of an op, torch's tags included."""
    row = named(base_name(target))
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
    return replace(
        row,
        in_place=torch.Tag.pointwise in tags if row.in_place is None else row.in_place,
        is_random=torch.Tag.nondeterministic_seeded in tags if row.is_random is None else row.is_random,
    )
