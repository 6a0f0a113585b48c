"""Encoders that their authors published, beside transformers': positions that are relative, patches of series.

Kinds were written before anything was run on them.
"""

from __future__ import annotations

import collections
import collections.abc
import os
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from cached import in_dtype, written
from decoders import some
from pair import Mistake, Pair, part_of, rewritten, shaken
from speech import filled, renamed
from torch import Tensor, nn
from unseen import Edits

G = torch.Generator().manual_seed(11)


class Seen(nn.Module):
    """An encoder of tokens and of which token sees which, of either package."""

    def __init__(self, embeddings: nn.Module, encoder: nn.Module, key: object) -> None:
        super().__init__()
        self.embeddings, self.encoder, self.key = embeddings, encoder, key

    def forward(self, tokens: Tensor, seen: Tensor) -> Tensor:
        state = self.embeddings(tokens, mask=torch.ones_like(tokens))
        return self.encoder(state, seen)[self.key]


DISENTANGLED_EDITS: Edits = {
    "one factor": (
        "        if 'p2c' in self.pos_att_type:\n            scale_factor += 1\n        if 'p2p' in self.pos_att_type:",
        "        if 'p2p' in self.pos_att_type:",
    ),
    "other way": ("c2p_pos = torch.clamp(relative_pos + att_span,", "c2p_pos = torch.clamp(att_span - relative_pos,"),
    "keys of positions": (
        "            p2c_att = torch.bmm(key_layer, pos_query_layer.transpose(-1, -2))",
        "            p2c_att = torch.bmm(key_layer, pos_key_layer.transpose(-1, -2))",
    ),
    "clamped before": (
        "torch.clamp(-r_pos + att_span, 0, att_span*2-1)",
        "torch.clamp(-r_pos + att_span, 0, att_span-1)",
    ),
    "no norm of places": (
        "if rel_embeddings is not None and ('layer_norm' in self.norm_rel_ebd):",
        "if False:",
    ),
    "all seen": ("output = input.masked_fill(rmask, float('-inf'))", "output = input"),
    "activation": (
        "return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))\n\n\n",
        "return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))\n\n\n",
    ),
    "no residual": (
        "    self.config = config\n\n  def forward(self, hidden_states, input_states, mask=None):\n"
        "    hidden_states = self.dense(hidden_states)\n    hidden_states = self.dropout(hidden_states)\n"
        "    hidden_states += input_states\n    hidden_states = MaskedLayerNorm(self.LayerNorm, hidden_states)\n"
        "    return hidden_states\n\nclass BertLayer",
        "    self.config = config\n\n  def forward(self, hidden_states, input_states, mask=None):\n"
        "    hidden_states = self.dense(hidden_states)\n    hidden_states = self.dropout(hidden_states)\n"
        "    hidden_states = MaskedLayerNorm(self.LayerNorm, hidden_states)\n"
        "    return hidden_states\n\nclass BertLayer",
    ),
    "no positions": ("            attention_scores = (attention_scores + rel_att)\n", "            pass\n"),
    "heads in turn": (
        "        new_x_shape = x.size()[:-1] + (attention_heads, -1)\n        x = x.view(*new_x_shape)\n",
        "        x = x.view(*x.size()[:-1], -1, attention_heads).transpose(-1, -2)\n",
    ),
    "keys and queries": (
        "            c2p_att = torch.bmm(query_layer, pos_key_layer.transpose(-1, -2))\n",
        "            c2p_att = torch.bmm(key_layer, pos_key_layer.transpose(-1, -2))\n",
    ),
}
TURNED = "key_layer.size(-2), key_layer.size(-2)])).transpose(-1,-2)"
DISENTANGLED_EDITS["not transposed"] = (TURNED, TURNED.removesuffix(".transpose(-1,-2)"))


def disentangled(mistake: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    from transformers import DebertaV2Config, DebertaV2Model

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    options = {"relative_attention": True, "max_relative_positions": 6, "norm_rel_ebd": "layer_norm"}
    options |= {"position_biased_input": False, "layer_norm_eps": 1e-7, "hidden_act": "gelu", "type_vocab_size": 0}
    config = DebertaV2Config(vocab_size=40, pos_att_type=["c2p", "p2c"], **sizes, **options)
    torch.manual_seed(0)
    own = in_dtype(shaken(DebertaV2Model(config)), dtype)
    with (
        patch.object(collections, "Sequence", collections.abc.Sequence, create=True),
        patch.object(np, "int", int, create=True),
    ):
        part_of("DeBERTa.deberta.bert", bare=["DeBERTa", "DeBERTa.deberta"])
        names = ["ops", "da_utils", "disentangled_attention", "bert"]
        edit = DISENTANGLED_EDITS.get(mistake)
        module = rewritten([f"DeBERTa.deberta.{name}" for name in names], edit)[-1]
    made = SimpleNamespace(
        vocab_size=40, pos_att_type="c2p|p2c", max_position_embeddings=512, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, position_buckets=-1, **sizes, **options,
    )  # fmt: skip
    os.environ["JIT_TRACE"] = "true"  # its softmax as ops, not as a function with a gradient of its own
    other = nn.ModuleDict({"embeddings": module.BertEmbeddings(made), "encoder": module.BertEncoder(made)})
    given = {name: t for name, t in own.state_dict().items() if not name.endswith("position_ids")}
    other = filled(in_dtype(other, dtype), given)
    if mistake == "epsilon":
        other["encoder"].layer[1].output.LayerNorm.eps = 1e-3
    if mistake == "bias":
        other["encoder"].layer[0].attention.self.value_proj.bias = None
    module.build_relative_position(9, 9, bucket_size=-1, max_position=6)  # kept by it: not made while it is exported
    return Seen(own.embeddings, own.encoder, 0).eval(), Seen(other["embeddings"], other["encoder"], -1).eval()


class Series(nn.Module):
    """Patches of series as transformers' model makes them."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, values: Tensor, padding: Tensor, frequency: Tensor) -> Tensor:
        return self.own(past_values=values, past_values_padding=padding, freq=frequency).last_hidden_state


class Patches(nn.Module):
    """The same of timesfm, without what makes forecasts of them."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, values: Tensor, padding: Tensor, frequency: Tensor) -> Tensor:
        state, pads, _, _ = self.own._preprocess_input(input_ts=values, input_padding=padding)
        state += self.own.freq_emb(frequency)
        return self.own.stacked_transformer(state, pads)


SERIES_EDITS: Edits = {
    "pads kept": ("      outputs = outputs * (1.0 - paddings[:, :, None])\n", "      pass\n"),
    "cosines first": ("torch.cat([torch.sin(scaled_time), torch.cos(scaled_time)], dim=2)",
                      "torch.cat([torch.cos(scaled_time), torch.sin(scaled_time)], dim=2)"),
    "variance": ("  masked_std = torch.sqrt(masked_var)\n", "  masked_std = masked_var\n"),
    "natural": ("r_softplus_0 = 1.442695041", "r_softplus_0 = 1.0"),
    "activation": ("gate = F.relu(gate)", "gate = F.gelu(gate)"),
    "not itself": ("mask = (row_idx < col_idx)", "mask = (row_idx <= col_idx)"),
    "moved ahead": ("(idx_range - indices[:, None, None])", "(idx_range + indices[:, None, None])"),
    "unit offset": ("      output = output * self.weight.float()\n    return",
                    "      output = output * (1 + self.weight.float())\n    return"),
    "no shortcut": ("    return output + residual\n", "    return output\n"),
    "softened scale": ("scale = scale * softplus_func(self.scaling)", "scale = scale * torch.exp(self.scaling)"),
    "order": ("xq, xk, xv = qkv.split(", "xq, xv, xk = qkv.split("),
    "steps": ("            num_timescales - 1, 1)\n", "            num_timescales, 1)\n"),
    "no mean": ("outputs = (inputs - mu[:, None, None]) / sigma[:, None, None]",
                "outputs = inputs / sigma[:, None, None]"),
    "patches by columns": ("patched_inputs = input_ts.view(bsize, -1, self.config.patch_len)",
                           "patched_inputs = input_ts.view(bsize, self.config.patch_len, -1).transpose(1, 2)"),
}  # fmt: skip


def series(mistake: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    from transformers import TimesFmConfig, TimesFmModel

    config = TimesFmConfig(
        patch_length=4, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        use_positional_embedding=True, horizon_length=4, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    own = in_dtype(shaken(TimesFmModel(config)), dtype)
    part_of("timesfm.pytorch_patched_decoder", bare=["timesfm"])
    (module,) = rewritten(["timesfm.pytorch_patched_decoder"], SERIES_EDITS.get(mistake))
    made = module.TimesFMConfig(
        num_layers=2, num_heads=2, num_kv_heads=2, hidden_size=32, intermediate_size=48, head_dim=16, patch_len=4,
        horizon_len=4,
    )  # fmt: skip
    other = module.PatchedTimeSeriesDecoder(made)
    del other.horizon_ff_layer
    given: dict[str, Tensor] = {}
    state = own.state_dict()
    for name, tensor in state.items():
        if ".q_proj." in name:
            parts = [state[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            given[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name and not name.startswith(("position_emb", "horizon")):
            given[name] = tensor
    pieces = (
        ("layers.", "stacked_transformer.layers."),
        ("input_ff_layer.input_layer", "input_ff_layer.hidden_layer.0"),
    )
    other = filled(in_dtype(other, dtype), renamed(given, *pieces))
    if mistake == "epsilon":
        other.stacked_transformer.layers[1].input_layernorm.eps = 1e-2
    return Series(own).eval(), Patches(other).eval()


OF_TOKENS = {
    "attention": ["*encoder.layer.0.attention*"],
    "positions": ["*encoder.layer.0.attention*", "*encoder*"],
    "norm": ["*encoder.LayerNorm*", "*encoder*"],
    "second": ["*encoder.layer.1.output*"],
    "mlp": ["*encoder.layer.0*"],
}
OF_SERIES = {
    "input": ["*input_ff_layer*", "own*"],
    "attention": ["own.layers.0*", "own*"],
    "second": ["own.layers.1*"],
}
TOKENS_MISTAKES: dict[str, Mistake] = written(
    OF_TOKENS,
    ("one factor", "attention", "scale"),
    ("other way", "positions", "position"),
    ("not transposed", "attention", "transposed"),
    ("keys of positions", "attention", "swapped"),
    ("clamped before", "positions", "position, other"),  # a cap of positions
    ("no norm of places", "norm", "other"),
    ("all seen", "attention", "mask"),
    ("activation", "mlp", "activation"),
    ("no residual", "mlp", "bias missing, other"),
    ("no positions", "attention", "position, bias missing, other"),  # a table is not added
    ("heads in turn", "attention", "permuted"),
    ("keys and queries", "attention", "swapped"),
    ("epsilon", "second", "eps"),
    ("bias", "attention", "bias missing"),
)
SERIES_MISTAKES: dict[str, Mistake] = written(
    OF_SERIES,
    ("pads kept", "attention", "mask, scale"),  # a mask that is a factor
    ("cosines first", "input", "swapped, position"),  # two operands, of a table of positions
    ("variance", "input", "other, scale"),  # a root is missing
    ("natural", "attention", "scale"),
    ("activation", "attention", "activation"),
    ("not itself", "attention", "mask"),
    ("moved ahead", "input", "position"),
    ("unit offset", "attention", "scale"),
    ("no shortcut", "input", "bias missing, other"),
    ("softened scale", "attention", "activation"),
    ("order", "attention", "swapped"),
    ("steps", "input", "position, scale"),  # a factor of frequencies
    ("no mean", "input", "bias missing, other"),
    ("patches by columns", "input", "transposed, permuted"),
    ("epsilon", "second", "eps"),
)


def series_inputs() -> dict[str, Tensor]:
    """Return two series, the second of which begins with padding."""
    padding = torch.zeros(2, 24)
    padding[1, :6] = 1
    values = 3 + 2 * torch.randn(2, 24, generator=G)
    return {"values": values, "padding": padding, "frequency": torch.tensor([[0], [2]])}


def tokens_inputs() -> dict[str, Tensor]:
    """Return tokens, each of which sees itself and the four before and after."""
    apart = (torch.arange(9)[:, None] - torch.arange(9)[None]).abs()
    tokens = torch.randint(1, 40, (2, 9), generator=G)
    return {"tokens": tokens, "seen": (apart < 5).long().expand(2, -1, -1).contiguous()}


TOKENS = tokens_inputs()
PAIRS = [
    Pair("transformers deberta, DeBERTa", ("DeBERTa",), disentangled, TOKENS, TOKENS_MISTAKES),
    Pair(
        "transformers deberta, DeBERTa/float16",
        ("DeBERTa",),
        partial(disentangled, dtype=torch.float16),
        TOKENS,
        some(TOKENS_MISTAKES, "one factor", "keys and queries", "other way", "no residual"),
    ),
    Pair("transformers timesfm, timesfm", ("timesfm",), series, series_inputs(), SERIES_MISTAKES),
]
