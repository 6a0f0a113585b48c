"""Which graphs run, when, and how often they are compiled."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import glassengine as glass
from glassengine.plugins.lazy.settings import settings

Count = Callable[[str], int]


def linears() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(0)
    return nn.Linear(10, 30), nn.Linear(30, 20)


def executions() -> int:
    variants = [variant for graph in settings.graphs.values() for variant in graph.variants]
    return sum(variant.executable.num_executions for variant in variants)


def compilations() -> int:
    return sum(len(graph.variants) for graph in settings.graphs.values())


def test_two_prints_are_two_graphs_and_one_step_is_one(device: torch.device) -> None:
    """The lesson of the document: a step evaluates all in one graph, and what is printed after it costs nothing."""
    first, second = (linear.to(device) for linear in linears())
    given = torch.randn(2, 10).to(device)

    output1 = first(given)
    output2 = second(output1)
    assert (compilations(), executions()) == (0, 0)
    repr(output2)
    assert (compilations(), executions()) == (1, 1)
    repr(output1)
    assert (compilations(), executions()) == (2, 2)
    repr(output1), repr(output2)
    assert (compilations(), executions()) == (2, 2)

    settings.graphs.clear()
    output1 = first(given)
    output2 = second(output1)
    glass.mark_step()
    repr(output2), repr(output1)
    assert (compilations(), executions()) == (1, 1)
    plain1, plain2 = linears()
    assert torch.equal(output2.cpu(), plain2(plain1(given.cpu())))


def test_equal_steps_are_compiled_once(device: torch.device, counters: Count) -> None:
    total = torch.zeros(3).to(device)
    for number in range(5):
        total = total + torch.full((3,), float(number)).to(device) * 2
        glass.mark_step()
    assert total.tolist() == [20.0] * 3
    assert compilations() == 1 and executions() == 5
    assert counters("UncachedCompile") == 1 and counters("CachedCompile") == 4 and counters("MarkStep") == 5


def test_numbers_that_change_are_inputs(device: torch.device) -> None:
    value = torch.ones(3).to(device)
    for number in (0.5, 0.25, 3.5, -0.0):
        value = value * number + number
        glass.mark_step()
    assert compilations() == 1
    expected = torch.ones(3)
    for number in (0.5, 0.25, 3.5, -0.0):
        expected = expected * number + number
    assert torch.equal(value.cpu(), expected)


def test_integers_and_settings_that_change_are_inputs_from_the_second_value_on(device: torch.device) -> None:
    given = torch.randn(4, 3)
    for number in range(1, 6):
        made = given.to(device) * number
        normal = torch.nn.functional.layer_norm(given.to(device), (3,), eps=10.0**-number)
        glass.mark_step()
        assert torch.equal(made.cpu(), given * number)
        assert torch.equal(normal.cpu(), torch.nn.functional.layer_norm(given, (3,), eps=10.0**-number))
    assert compilations() == 2


def test_zeros_of_either_sign_are_other_constants(device: torch.device) -> None:
    ones = torch.ones(2, dtype=torch.int64).to(device)
    for number in (0.0, -0.0, 0.0):
        assert torch.equal((1 / (ones * number)).cpu(), 1 / (torch.ones(2, dtype=torch.int64) * number))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
@pytest.mark.parametrize("schedule", [False, True])
def test_training_is_bit_for_bit_that_of_eager_code(
    device: torch.device, optimizer: type[torch.optim.Optimizer], schedule: bool
) -> None:
    def train(target: nn.Module, where: torch.device) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(3)
        chosen = optimizer(target.parameters(), lr=0.01)  # type: ignore[call-arg]
        rates = torch.optim.lr_scheduler.ExponentialLR(chosen, 0.9) if schedule else None
        losses = []
        for _ in range(6):
            given, wanted = torch.randn(4, 10).to(where), torch.randint(0, 5, (4,)).to(where)
            chosen.zero_grad()
            loss = nn.functional.cross_entropy(target(given), wanted)
            loss.backward()
            nn.utils.clip_grad_norm_(target.parameters(), 1.0)
            chosen.step()
            if rates is not None:
                rates.step()
            glass.mark_step()
            losses.append(loss.detach())
        return [float(loss) for loss in losses], {name: value.cpu() for name, value in target.state_dict().items()}

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(10, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 5)
    )
    other = copy.deepcopy(net).to(device)
    losses, state = train(net, torch.device("cpu"))
    lazy_losses, lazy_state = train(other, device)
    assert losses == lazy_losses
    for name, value in state.items():
        assert torch.equal(value, lazy_state[name]), name
    # The first step has no state of the optimizer yet; reading the losses needs no graph.
    assert compilations() <= 2


def test_reading_is_counted_and_logged_with_its_line(
    device: torch.device, counters: Count, caplog: pytest.LogCaptureFixture
) -> None:
    value = torch.ones(2).to(device) + 1
    with caplog.at_level(logging.INFO, "glassengine.lazy"):
        assert value.sum().item() == 4.0
    assert counters("TensorRead") == 1
    (message,) = [record.message for record in caplog.records if record.name == "glassengine.lazy"]
    assert "item()" in message and "test_running.py:" in message
    assert any(name.startswith("TensorRead::item() at ") for name in glass.metrics.current().counters)


def test_results_do_not_depend_on_earlier_reads(device: torch.device) -> None:
    """A value that is overwritten after another was made of it, and read in either order."""
    for read_first in (True, False):
        base = torch.arange(4.0).to(device)
        double = base * 2
        base.add_(10)
        half = base / 2
        if read_first:
            assert base.tolist() == [10.0, 11.0, 12.0, 13.0]
        assert double.tolist() == [0.0, 2.0, 4.0, 6.0]
        assert half.tolist() == [5.0, 5.5, 6.0, 6.5]
        assert base.tolist() == [10.0, 11.0, 12.0, 13.0]


def test_what_a_tensor_was_made_of_may_change_before_it_is_computed(device: torch.device) -> None:
    plain = torch.ones(3)
    moved = plain.to(device)
    mixed = moved + plain
    plain.fill_(100)
    assert mixed.tolist() == [2.0] * 3 and moved.tolist() == [1.0] * 3


def test_pending_graphs_are_freed_with_their_tensors(device: torch.device) -> None:
    given = torch.ones(1000).to(device)
    value = given
    for _ in range(5000):
        value = value + 1
    assert len(glass.lazy.pending()) == 1
    call = value._lazy.get().call  # type: ignore[attr-defined]
    assert len(gc.get_referrers(call)) >= 1
    del call, value
    gc.collect()
    assert glass.lazy.pending() == ()
    glass.mark_step()
    assert executions() == 0


def test_compiling_keeps_no_variable_of_the_code_that_runs(device: torch.device) -> None:
    """Planted: looking at the variables of a frame keeps them, before Python 3.13, as long as its function runs."""
    value = torch.ones(2).to(device) + 1
    gone = weakref.ref(value)
    glass.mark_step()
    del value
    gc.collect()
    assert gone() is None
    value, mine = torch.ones(3).to(device) + 1, locals()
    glass.mark_step()
    assert mine["gone"] is gone and value.tolist() == [2.0] * 3


def test_closures_see_values_and_cost_no_graph(device: torch.device) -> None:
    seen = []
    for run_async in (False, True):
        value = torch.ones(2).to(device) * 3
        glass.lazy.add_step_closure(lambda one: seen.append(one.tolist()), (value,), run_async=run_async)
        glass.mark_step(wait=True)
    assert seen == [[3.0, 3.0]] * 2
    assert executions() == 2


def test_each_operation_by_itself(device: torch.device) -> None:
    first, second = (linear.to(device) for linear in linears())
    with glass.lazy.mode("eager_debug", backend="eager"):
        output = second(first(torch.ones(2, 10).to(device)))
        assert executions() == compilations() == 2
        repr(output)
        second(first(torch.ones(2, 10).to(device)))
        assert executions() == 4 and compilations() == 2


def test_autocast_in_effect_when_a_graph_runs_changes_nothing(device: torch.device) -> None:
    given = torch.randn(4, 4)
    product = given.to(device) @ given.to(device)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        glass.mark_step()
    assert torch.equal(product.cpu(), given @ given)
