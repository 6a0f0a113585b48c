"""Transformers of images by two authors each: attention within units, with biases of positions, beside transformers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from absent import standing_in, timm_model
from images import Edits, of_transformers, with_mistake
from pair import Mistake, Pair, filled_in_order, in_order, shaken
from torch import Tensor, nn

HIERA: Edits = {
    "no scale": ("(query * self.scale) @ key", "query @ key"),
    "mean of queries": ("query = query.max(dim=3).values", "query = query.mean(dim=3)"),
    "shortcut not normed": (
        "self.proj(hidden_states_norm)\n            # Refer",
        "self.proj(hidden_states)\n            # Refer",
    ),
    "units": (
        "qkv = qkv.reshape(batch_size, tokens_per_window, num_windows, 3, self.num_heads, self.head_dim)\n"
        "        qkv = qkv.permute(3, 0, 4, 2, 1, 5)",
        "qkv = qkv.reshape(batch_size, num_windows, tokens_per_window, 3, self.num_heads, self.head_dim)\n"
        "        qkv = qkv.permute(3, 0, 4, 1, 2, 5)",
    ),
    "neighbors pooled": (
        "hidden_states.view(batch_size, self.query_stride, -1, self.hidden_size_output).max(dim=1)",
        "hidden_states.view(batch_size, -1, self.query_stride, self.hidden_size_output).max(dim=2)",
    ),
    "keys first": ("query, key, value = qkv.unbind(0)", "key, query, value = qkv.unbind(0)"),
}


def hiera(mistake: str) -> tuple[nn.Module, nn.Module]:
    parts = ("ops", "ops.misc", "transforms", "transforms.functional", "datasets", "models")
    timm_model("vision_transformer")
    with standing_in("torchvision", *(f"torchvision.{part}" for part in parts)):
        Hiera = importlib.import_module("hiera.hiera").Hiera
    theirs = with_mistake(of_transformers("hiera"), HIERA, mistake)
    torch.manual_seed(0)
    own = Hiera(
        input_size=(32, 32),
        embed_dim=12,
        num_heads=1,
        num_classes=5,
        stages=(1, 2, 1),
        q_pool=2,
        mask_unit_size=(4, 4),
        mask_unit_attn=(True, True, False),
    )
    own.head.act_func = nn.Identity()
    config = theirs.HieraConfig(
        embed_dim=12,
        image_size=[32, 32],
        depths=[1, 2, 1],
        num_heads=[1, 2, 4],
        num_query_pool=2,
        masked_unit_size=[4, 4],
        masked_unit_attention=[True, True, False],
        layer_norm_eps=1e-6,
        num_labels=5,
    )
    port = theirs.HieraForImageClassification(config).eval()
    tensors = in_order(shaken(own))
    if mistake == "positions":
        tensors["pos_embed"] = tensors["pos_embed"].unflatten(1, (8, 8)).transpose(1, 2).flatten(1, 2)
    filled_in_order(port, tensors)
    return own, port


LEVIT: Edits = {
    "bias not taken": (
        "attention = query @ key.transpose(-2, -1) * self.scale + self.get_attention_biases(hidden_state.device)\n"
        "        attention = attention.softmax(dim=-1)\n"
        "        hidden_state = (attention @ value).transpose(1, 2).reshape(batch_size, seq_length",
        "attention = query @ key.transpose(-2, -1) * self.scale\n"
        "        attention = attention.softmax(dim=-1)\n"
        "        hidden_state = (attention @ value).transpose(1, 2).reshape(batch_size, seq_length",
    ),
    "activation after": (
        "reshape(batch_size, seq_length, self.out_dim_projection)\n"
        "        hidden_state = self.projection(self.activation(hidden_state))",
        "reshape(batch_size, seq_length, self.out_dim_projection)\n"
        "        hidden_state = self.activation(self.projection(hidden_state))",
    ),
    "other rows": (":: self.stride, :: self.stride\n", "1 :: self.stride, 1 :: self.stride\n"),
    "activation": (
        "        self.linear_up = MLPLayerWithBN(input_dim, hidden_dim)\n        self.activation = nn.Hardswish()",
        "        self.linear_up = MLPLayerWithBN(input_dim, hidden_dim)\n        self.activation = nn.SiLU()",
    ),
}


def levit(mistake: str) -> tuple[nn.Module, nn.Module]:
    theirs = with_mistake(of_transformers("levit"), LEVIT, mistake)
    torch.manual_seed(0)
    own = timm_model("levit").Levit(
        img_size=64,
        num_classes=5,
        embed_dim=(16, 24, 32),
        key_dim=8,
        depth=(1, 1, 1),
        num_heads=(2, 3, 4),
        attn_ratio=2,
        mlp_ratio=2,
        act_layer="hard_swish",
    )
    config = theirs.LevitConfig(
        image_size=64,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 3, 4],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        attention_ratio=[2, 2, 2],
        mlp_ratio=[2, 2, 2],
        num_labels=5,
    )
    port = theirs.LevitForImageClassification(config).eval()
    tensors = in_order(shaken(own))
    if mistake == "variance":
        name = "stages.1.blocks.0.mlp.ln1.bn.running_var"
        tensors[name] = torch.ones_like(tensors[name])
    if mistake == "rows and columns":
        name = "stages.0.blocks.0.attn.attention_biases"
        tensors[name] = tensors[name].unflatten(1, (4, 4)).mT.flatten(1)
    filled_in_order(port, tensors)
    return own, port


BEIT: Edits = {
    "cls among them": ("hidden_states[:, 1:, :].mean(1)", "hidden_states.mean(1)"),
    "index": (
        "relative_coords[:, :, 0] *= 2 * window_size[1] - 1",
        "relative_coords[:, :, 1] *= 2 * window_size[1] - 1",
    ),
    "to and from": (
        "relative_position_index[0, 0:] = num_relative_distance - 3  # cls to token\n"
        "        relative_position_index[0:, 0] = num_relative_distance - 2",
        "relative_position_index[0, 0:] = num_relative_distance - 2  # cls to token\n"
        "        relative_position_index[0:, 0] = num_relative_distance - 3",
    ),
    "scale left out": ("        hidden_states = self.lambda_2 * hidden_states\n", ""),
    "residual": (
        "        residual = hidden_states\n        hidden_states = self.layernorm_after(hidden_states)",
        "        hidden_states = self.layernorm_after(hidden_states)\n        residual = hidden_states",
    ),
}


def beit(mistake: str) -> tuple[nn.Module, nn.Module]:
    theirs = with_mistake(of_transformers("beit"), BEIT, mistake)
    torch.manual_seed(0)
    own = shaken(
        timm_model("beit").Beit(
            img_size=16,
            patch_size=4,
            num_classes=5,
            embed_dim=24,
            depth=2,
            num_heads=3,
            init_values=0.5,
            use_abs_pos_emb=False,
            use_rel_pos_bias=True,
        )
    )
    config = theirs.BeitConfig(
        image_size=16,
        patch_size=4,
        hidden_size=24,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_labels=5,
        layer_scale_init_value=0.5,
        use_relative_position_bias=True,
        use_mean_pooling=True,
        layer_norm_eps=1e-3 if mistake == "epsilon" else 1e-6,
    )
    port = theirs.BeitForImageClassification(config).eval()
    names: dict[str, Any] = {
        "fc_norm": "beit.pooler.layernorm",
        "head": "classifier",
        "cls_token": "beit.embeddings.cls_token",
        "patch_embed.proj": "beit.embeddings.patch_embeddings.projection",
        "blocks.": "beit.layers.",
        "gamma_": "lambda_",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "attn.proj": "attention.o_proj",
        "attn.q_bias": "attention.q_proj.bias",
        "attn.v_bias": "attention.v_proj.bias",
        "attn.relative": "relative_position_bias.relative",
        "attn.qkv": "attention.{}_proj",
    }
    tensors: dict[str, Tensor] = {}
    for name, tensor in in_order(own).items():
        for here, there in names.items():
            name = name.replace(here, there)
        if "{}" in name:
            order = "kqv" if mistake == "order of rows" and ".1." in name else "qkv"
            tensors.update({name.format(which): rows for which, rows in zip(order, tensor.chunk(3), strict=True)})
        else:
            tensors[name] = tensor
    port.load_state_dict(tensors)
    return own, port


G = torch.Generator().manual_seed(1)
PAIRS = [
    Pair(
        "hiera, transformers",
        ("hiera", "timm"),
        hiera,
        {"x": torch.randn(2, 3, 32, 32, generator=G)},
        {
            "no scale": Mistake(["blocks.0.attn/scaled_dot_product_attention.0"], ["scale"]),
            "mean of queries": Mistake(["blocks.1.attn/max.0", "blocks.1.attn/getitem.*"], ["mean", "max"]),
            "shortcut not normed": Mistake(["blocks.1.proj/linear.0"], ["norm1", "layer_norm", "blocks.0/add"]),
            "units": Mistake(["blocks.0.attn/*"], ["order", "taken apart", "permuted", "transposed"]),
            "neighbors pooled": Mistake(["blocks.1/*"], ["order", "taken apart", "dim", "neighbor"]),
            "keys first": Mistake(["blocks.0.attn/*"], ["exchanged", "query", "key"]),
            "positions": Mistake(["./add.0"], ["pos_embed"]),
        },
    ),
    Pair(
        "timm levit, transformers",
        ("timm",),
        levit,
        {"x": torch.randn(2, 3, 64, 64, generator=G)},
        {
            "bias not taken": Mistake(["stages.0.blocks.0.attn/add.0"], ["not added", "missing"]),
            "activation after": Mistake(["stages.0.blocks.0.attn.proj.act/hardswish.0"], ["hardswish"]),
            "other rows": Mistake(["stages.1.downsample.attn_downsample.q.down/slice*"], ["start"]),
            "rows and columns": Mistake(["stages.0.blocks.0.attn/index.0"], ["attention_biases"]),
            "activation": Mistake(["stages.0.blocks.0.mlp.act/hardswish.0"], ["silu"]),
            "variance": Mistake(["stages.1.blocks.0.mlp.ln1.bn/*"], ["running_var"]),
        },
    ),
    Pair(
        "timm beit, transformers",
        ("timm",),
        beit,
        {"x": torch.randn(2, 3, 16, 16, generator=G)},
        {
            "cls among them": Mistake(["./mean.0", "./slice*"], ["start", "slice"]),
            "index": Mistake(["blocks.0.attn/index.0"], ["another order"]),
            "to and from": Mistake(["blocks.0.attn/index.0"], ["another order"]),
            "scale left out": Mistake(["blocks.0/mul.1"], ["missing", "gamma_2"]),
            "residual": Mistake(["blocks.0/add.1"], ["layer_norm", "norm2", "instead of"]),
            "epsilon": Mistake(["blocks.0.norm1/layer_norm.0"], ["eps"]),
            "order of rows": Mistake(
                ["blocks.1.attn/linear.0", "blocks.1.attn/scaled_dot_product_attention.0"], ["exchanged"]
            ),
        },
    ),
]
