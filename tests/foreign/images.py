"""Nets of images by two authors each: packages beside transformers, weights converted as people convert them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from absent import timm_model
from pair import Mistake, Pair, answering, edited, filled_in_order, in_order, module_of, shaken
from torch import Tensor, nn

Edits = Mapping[str, tuple[str, str]]
"""Mistake -> the text of a source that it changes, and what stands there then."""


def with_mistake(module: Any, edits: Edits, mistake: str) -> Any:
    """Return a module as it is, or with one of the mistakes of its author."""
    return edited(module, *edits[mistake]) if mistake in edits else module


def of_transformers(name: str) -> Any:
    """Return the file of a model of transformers."""
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def exchanged(tensors: dict[str, Tensor], one: str, other: str) -> None:
    tensors[one], tensors[other] = tensors[other], tensors[one]


CONVNEXT: Edits = {
    "mean over rows": ("global_features.mean(dim=-1, keepdim=True)", "global_features.mean(dim=0, keepdim=True)"),
    "norm adds nothing": ("norm_features) + self.bias + hidden_states", "norm_features) + self.bias"),
    "epsilon": ("hidden_sizes[0], eps=1e-6, data_format", "hidden_sizes[0], eps=1e-3, data_format"),
    "pooled after": (
        "self.layernorm(last_hidden_state.mean([-2, -1]))",
        "self.layernorm(last_hidden_state.permute(0, 2, 3, 1)).mean([1, 2])",
    ),
    "norm below": (
        "        for layer in self.downsampling_layer:\n            features = layer(features)",
        "        if len(self.downsampling_layer):\n            features = self.downsampling_layer[1](features)\n"
        "            norm = self.downsampling_layer[0]\n"
        "            features = nn.functional.layer_norm(features.permute(0, 2, 3, 1), features.shape[1:2],"
        " norm.weight.repeat(2)[:features.shape[1]], norm.bias.repeat(2)[:features.shape[1]]).permute(0, 3, 1, 2)",
    ),
}


def convnext(mistake: str) -> tuple[nn.Module, nn.Module]:
    theirs = with_mistake(of_transformers("convnextv2"), CONVNEXT, mistake)
    torch.manual_seed(0)
    own = shaken(
        timm_model("convnext").ConvNeXt(
            num_classes=5, depths=(1, 2, 1, 1), dims=(8, 12, 16, 16), use_grn=True, ls_init_value=None
        )
    )
    config = theirs.ConvNextV2Config(
        depths=[1, 2, 1, 1],
        hidden_sizes=[8, 12, 16, 16],
        num_labels=5,
        layer_norm_eps=1e-6,
        hidden_act="gelu_new" if mistake == "activation" else "gelu",
    )
    port = theirs.ConvNextV2ForImageClassification(config).eval()
    tensors = in_order(own)
    if mistake == "kernel":  # [height, width] of another framework
        name = "stages.1.blocks.1.conv_dw.weight"
        tensors[name] = tensors[name].mT
    filled_in_order(port, tensors)
    return own, port


SWIN: Edits = {
    "bias by 16": ("relative_position_bias = 16 * torch", "relative_position_bias = torch"),
    "keys not normalized": (
        "@ nn.functional.normalize(\n            key_layer, dim=-1\n        ).transpose",
        "@ key_layer.transpose",
    ),
    "no clamp": ("torch.clamp(self.logit_scale, max=math.log(1.0 / 0.01)).exp()", "self.logit_scale.exp()"),
    "norm before": (
        "self.layernorm_before(attention_windows)\n        hidden_states = shortcut + self.drop_path(hidden_states)",
        "attention_windows\n        hidden_states = self.layernorm_before(shortcut + self.drop_path(hidden_states))",
    ),
    "parts": (
        "[input_feature_0, input_feature_1, input_feature_2, input_feature_3]",
        "[input_feature_0, input_feature_2, input_feature_1, input_feature_3]",
    ),
    "shifted back": (
        "shifts=(self.shift_size, self.shift_size)",
        "shifts=(-self.shift_size, -self.shift_size)",
    ),
    "no mask": (
        "        attn_mask = self.get_attn_mask(\n            height_pad, width_pad, "
        "dtype=hidden_states.dtype, device=hidden_states_windows.device\n        )",
        "        attn_mask = None",
    ),
}


def swin(mistake: str) -> tuple[nn.Module, nn.Module]:
    theirs = with_mistake(of_transformers("swinv2"), SWIN, mistake)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"embed_dim": 8, "patch_size": 2, "window_size": 4}
    own = timm_model("swin_transformer_v2").SwinTransformerV2(
        img_size=16, depths=(2, 1), num_heads=(2, 4), num_classes=5, **sizes
    )
    own.layers[0].blocks[1].attn.logit_scale.data[1] = 5.0
    shaken(own)
    config = theirs.Swinv2Config(image_size=16, depths=[2, 1], num_heads=[2, 4], num_labels=5, **sizes)
    port = theirs.Swinv2ForImageClassification(config).eval()
    names = {
        "patch_embed.proj": "swinv2.embeddings.patch_embeddings.projection",
        "patch_embed.norm": "swinv2.embeddings.norm",
        "head.fc": "classifier",
        "layers.1.downsample": "swinv2.encoder.layers.0.downsample",
        "layers.": "swinv2.encoder.layers.",
        "attn.cpb_mlp": "attention.self.continuous_position_bias_mlp",
        "attn.logit_scale": "attention.self.logit_scale",
        "attn.proj": "attention.output.dense",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }
    tensors = {}
    for name, tensor in in_order(own).items():
        path, _, last = name.rpartition("attn.")
        to = path.replace("layers.", "swinv2.encoder.layers.") + "attention.self."
        if last == "qkv.weight":
            parts = zip(("query", "key", "value"), tensor.chunk(3), strict=True)
            tensors.update({f"{to}{part}.weight": rows for part, rows in parts})
        elif last in ("q_bias", "v_bias"):
            tensors[f"{to}{'query' if last[0] == 'q' else 'value'}.bias"] = tensor
        else:
            name = f"swinv2.layer{name}" if name.startswith("norm.") else name
            for ours, there in names.items():
                name = name.replace(ours, there) if there not in name else name
            tensors[name] = tensor
    if mistake == "heads":
        # Heads as the slower index in one package, the faster one in another.
        name = "swinv2.encoder.layers.0.blocks.1.attention.self.query.weight"
        tensors[name] = tensors[name].unflatten(0, (2, 4)).transpose(0, 1).flatten(0, 1)
    port.load_state_dict(tensors)
    return own, port


CLIP: Edits = {
    "activation": ("x * torch.sigmoid(1.702 * x)", "torch.nn.functional.gelu(x)"),
    "token at the end": ("text.argmax(dim=-1)]", "-1]"),
    "image not normalized": ("image_features / image_features.norm(dim=-1, keepdim=True)", "image_features"),
    "scale": ("self.logit_scale.exp()", "self.logit_scale"),
    "no first norm": ("        x = self.ln_pre(x)\n", ""),
    "class at the end": (
        "x.shape[-1], dtype=x.dtype, device=x.device), x], dim=1)",
        "x.shape[-1], dtype=x.dtype, device=x.device), x][::-1], dim=1)",
    ),
    "mask": ("mask.triu_(1)", "mask.triu_(2)"),
}


def clip(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers import CLIPConfig, CLIPModel

    theirs = with_mistake(module_of("clip", "model.py"), CLIP, mistake)
    torch.manual_seed(0)
    port = shaken(theirs.CLIP(16, 16, 2, 64, 4, 9, 50, 24, 3, 2))
    layers: dict[str, Any] = {"num_hidden_layers": 2, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
    text = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 96, "num_attention_heads": 3, **layers}
    vision = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 1, "image_size": 16, **layers}
    text |= {"max_position_embeddings": 9, "eos_token_id": 49, "bos_token_id": 0, "pad_token_id": 1}
    own = CLIPModel(CLIPConfig(text_config=text, vision_config={**vision, "patch_size": 4}, projection_dim=16)).eval()
    given = dict(port.state_dict())
    tensors: dict[str, Tensor] = {"logit_scale": given["logit_scale"]}
    for here, there in (("", "text_model."), ("visual.", "vision_model.")):
        for number in range(2):
            block, layer = f"{here}transformer.resblocks.{number}.", f"{there}encoder.layers.{number}."
            for kind in ("weight", "bias"):
                parts = given[f"{block}attn.in_proj_{kind}"].chunk(3)
                for part, rows in zip("qkv", parts, strict=True):
                    tensors[f"{layer}self_attn.{part}_proj.{kind}"] = rows
                for ours, other in (
                    ("attn.out_proj", "self_attn.out_proj"),
                    ("ln_1", "layer_norm1"),
                    ("ln_2", "layer_norm2"),
                    ("mlp.c_fc", "mlp.fc1"),
                    ("mlp.c_proj", "mlp.fc2"),
                ):
                    tensors[f"{layer}{other}.{kind}"] = given[f"{block}{ours}.{kind}"]
    for kind in ("weight", "bias"):
        tensors[f"text_model.final_layer_norm.{kind}"] = given[f"ln_final.{kind}"]
        tensors[f"vision_model.pre_layrnorm.{kind}"] = given[f"visual.ln_pre.{kind}"]
        tensors[f"vision_model.post_layernorm.{kind}"] = given[f"visual.ln_post.{kind}"]
    tensors |= {
        "text_model.embeddings.token_embedding.weight": given["token_embedding.weight"],
        "text_model.embeddings.position_embedding.weight": given["positional_embedding"],
        "vision_model.embeddings.class_embedding": given["visual.class_embedding"],
        "vision_model.embeddings.patch_embedding.weight": given["visual.conv1.weight"],
        "vision_model.embeddings.position_embedding.weight": given["visual.positional_embedding"],
        "visual_projection.weight": given["visual.proj"].T,
        "text_projection.weight": given["text_projection"].T,
    }
    own.load_state_dict(tensors)
    if mistake == "projection":
        port.text_projection.data = port.text_projection.data.reshape(16, 24).T.contiguous()
    return answering(own, "logits_per_image", "logits_per_text"), port


EFFICIENTNET: Edits = {
    "no activation": (
        "x_squeezed = self._se_reduce(x_squeezed)\n            x_squeezed = self._swish(x_squeezed)",
        "x_squeezed = self._se_reduce(x_squeezed)",
    ),
    "gate": ("torch.sigmoid(x_squeezed) * x", "x_squeezed * x"),
    "no skip": ("            x = x + inputs  # skip connection", "            pass"),
    "squeezed by the largest": ("F.adaptive_avg_pool2d(x, 1)", "F.adaptive_max_pool2d(x, 1)"),
    "head": (
        "        x = self._swish(self._bn1(self._conv_head(x)))\n\n        return x",
        "        x = self._bn1(self._swish(self._conv_head(x)))\n\n        return x",
    ),
}


def efficientnet(mistake: str) -> tuple[nn.Module, nn.Module]:
    from efficientnet_pytorch import utils
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    model = importlib.import_module("efficientnet_pytorch.model")
    theirs = with_mistake(model, EFFICIENTNET, mistake)
    blocks = utils.BlockDecoder.decode(["r1_k3_s11_e1_i32_o8_se0.25", "r2_k5_s22_e3_i8_o12_se0.25"])
    values = {
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
        "image_size": 24,
        "dropout_rate": 0.2,
        "num_classes": 5,
        "batch_norm_momentum": 0.99,
        "batch_norm_epsilon": 1e-5 if mistake == "epsilon" else 1e-3,
        "drop_connect_rate": 0.2,
        "depth_divisor": 8,
        "min_depth": None,
        "include_top": True,
    }
    torch.manual_seed(0)
    port = theirs.EfficientNet(blocks, utils.GlobalParams(**values))
    config = EfficientNetConfig(
        image_size=24,
        in_channels=[32, 8],
        out_channels=[8, 12],
        kernel_sizes=[3, 5],
        strides=[1, 2],
        num_block_repeats=[1, 2],
        expand_ratios=[1, 3],
        depthwise_padding=[],
        width_coefficient=1.0,
        depth_coefficient=1.0,
        hidden_dim=1280,
        num_labels=5,
        batch_norm_eps=1e-3,
    )
    own = shaken(EfficientNetForImageClassification(config))
    for name, tensor in own.named_parameters():
        if "squeeze_excite" in name:  # or a gate is the same number for all that it reads, within rounding
            tensor.data *= 30
    tensors = in_order(own)
    if mistake == "statistics":
        at = "efficientnet.encoder.blocks.1.projection.project_bn."
        exchanged(tensors, f"{at}running_mean", f"{at}bias")
    filled_in_order(port, tensors)
    if mistake == "padding":
        port._blocks[1]._depthwise_conv.static_padding = nn.ZeroPad2d((2, 1, 2, 1))
    return own, port.eval()


G = torch.Generator().manual_seed(1)
TEXT = torch.tensor([[0, 7, 12, 30, 49, 1, 1, 1, 1], [0, 3, 44, 21, 9, 17, 26, 49, 1]])
PAIRS = [
    Pair(
        "timm convnextv2, transformers",
        ("timm",),
        convnext,
        {"x": torch.randn(2, 3, 64, 64, generator=G)},
        {
            "mean over rows": Mistake(["stages.0.blocks.0.mlp.grn/mean.0"], ["dim"]),
            "norm adds nothing": Mistake(["stages.0.blocks.0.mlp.grn/add.*"], ["missing", "left out", "not added"]),
            "epsilon": Mistake(["stem.1/layer_norm.0"], ["eps"]),
            "pooled after": Mistake(["head*"], ["mean", "order", "norm"]),
            "norm below": Mistake(["stages.1.downsample*"], ["order", "norm", "other ops"]),
            "activation": Mistake(["stages.0.blocks.0.mlp.act/gelu.0"], ["tanh"]),
            "kernel": Mistake(["stages.1.blocks.1.conv_dw/conv2d.0"], ["transposed (axes 2 and 3)"]),
        },
    ),
    Pair(
        "timm swinv2, transformers",
        ("timm",),
        swin,
        {"x": torch.randn(2, 3, 16, 16, generator=G)},
        {
            "bias by 16": Mistake(["layers.0.blocks.0.attn/mul.1"], ["16"]),
            "keys not normalized": Mistake(["layers.0.blocks.0.attn/div.1"], ["linalg_vector_norm"]),
            "no clamp": Mistake(["layers.0.blocks.1.attn/clamp.0", "layers.0.blocks.1.attn/exp.0"], ["clamp"]),
            "norm before": Mistake(["layers.0.blocks.0.norm1*", "layers.0.blocks.0/add.0"], ["norm", "order"]),
            "parts": Mistake(["layers.1.downsample/*"], ["parts", "axes 3 and 4 of permute.0 are transposed"]),
            "shifted back": Mistake(["layers.0.blocks.1/roll.1"], ["shifts", "roll"]),
            "no mask": Mistake(["layers.0.blocks.1.attn/add.*", "*.blocks.1.attn.softmax/softmax.0"], ["is not added"]),
            "heads": Mistake(["layers.0.blocks.1.attn/linear.0"], ["rows", "heads"]),
        },
    ),
    Pair(
        "transformers clip, clip",
        ("clip",),
        clip,
        {"input_ids": TEXT, "pixel_values": torch.randn(2, 3, 16, 16, generator=G)},
        {
            "activation": Mistake(["*_model.encoder.layers.0.mlp.activation_fn/*"], ["gelu"]),
            "token at the end": Mistake(["text_model/*"], ["index", "position", "token"]),
            "image not normalized": Mistake(["./div.0"], ["not divided"]),
            "scale": Mistake(["./exp.0", "./mul.*"], ["exp", "2.65029 times the right values"]),
            "no first norm": Mistake(["vision_model.pre_layrnorm/*"], ["missing", "left out", "norm"]),
            "class at the end": Mistake(["vision_model.embeddings/cat.0"], ["parts", "moved by -1"]),
            "mask": Mistake(["text_model.encoder.layers.0.self_attn/*"], ["mask"]),
            "projection": Mistake(["text_projection/linear.0"], ["transposed", "another order", "differs"]),
        },
    ),
    Pair(
        "transformers efficientnet, efficientnet_pytorch",
        ("efficientnet_pytorch",),
        efficientnet,
        {"pixel_values": torch.randn(2, 3, 24, 24, generator=G)},
        {
            "no activation": Mistake(["*.blocks.0.squeeze_excite.act_reduce/*"], ["missing", "left out"]),
            "gate": Mistake(["*.blocks.0.squeeze_excite.act_expand/*"], ["missing", "left out"]),
            "no skip": Mistake(["*.blocks.2.projection/add.0"], ["missing", "left out", "not added"]),
            "squeezed by the largest": Mistake(["*.blocks.0.squeeze_excite.squeeze/*"], ["max"]),
            "head": Mistake(["*.encoder.top_bn/*", "*.encoder.top_activation/*"], ["batch_norm"]),
            "epsilon": Mistake(["efficientnet.embeddings.batchnorm/*"], ["eps"]),
            "statistics": Mistake(["*.blocks.1.projection.project_bn/*"], ["running_mean", "bias"]),
            "padding": Mistake(["*.blocks.1.depthwise_conv*"], ["pad"]),
        },
    ),
]
