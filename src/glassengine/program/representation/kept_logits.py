"""The logits of chosen tokens: an input of what is compiled, beside those of the program.

A generation reads of a prompt the logits of the last token. Those of the others are a product of every token with the
whole vocabulary. The tokens to keep are an input, so one executable computes all logits or the last ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from glassengine.ops.row import Rounding
from glassengine.ops.traits import traits_of
from glassengine.program.representation.program import Port, Program, copied_graph, rebuilt

KEPT = "logits_to_keep"
"""Name of the input, as in transformers: [K] int64, places among the S new tokens."""
SIZE = "kept"
"""What the size K is called."""
_EXAMPLE_SIZE = 3  # 1 would be taken for a constant


def with_kept_logits(program: Program) -> Program:
    """Return a program whose logits are [B, K, V], of those of the S tokens of a step that the input `KEPT` names.

    Programs whose logits are anything else than a product of each token are returned as they are.
    """
    exported, graph = program.exported, copied_graph(program.graph)
    nodes = {node.name: node for node in graph.nodes}
    ports = {port.name: nodes[port.node] for port in program.inputs}
    found = _products(nodes[program.output_nodes["logits"]], ports["input_ids"].meta["val"].shape[1])
    if not found:
        return program
    hidden = found[0].all_input_nodes[0]
    *_, last = graph.find_nodes(op="placeholder")
    with graph.inserting_after(last):
        kept = graph.placeholder(KEPT)
    with graph.inserting_before(found[0]):
        rows = graph.call_function(torch.ops.aten.index_select.default, (hidden, 1, kept))
    rows.meta = dict(hidden.meta)
    from torch._dynamo.source import ConstantSource  # slow to load, and for builds alone

    found[0].replace_input_with(hidden, rows)
    example = torch.arange(_EXAMPLE_SIZE)
    mode = hidden.meta["val"].fake_mode
    # What was read from a file has symbols that its tracer did not number.
    mode.shape_env.unique_ids |= {int(str(symbol)[1:]) for symbol in mode.shape_env.var_to_range}
    dynamic: Any = StatelessSymbolicContext([DimDynamic.DYNAMIC])
    kept.meta["val"] = mode.from_tensor(example, source=ConstantSource(KEPT), symbolic_context=dynamic)
    with mode:
        for node in (rows, *found):
            target: Any = node.target
            node.meta["val"] = target(*map_arg(node.args, _value), **map_arg(node.kwargs, _value))
    symbol = kept.meta["val"].shape[0].node.expr
    spec = exported.call_spec.in_spec
    args, kwargs = pytree.tree_unflatten([0] * spec.num_leaves, spec)
    given, named = exported.example_inputs or ((), {})
    changed = rebuilt(
        exported,
        graph,
        exported.graph_signature.output_specs,
        input_specs=[
            *exported.graph_signature.input_specs,
            InputSpec(InputKind.USER_INPUT, TensorArgument(kept.name), None),
        ],
        in_spec=pytree.tree_structure((args, {**kwargs, KEPT: 0})),
        example_inputs=(given, {**named, KEPT: example}),
        range_constraints={**exported.range_constraints, symbol: mode.shape_env.var_to_range[symbol]},
    )
    port = Port(KEPT, kept.name, "int64", (SIZE,))
    return dataclasses.replace(program, exported=changed, inputs=(*program.inputs, port))


def _products(logits: Node, tokens: int | torch.SymInt) -> list[Node]:
    """Return the product with the vocabulary and what is done to its elements; nothing where rows are not tokens."""
    found = [logits]
    while len(found[0].all_input_nodes) == 1 and traits_of(found[0]).rounding in (Rounding.POINTWISE, Rounding.CASTS):
        found.insert(0, found[0].all_input_nodes[0])
    product = found[0]
    is_read = any(user.op != "output" and user not in found for node in found for user in node.users)
    if product.target is not torch.ops.aten.linear.default or is_read or isinstance(tokens, int):
        return []
    shape = product.all_input_nodes[0].meta["val"].shape
    return found if len(shape) == 3 and str(shape[1]) == str(tokens) else []


def _value(node: Node) -> Any:
    return node.meta["val"]
