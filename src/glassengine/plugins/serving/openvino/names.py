"""Which output of a graph of OpenVINO is which operation of the modules that it was traced from.

The converter names what it makes of an operation by module and operation (`__module.model.norm/aten::mul/Multiply_1`),
and numbers repetitions in an order of its own. So repetitions are numbered here, and only where each is made of the one
before and none was taken away; of several that were made of one operation the last kind has its value. What an
attention reads is taken from its inputs.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from glassengine.plugins.serving.executorch.inside.glassengine_executorch import MOVES, OTHERWISE

_NAME = re.compile(r"__module\.(.+?)/aten::(\w+)/([A-Za-z]\w*?)(?:_(\d+))?")
_ATTENTION = "ScaledDotProductAttention"
_PRODUCTS = {"linear", "addmm", "matmul"}


def observed(model: Any) -> dict[str, Any]:
    """Return outputs by module, operation and number; and what products and attention read (`in.0`, `attn.q`)."""
    groups: dict[tuple[str, str], list[tuple[str, int, int, Any]]] = {}
    found: dict[str, Any] = {}
    above: dict[str, int] = {}
    for place, op in enumerate(model.get_ordered_ops()):
        sources = [source.get_source_output() for source in op.inputs()]
        above[op.get_friendly_name()] = 1 << place
        for source in sources:
            above[op.get_friendly_name()] |= above.get(source.get_node().get_friendly_name(), 0)
        known = _NAME.fullmatch(op.get_friendly_name())
        if known is None or op.get_output_size() != 1 or not op.output(0).get_element_type().is_real():
            continue
        path, name, kind, written = known.groups()
        if op.get_type_name() == _ATTENTION:
            found.update(_read(path, sources))
        if op.get_type_name() == "MatMul" and name in _PRODUCTS:
            found[f"{path}/in.0"] = sources[0]
        if name not in MOVES and not path.endswith(OTHERWISE):
            groups.setdefault((path, name), []).append((kind, int(written or 0), place, op))
    for (path, name), ops in groups.items():
        same = [(number, place, op) for kind, number, place, op in ops if kind == ops[-1][0]]
        kind, number, _, op = ops[-1]
        is_chain = all(above[after.get_friendly_name()] >> place & 1 for (_, place, _), (*_, after) in pairwise(same))
        if is_chain and sorted(written for written, *_ in same) == list(range(len(same))):
            found |= {f"{path}/{name}.{place}": op.output(0) for place, (*_, op) in enumerate(same)}
        elif len(same) == 1 and op.get_type_name() != kind:
            found[f"{path}/{name}.{number}"] = op.output(0)  # several became one, by the name of the last
    return found


def _read(path: str, sources: list[Any]) -> dict[str, Any]:
    """Return the rotated queries that an attention reads, and the keys and values that are new in this step."""
    found = {f"{path}/attn.q": sources[0]}
    for name, source in (("attn.k", sources[1]), ("attn.v", sources[2])):
        port = source
        while port.get_node().get_type_name() in ("Reshape", "Broadcast", "Unsqueeze", "Transpose"):
            port = port.get_node().input(0).get_source_output()
        if port.get_node().get_type_name() == "Concat" and port.get_node().get_input_size() == 2:
            found[f"{path}/{name}"] = port.get_node().input(1).get_source_output()
    return found


def key_of(port: Any) -> tuple[str, int]:
    """Return what says which output this is, of two objects for one."""
    return port.get_node().get_friendly_name(), port.get_index()
