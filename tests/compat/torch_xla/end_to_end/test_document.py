"""The scripts of "How to debug models in PyTorch NeuronX" with other imports, and the numbers that it tells.

The scripts of the document are word for word on the pages docs/guide/coming-from-pytorch-neuronx*.md, where they run.
"""

from __future__ import annotations

import gc
import importlib
import re
from collections.abc import Callable
from pathlib import Path

import torch

import glassengine.compat.torch_xla.core.xla_model as xm
import glassengine.compat.torch_xla.debug.metrics as met
from glassengine.compat.torch_xla.experimental import eager_mode_context

Count = Callable[[str], int]


def samples(name: str) -> int:
    data = met.metric_data(name)
    return 0 if data is None else data[0]


def numbers() -> tuple[int, int]:
    """Return how often something was compiled and run; the counters and the times say the same."""
    compiled, run = samples("CompileTime"), samples("ExecuteTime")
    assert compiled == (met.counter_value("UncachedCompile") or 0) == samples("TensorsGraphSize")
    assert run == compiled + (met.counter_value("CachedCompile") or 0)
    return compiled, run


def forward() -> tuple[torch.Tensor, torch.Tensor]:
    device = xm.xla_device()
    input1 = torch.randn(2, 10).to(device)
    linear1 = torch.nn.Linear(10, 30).to(device)
    linear2 = torch.nn.Linear(30, 20).to(device)
    output1 = linear1(input1)
    return output1, linear2(output1)


def test_each_printed_tensor_is_a_graph_compiled_and_run() -> None:
    """ "If you try to print output1, a new graph is cut and you would see another evaluation"."""
    output1, output2 = forward()
    assert numbers() == (0, 0)
    str(output2)
    assert numbers() == (1, 1)
    str(output1)
    assert numbers() == (2, 2)
    str(output1), str(output2)
    assert numbers() == (2, 2) and met.counter_value("TensorRead") == 2


def test_after_a_step_printing_costs_nothing() -> None:
    """ "The number of compiles and executions is only 1, even though 2 tensors are printed"."""
    output1, output2 = forward()
    xm.mark_step()
    str(output2), str(output1)
    assert numbers() == (1, 1) and met.counter_value("MarkStep") == 1
    # The document's own script: addmm and t twice. Here the input and four parameters are moved; it has six transfers.
    assert met.counter_value("lazy::addmm") == met.counter_value("lazy::t") == 2
    assert samples("TransferFromDeviceTime") == 2 and samples("TransferToDeviceTime") == 5
    assert met.counter_value("TensorRead") is None and met.executed_fallback_ops() == []


def test_tensors_are_counted_when_they_are_made_and_when_they_go() -> None:
    gc.collect()  # what tests before this one left in circles
    met.clear_all()
    output1, output2 = forward()
    # An input, four parameters and two outputs; a transposed weight shares its memory.
    assert met.counter_value("CreateTensor") == 7
    xm.mark_step()
    del output1, output2
    gc.collect()
    assert met.counter_value("DestroyTensor") == 7


def test_closures_print_in_the_graph_of_their_step() -> None:
    """ "The added tensors would then be preserved in the graph and can be printed as part of the callback"."""
    seen: list[str] = []
    output1, output2 = forward()
    for output in (output1, output2):
        xm.add_step_closure(lambda value: seen.append(str(value)), args=(output,))
    xm.mark_step()
    assert len(seen) == 2 and numbers() == (1, 1)


def test_in_eager_debug_mode_printing_compiles_nothing() -> None:
    """Examples 1 and 2: "linear4 is same as the graph for linear2 and hence the compiled graph is reused"."""
    with eager_mode_context(True):
        output1, output2 = forward()
        before = numbers()
        # t and addmm of each layer; a transposition is a view, which needs no graph.
        assert before == (2, 2)
        str(output2), str(output1)
        assert numbers() == before
        device = xm.xla_device()
        output3 = torch.nn.Linear(20, 30).to(device)(output2)
        assert numbers() == (3, 3)
        torch.nn.Linear(30, 20).to(device)(output3)
        assert numbers() == (3, 4)


def test_a_loop_compiles_its_first_steps_and_then_nothing() -> None:
    device = xm.xla_device()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 28, 28).to(device)).square().mean()
        loss.backward()
        xm.optimizer_step(optimizer)
        xm.mark_step()
        # The first step makes the momentum, the second one reads it.
        assert numbers() == (min(step + 1, 2), step + 1)
    assert loss.item() > 0 and met.counter_value("MarkStep") == 6


def test_the_names_that_the_page_lists_are_there(root: Path) -> None:
    page = (root / "docs/guide/coming-from-pytorch-neuronx.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(torch_xla[.\w]*)` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 9
    for module, names in rows:
        found = importlib.import_module(f"glassengine.compat.{module}")
        for name in re.findall(r"`(\w+)`", names):
            # A refusal is made anew each time it is asked for.
            assert callable(getattr(found, name)) and getattr(found, name) is getattr(found, name), name
