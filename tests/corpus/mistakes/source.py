"""Kinds of mistake in the source of a model: another module, constant or call, exported anew as a port would be."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from glassengine.judge.site_pairs import pair_sites
from glassengine.program import export_program, load_model
from tests.corpus.corpus import Bench
from tests.corpus.edits import DoesNotApply, Edit, Mistake, Mutant

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


def _inner(model: nn.Module, *kinds: str) -> Any:
    """Return the last module of one of the classes `kinds` (part of the name)."""
    found = [module for module in model.modules() if any(kind in type(module).__name__ for kind in kinds)]
    if not found:
        raise DoesNotApply
    return found[-1]


def _bias_forgotten(model: nn.Module) -> None:
    """A layer that has a bias is written without."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.LayerNorm)
    found: list[Any] = [m for m in model.modules() if isinstance(m, kinds) and m.bias is not None]
    if not found:
        raise DoesNotApply
    found[len(found) // 2].bias = None


def _kernel_mirrored(model: nn.Module) -> None:
    convolution = _inner(model, "Conv2d", "Conv1d")
    if convolution.weight.dim() < 3 or convolution.weight.shape[-1] < 2:
        raise DoesNotApply
    convolution.weight = nn.Parameter(convolution.weight.flip(-1))


def _statistics_swapped(model: nn.Module) -> None:
    """The running mean is taken for the running variance."""
    norm = _inner(model, "BatchNorm")
    norm.running_mean, norm.running_var = norm.running_var, norm.running_mean.abs() + 0.1


def _first_token_moved(model: nn.Module) -> None:
    """Learned positions are those of the next token."""
    module, name = _last(model, "position_embeddings", "wpe")
    table = getattr(module, name)
    weight: Any = table.weight if isinstance(table, nn.Module) else table
    moved = nn.Parameter(weight.roll(1, -2))
    if isinstance(table, nn.Module):
        table.weight = moved
    else:
        setattr(module, name, moved)


def _query_key_swapped(model: nn.Module) -> None:
    names = (("q_proj", "k_proj"), ("query", "key"), ("q", "k"))
    for ours, theirs in names:
        with suppress(DoesNotApply):
            module, _ = _last(model, ours)
            query, key = getattr(module, ours), getattr(module, theirs)
            if query.weight.shape == key.weight.shape:
                setattr(module, ours, key)
                setattr(module, theirs, query)
                return
    raise DoesNotApply


def _step_unsoftened(model: nn.Module) -> None:
    """The step of a state space model is scaled."""
    mixer = _inner(model, "MambaMixer", "Mamba2Mixer")
    mixer.A_log = nn.Parameter(mixer.A_log + 0.1)


def _distance_doubled(model: nn.Module) -> None:
    """Relative positions fall into buckets that are half as wide."""
    module, name = _last(model, "relative_attention_max_distance")
    setattr(module, name, getattr(module, name) // 16)


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
    "source_bias_forgotten": _bias_forgotten,
    "source_kernel_mirrored": _kernel_mirrored,
    "source_statistics_swapped": _statistics_swapped,
    "source_first_token_moved": _first_token_moved,
    "source_query_key_swapped": _query_key_swapped,
    "source_step_unsoftened": _step_unsoftened,
    "source_distance_doubled": _distance_doubled,
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
