"""Versions of torch: what the tested one takes, and what an older one would be given."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from glassengine.torch_versions import compiling, donated, enlarge_caches, tracing_real_tensors


def test_a_graph_is_donated_where_torch_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert donated() == {"donate_graph_module": True}

    def older(gm: object, example_inputs: object, *, dynamic_shapes: str = "from_graph", aot: bool = False) -> None:
        raise NotImplementedError

    monkeypatch.setattr(torch._inductor, "standalone_compile", older)
    assert donated() == {}


def test_code_that_asks_is_told_that_it_is_compiled() -> None:
    before = torch.compiler.is_compiling()
    with pytest.raises(ZeroDivisionError), compiling():
        assert torch.compiler.is_compiling()
        raise ZeroDivisionError
    assert torch.compiler.is_compiling() is before is False


def test_nodes_of_a_trace_with_real_tensors_have_values_of_one_mode() -> None:
    def sums(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sum(0) + x[0]

    x = torch.arange(6.0).reshape(3, 2)
    apart = make_fx(sums)(x)
    with tracing_real_tensors():
        together = make_fx(sums)(x)
    assert together.code == apart.code and torch.equal(together(x), apart(x))
    alone, one = (
        {id(node.meta["val"].fake_mode) for node in each.graph.nodes if "val" in node.meta}
        for each in (apart, together)
    )
    assert len(alone) > 1 and len(one) == 1
    assert torch._guards.TracingContext.try_get() is None


def test_the_caches_of_inductor_are_enlarged_once() -> None:
    from torch._inductor import sizevars
    from torch._inductor.codegen import cpp

    enlarge_caches()
    known = sizevars.stride_at_vec_range
    enlarge_caches()
    assert sizevars.stride_at_vec_range is known is cpp.stride_at_vec_range
    assert known.cache_parameters()["maxsize"] > 128
    x, y = sympy.symbols("x y", integer=True)
    assert known(3 * x + y, x, 16) == 3 and known(y, x, 16) == 0
