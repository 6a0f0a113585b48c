"""Versions of torch: what the tested one takes, and what an older one would be given."""

from __future__ import annotations

import pytest
import torch

from glassengine.torch_versions import compiling, donated


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
