"""Kinds of mistake in the source of a model: another module, constant or call, exported anew as a port would be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from glassengine.compare.pairing import pair_sites
from glassengine.program import export_program, load_model
from glassengine.testing.corpus import Bench
from glassengine.testing.edits import DoesNotApply, Edit, Mistake, Mutant

Change = Callable[[Any], None]


def _last(model: nn.Module, *attributes: str) -> tuple[Any, str]:
    """Return the last module that has one of `attributes`, and which."""
    found = [
        (module, name)
        for module in model.modules()
        for name in attributes
        if isinstance(getattr(module, name, None), (float, int, nn.Module, torch.Tensor))
    ]
    if not found:
        raise DoesNotApply
    return found[-1]


def _number(factor: float, *attributes: str) -> Change:
    def change(model: nn.Module) -> None:
        module, name = _last(model, *attributes)
        setattr(module, name, getattr(module, name) * factor)

    return change


def _module(make: Callable[[], nn.Module], *attributes: str) -> Change:
    def change(model: nn.Module) -> None:
        module, name = _last(model, *attributes)
        setattr(module, name, make())

    return change


def _swapped(first: str, second: str) -> Change:
    def change(model: nn.Module) -> None:
        module, _ = _last(model, first)
        ours, theirs = getattr(module, first), getattr(module, second, None)
        if theirs is None:
            raise DoesNotApply
        setattr(module, first, theirs)
        setattr(module, second, ours)

    return change


def _layers_swapped(model: Any) -> None:
    layers = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1), None)
    if layers is None or type(layers[0]) is not type(layers[1]) or hasattr(layers[0], "attention_type"):
        raise DoesNotApply
    first, second = layers[0], layers[1]
    # The layers keep their numbers, which are their places in the cache; their weights change places.
    ours, theirs = first.state_dict(), copy.deepcopy(second.state_dict())
    second.load_state_dict(ours)
    first.load_state_dict(theirs)


def _head_tied(model: Any) -> None:
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is table.weight or head.weight.shape != table.weight.shape:
        raise DoesNotApply
    head.weight = table.weight


def _mlp_scaled(model: nn.Module) -> None:
    module, name = _last(model, "mlp")
    mlp = getattr(module, name)
    forward = mlp.forward
    mlp.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 1.02


def _positions_doubled(model: nn.Module) -> None:
    module, name = _last(model, "rotary_emb")
    rotary = getattr(module, name)
    forward = rotary.forward
    rotary.forward = lambda x, position_ids, *args, **kwargs: forward(x, position_ids * 2, *args, **kwargs)


_CHANGES: dict[str, Change] = {
    "source_epsilon": _number(100.0, "variance_epsilon", "eps"),
    "source_scaling": _number(1.1, "scaling", "scale_attn_weights"),
    "source_rotary_base": _number(0.98, "inv_freq"),
    "source_activation": _module(nn.ReLU, "act_fn", "act", "intermediate_act_fn"),
    "source_norm_missing": _module(nn.Identity, "norm", "ln_f"),
    "source_key_norm_missing": _module(nn.Identity, "k_norm"),
    "source_gate_up_swapped": _swapped("gate_proj", "up_proj"),
    "source_norms_swapped": _swapped("input_layernorm", "post_attention_layernorm"),
    "source_layers_swapped": _layers_swapped,
    "source_head_tied": _head_tied,
    "source_mlp_scaled": _mlp_scaled,
    "source_positions_doubled": _positions_doubled,
}


def _made_in_source(edit: Edit) -> None:
    """Refuse: `plant_in_source` makes these."""
    raise DoesNotApply


SOURCE_MISTAKES = tuple(Mistake(name, "source", _made_in_source) for name in _CHANGES)


def plant_in_source(bench: Bench, mistake: Mistake, seed: str) -> Mutant:
    """Return the program of a copy of the baseline's model with one of `SOURCE_MISTAKES`; nothing is random.

    Raises:
        DoesNotApply: The model has no place for it.
    """
    model = copy.deepcopy(bench.model.module)
    with torch.no_grad():
        _CHANGES[mistake.name](model)
    inputs = None if bench.case.input_ids is not None else list(bench.case.steps)
    program = export_program(load_model(model, dtype=bench.model.dtype), inputs=inputs)
    pairs, _, _ = pair_sites(bench.program, program)
    moved = {pair.baseline.node: pair.candidate.node for pair in pairs}
    ours, theirs = ({port.name: port.node for port in p.inputs} for p in (bench.program, program))
    return Mutant(mistake, program, moved | {ours[port]: theirs[port] for port in ours})
