"""Programs as Inductor compiles them where weights are not packed: steps of one token, and products of few rows.

A step of one token multiplies every weight by a single row. The libraries that multiply matrices read a weight that is
not packed for them at half of the speed of memory; the loop over its rows that Inductor generates reads it at nearly
all. Of a few rows of float32, MKL packs the weight in memory before it multiplies, oneDNN in the caches.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from glassengine.program.representation.kept_logits import SIZE
from glassengine.program.representation.program import Program, copied_graph, rebuilt
from glassengine.program.representation.signature import quiet

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Inductor adds up longer rows in a way that is several times slower.
_ROW_ELEMENTS = 2048
_FIXED = {"batch": 1, "sequence": 1, SIZE: 1}
# Numbers of rows for which oneDNN is the faster one of the two.
_FEW_ROWS = range(3, 256)
# Any length but 1, which the exporter would take for a constant.
_CACHE_LENGTH = 12


def one_token_shapes(program: Program) -> dict[str, dict[int, int]]:
    """Return input -> dimension -> size in a step of one token; empty where shapes do not say what that is."""
    sizes = {size for port in program.inputs for size in port.shape if isinstance(size, str)}
    # A program that keeps states takes one token in every step.
    if program.layout is None or "batch" not in sizes or not sizes <= {*_FIXED, "cache"}:
        return {}
    sizes_of = {
        port.name: {dim: _FIXED[size] for dim, size in enumerate(port.shape) if size in _FIXED}
        for port in program.inputs
    }
    return {name: fixed for name, fixed in sizes_of.items() if fixed}


def of_one_token(program: Program) -> ExportedProgram:
    """Return the program for a batch of 1 and a sequence of 1, with products of one row in place of linear layers.

    The program has `one_token_shapes`, is on the CPU, and stays as it is.
    """
    exported = program.exported
    tensors, dynamic = [], []
    for port in program.inputs:
        sizes = [size if isinstance(size, int) else _FIXED.get(size, _CACHE_LENGTH) for size in port.shape]
        tensors.append(torch.zeros(sizes, dtype=getattr(torch, port.dtype)))
        dynamic.append({dim: torch.export.Dim.DYNAMIC for dim, size in enumerate(port.shape) if size == "cache"})
    args, kwargs = pytree.tree_unflatten(tensors, exported.call_spec.in_spec)
    shapes = pytree.tree_unflatten(dynamic, exported.call_spec.in_spec)
    module = exported.module(check_guards=False)
    with torch.no_grad(), quiet():
        traced = torch.export.export(module, args, kwargs, dynamic_shapes=shapes[1] or shapes[0], strict=False)
        found: ExportedProgram = traced.run_decompositions({})
    for node in found.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        x, weight, *bias = node.args
        if _is_row(x.meta["val"]) and weight.meta["val"].dtype in _FLOATS:
            node.target, node.args = _row_product(), (x, weight, bias[0] if bias else None)
    return found


def with_products_by_rows(exported: ExportedProgram) -> ExportedProgram:
    """Return the program with `product_by_rows` in place of linear layers of float32.

    Names of its nodes, its inputs and its outputs stay as they are.
    """
    graph = copied_graph(exported.graph)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default):
        x, weight, *bias = node.args
        if weight.meta["val"].dtype is torch.float32:
            node.target, node.args = product_by_rows(), (x, weight, bias[0] if bias else None)
    graph.lint()
    return rebuilt(exported, graph, exported.graph_signature.output_specs)


@functools.cache
def product_by_rows() -> Any:
    """Return the operator x [..., K], weight [N, K], bias [N] or None -> [..., N], by oneDNN for few rows, else by MKL.

    A package that has it calls it once for each layer and step, which costs microseconds where the weight of a large
    model takes milliseconds. AOTInductor itself chooses no library by a size.
    """
    name, of_onednn = "glass::product_by_rows", torch.ops.mkldnn._linear_pointwise
    few_rows = _FEW_ROWS if torch._C.has_mkl and torch._C._has_mkldnn else ()

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if math.prod(x.shape[:-1]) in few_rows:
            found: torch.Tensor = of_onednn(x, weight, bias, "none", [], "")
            return found
        return torch.nn.functional.linear(x, weight, bias)

    torch.library.define(name, "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
    torch.library.impl(name, "CPU", product)
    torch.library.register_fake(name, _of_linear)
    return torch.ops.glass.product_by_rows.default


def _of_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _is_row(x: torch.Tensor) -> bool:
    return all(isinstance(size, int) for size in x.shape) and math.prod(x.shape[:-1]) == 1


@functools.cache
def _row_product() -> Any:
    """Return the operator x [..., K] (one row), weight [N, K], bias [N] or None -> [..., N], and tell Inductor of it.

    Sums are float32, rounded once.
    """
    from torch._inductor import lowering

    @torch.library.custom_op("glass::row_product", mutates_args=())
    def row_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    row_product.register_fake(_of_linear)

    def lower(x: Any, weight: Any, bias: Any) -> Any:
        aten, known = torch.ops.aten, lowering.lowerings
        # Otherwise the row would be recomputed for every row of the weight.
        x.realize()
        rows, columns = map(int, weight.get_size())
        part = math.gcd(columns, _ROW_ELEMENTS)
        # Parts that are too short to fill the vectors of a processor are slower still.
        parts = [columns // part, part] if columns > part >= 512 else [columns]
        row, matrix = (
            lowering.to_dtype(known[aten.view.default](tensor, sizes), torch.float32)
            for tensor, sizes in ((x, parts), (weight, [rows, *parts]))
        )
        total = known[aten.mul.Tensor](matrix, row)
        for _ in parts:
            total = known[aten.sum.dim_IntList](total, [-1])
        if bias is not None:
            total = known[aten.add.Tensor](total, lowering.to_dtype(bias, torch.float32))
        result = known[aten.view.default](lowering.to_dtype(total, weight.get_dtype()), [*x.get_size()[:-1], rows])
        result.realize()
        return result

    operator = torch.ops.glass.row_product.default
    lowering.register_lowering(operator, type_promotion_kind=None)(lower)
    return operator
