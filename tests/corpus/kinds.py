"""Which kinds of hint are right for the planted mistakes: the first is what people call it, any of them is right."""

from __future__ import annotations

from glassengine.results import Kind

_RIGHT = {
    "scale": "scale_missing scale_1.05 scale_squared gain_plus_one gain_dropped factor_1.001 factor_1.01 weight_x1.001 "
    "weight_x1.01 vector_x1.05 source_scaling source_mlp_scaled",
    "scale other": "residual_twice subtracted mean_over_one_less reciprocal_missing router_not_renormalized "
    "source_step_unsoftened weight_zero weight_row_x1.01 statistics_stale",
    "scale activation other": "constant_x1.02 constant_x10",
    "bias missing": "bias_dropped source_bias_forgotten",
    "bias missing other": "residual_dropped layer_skipped",
    "mask": "mask_sees_one_more mask_hides_newest causal_missing padding_ignored mask_dropped",
    "mask other stale": "value_zero_first",
    "position": "positions_shifted positions_late position_table_shifted position_stuck_in_decode sine_for_cosine "
    "tokens_shifted",
    "position scale": "rope_sign rope_base source_rotary_base source_positions_doubled",
    "position swapped": "key_not_rotated",
    "position permuted swapped": "rope_half rope_interleaved embedding_shifted source_first_token_moved "
    "rows_of_batch_swapped",
    "position other": "slice_shifted source_distance_doubled",
    "position swapped other": "expert_shifted",
    "activation": "gelu_other_form silu_to_gelu silu_to_sigmoid gelu_to_relu relu_to_gelu tanh_to_sigmoid "
    "source_activation",
    "activation scale": "silu_steeper",
    "swapped": "keys_as_values gate_up_swapped concat_order split_order source_gate_up_swapped "
    "source_query_key_swapped source_head_tied",
    "swapped stale": "weight_of_another residual_from_norm source_norms_swapped source_layers_swapped",
    "swapped other": "source_statistics_swapped",
    "permuted": "heads_reversed heads_rolled repeat_order kernel_flipped source_kernel_mirrored",
    "permuted position": "weight_rows_swapped",
    "transposed": "weight_transposed",
    "transposed permuted": "view_for_transpose",
    "transposed other": "softmax_wrong_dim mean_wrong_dim",
    "stale": "cache_never_written cache_not_written_in_decode cache_oldest_lost_in_decode",
    "stale position permuted": "cache_wrong_slot cache_slots_reversed",
    "stale scale": "cache_stale_in_decode",
    "stale permuted swapped": "cache_of_neighbour_in_decode",
    "stale other": "weight_stale",
    "dtype": "operand_bfloat16 operand_float16 operand_tf32 operand_float8 island_bfloat16 island_float16 "
    "sum_in_halves",
    "dtype other": "cast_truncates overflow weight_int4 weight_int8",
    "eps": "rms_epsilon_x10 rms_epsilon_x1000 layer_norm_epsilon_x10 layer_norm_epsilon_x1000 epsilon_outside "
    "source_epsilon",
    "other scale": "norm_skipped",
    "other": "layer_norm_of_abs last_token_lost dropout_active not_a_number router_not_normalised "
    "weight_exponent_bit weight_sign_flip weight_nan weight_row_zero vector_one_element source_norm_missing "
    "source_key_norm_missing",
    "other activation": "clamp_added",
}


def _split(kinds: str) -> tuple[Kind, ...]:
    found: tuple[Kind, ...] = ("bias missing",) if kinds.startswith("bias missing") else ()
    return (*found, *kinds.removeprefix("bias missing").split())  # type: ignore[arg-type]


KINDS: dict[str, tuple[Kind, ...]] = {name: _split(kinds) for kinds, names in _RIGHT.items() for name in names.split()}
"""Of the mistakes that are planted in graphs, weights and modules; random ones are of any kind."""

_OF_PORTS = {
    "llama": {
        "eps": "eps",
        "scale": "gain plus one, no scale",
        "position": "theta",
        "position permuted": "neighbors",
        "position scale": "the other way",
        "permuted": "keys in turn, rows of q",
        "mask": "no mask, mask by one, window",
        "swapped": "gate and up",
        "swapped stale": "residual of the norm, norm of another place",
        "activation": "gelu",
    },
    "gpt2": {
        "position": "positions from one",
        "activation": "gelu",
        "bias missing": "no bias",
        "bias missing other": "no residual",
        "other": "no last norm, mean, unbiased",
        "swapped": "order of the parts",
        "permuted": "heads by their width",
        "transposed other": "softmax over queries",
        "scale": "scale twice",
        "transposed permuted": "not transposed",
        "transposed": "transposed",
    },
    "bert": {
        "eps": "eps",
        "bias missing other": "no token types",
        "position swapped": "other token types",
        "mask": "mask inverted, no mask",
        "swapped stale": "weights of another layer",
        "other": "norm before",
        "activation": "relu",
        "scale other": "residual twice",
    },
    "vision": {
        "transposed": "kernel transposed",
        "permuted": "kernel flipped",
        "transposed permuted": "patches by columns",
        "swapped position permuted": "class token last",
        "position": "positions moved",
        "bias missing other position": "no positions",
        "swapped": "query and key",
        "activation": "quick gelu",
    },
    "residual": {
        "other": "padding by reflection, no root, pooling",
        "eps": "eps",
        "bias missing other": "no mean, no shortcut",
        "activation": "no activation, leaky",
        "other scale": "sum",
    },
    "speech": {
        "position other": "padding on the left",
        "bias missing": "no bias",
        "permuted": "kernel flipped",
        "activation": "no activation, gelu",
        "position swapped permuted": "sine and cosine",
        "scale": "no scale, half",
    },
}
OF_PORTS: dict[tuple[str, str], tuple[Kind, ...]] = {
    (port, name): _split(kinds)
    for port, found in _OF_PORTS.items()
    for kinds, names in found.items()
    for name in names.split(", ")
}
"""Of the mistakes in models of transformers that are written again by hand: (port, mistake)."""
