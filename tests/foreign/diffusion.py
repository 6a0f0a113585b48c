"""Nets of diffusion by two authors each: the first packages of their papers beside diffusers."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from absent import standing_in
from images import Edits, exchanged, with_mistake
from pair import Mistake, Pair, edited, shaken
from torch import Tensor, nn


def grouped(tensors: dict[str, Tensor], parts: str, to: str) -> None:
    """Take a packed product of queries, keys and values apart; what was a convolution is one of rows."""
    for name in [name for name in tensors if parts in name]:
        packed = tensors.pop(name)
        for which, rows in zip("qkv", packed.squeeze(-1).chunk(3), strict=True):
            tensors[name.replace(parts, to.format(which))] = rows


AUTOENCODER: Edits = {
    "no scale": ("        w_ = w_ * (int(c)**(-0.5))\n", ""),
    "softmax over queries": (
        "w_ = torch.nn.functional.softmax(w_, dim=2)\n\n        # attend to values\n        v = v.reshape(b,c,h*w)",
        "w_ = torch.nn.functional.softmax(w_, dim=1)\n\n        v = v.reshape(b,c,h*w)",
    ),
    "padding": ("pad = (0,1,0,1)", "pad = (1,0,1,0)"),
    "bilinear": ('scale_factor=2.0, mode="nearest")', 'scale_factor=2.0, mode="bilinear")'),
    "epsilon": ("num_channels=in_channels, eps=1e-6", "num_channels=in_channels, eps=1e-5"),
    "weights not turned": ("        w_ = w_.permute(0,2,1)   # b,hw,hw (first hw of k, second of q)\n", ""),
}


class Coding(nn.Module):
    """Encoder and decoder of latent diffusion as they are put together there."""

    def __init__(self, modules: Any, mistake: str) -> None:
        super().__init__()
        sizes: dict[str, Any] = {
            "ch": 32,
            "out_ch": 3,
            "ch_mult": (1, 2),
            "num_res_blocks": 1,
            "attn_resolutions": [],
            "in_channels": 3,
            "resolution": 16,
            "z_channels": 4,
        }
        self.encoder = modules.Encoder(double_z=True, **sizes)
        self.decoder = modules.Decoder(**sizes)
        self.quant_conv = nn.Conv2d(8, 8, 1)
        self.post_quant_conv = nn.Conv2d(4, 4, 1)
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        mean, logvar = self.quant_conv(self.encoder(x)).chunk(2, 1)
        if self.mistake == "deviation":
            mean = logvar
        return self.decoder(self.post_quant_conv(mean))


@contextlib.contextmanager
def without_xformers() -> Iterator[None]:
    """Import latent diffusion as it is without xformers, whose attention has no kernel for a processor."""
    held = {name: sys.modules.get(name) for name in ("xformers", "xformers.ops")}
    sys.modules.update(dict.fromkeys(held))  # type: ignore[arg-type]
    yield
    for name, module in held.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


@without_xformers()
def autoencoder(mistake: str) -> tuple[nn.Module, nn.Module]:
    from diffusers import AutoencoderKL
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    theirs = with_mistake(importlib.import_module("ldm.modules.diffusionmodules.model"), AUTOENCODER, mistake)
    torch.manual_seed(0)
    port = shaken(Coding(theirs, mistake))
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    own = AutoencoderKL(block_out_channels=[32, 64], latent_channels=4, layers_per_block=1, sample_size=16, **blocks)
    given = {f"first_stage_model.{name}": tensor.clone() for name, tensor in port.state_dict().items()}
    own.load_state_dict(convert_ldm_vae_checkpoint(given, own.config))
    if mistake == "kernel":
        port.encoder.down[0].block[0].conv1.weight.data = (
            port.encoder.down[0].block[0].conv1.weight.data.mT.contiguous()
        )
    return own.eval(), port


CONDITIONED: Edits = {
    "gate first": ("x, gate = self.proj(x).chunk(2, dim=-1)", "gate, x = self.proj(x).chunk(2, dim=-1)"),
    "heads": (
        "map(lambda t: rearrange(t, 'b n (h d) -> (b h) n d', h=h), (q, k, v))",
        "map(lambda t: rearrange(t, 'b n (d h) -> (b h) n d', h=h), (q, k, v))",
    ),
    "normed twice": ("x = self.ff(self.norm3(x)) + x", "x = self.norm3(x)\n        x = self.ff(x) + x"),
    "no residual": (
        "            x = self.proj_out(x)\n        return x + x_in",
        "            x = self.proj_out(x)\n        return x",
    ),
}


@without_xformers()
def conditioned(mistake: str) -> tuple[nn.Module, nn.Module]:
    from diffusers import UNet2DConditionModel
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    attention = importlib.import_module("ldm.modules.attention")
    # A copy of its own: the net looks for the class of its attention.
    unet = edited(
        importlib.import_module("ldm.modules.diffusionmodules.openaimodel"), "from abc import", "from abc import"
    )
    unet.SpatialTransformer = with_mistake(attention, CONDITIONED, mistake).SpatialTransformer
    torch.manual_seed(0)
    width = 32
    with standing_in("omegaconf", "omegaconf.listconfig"):
        port = unet.UNetModel(
            image_size=8,
            in_channels=4,
            out_channels=4,
            model_channels=width,
            attention_resolutions=[1],
            num_res_blocks=1,
            channel_mult=(1, 2),
            num_heads=2,
            use_spatial_transformer=True,
            transformer_depth=1,
            context_dim=12,
            legacy=False,
            use_checkpoint=False,
        )
    shaken(port)
    own = UNet2DConditionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(width, 2 * width),
        layers_per_block=1,
        cross_attention_dim=12,
        attention_head_dim=2,
    )
    given = {f"model.diffusion_model.{name}": tensor.clone() for name, tensor in port.state_dict().items()}
    own.load_state_dict(convert_ldm_unet_checkpoint(given, own.config))
    if mistake == "skips":
        skip = port.output_blocks[1][0].skip_connection
        skip.weight.data = skip.weight.data.roll(2 * width, 1)
    return own.eval(), port


GUIDED: Edits = {
    "scale alone": ("h = out_norm(h) * (1 + scale) + shift", "h = out_norm(h) * scale + shift"),
    "shift first": ("scale, shift = th.chunk(emb_out, 2, dim=1)", "shift, scale = th.chunk(emb_out, 2, dim=1)"),
    "no label": ("            emb = emb + self.label_emb(y)", "            pass"),
    "skips": ("h = th.cat([h, hs.pop()], dim=1)", "h = th.cat([hs.pop(), h], dim=1)"),
    "not resized": (
        "            x = self.x_upd(x)\n            h = in_conv(h)",
        "            x = self.h_upd(x).flip(-1)\n            h = in_conv(h)",
    ),
    "packed otherwise": (
        "        q, k, v = qkv.reshape(bs * self.n_heads, ch * 3, length).split(ch, dim=1)",
        "        q, k, v = (t.reshape(bs * self.n_heads, ch, length) for t in qkv.chunk(3, dim=1))",
    ),
}


def guided(mistake: str) -> tuple[nn.Module, nn.Module]:
    from diffusers import UNet2DModel

    theirs = with_mistake(importlib.import_module("guided_diffusion.unet"), GUIDED, mistake)
    torch.manual_seed(0)
    port = shaken(
        theirs.UNetModel(
            8,
            3,
            32,
            6,
            1,
            attention_resolutions=(2,),
            channel_mult=(1, 2),
            num_classes=7,
            num_head_channels=16,
            use_scale_shift_norm=True,
            resblock_updown=True,
        )
    )
    own = UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=6,
        down_block_types=("ResnetDownsampleBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "ResnetUpsampleBlock2D"),
        block_out_channels=(32, 64),
        layers_per_block=1,
        attention_head_dim=16,
        attn_norm_num_groups=32,
        norm_num_groups=32,
        resnet_time_scale_shift="scale_shift",
        downsample_type="resnet",
        upsample_type="resnet",
        num_class_embeds=7,
    )
    places = {
        "time_embed.0": "time_embedding.linear_1",
        "time_embed.2": "time_embedding.linear_2",
        "label_emb": "class_embedding",
        "input_blocks.0.0": "conv_in",
        "input_blocks.1.0": "down_blocks.0.resnets.0",
        "input_blocks.2.0": "down_blocks.0.downsamplers.0",
        "input_blocks.3.0": "down_blocks.1.resnets.0",
        "input_blocks.3.1": "down_blocks.1.attentions.0",
        "middle_block.0": "mid_block.resnets.0",
        "middle_block.1": "mid_block.attentions.0",
        "middle_block.2": "mid_block.resnets.1",
        "output_blocks.0.0": "up_blocks.0.resnets.0",
        "output_blocks.0.1": "up_blocks.0.attentions.0",
        "output_blocks.1.0": "up_blocks.0.resnets.1",
        "output_blocks.1.1": "up_blocks.0.attentions.1",
        "output_blocks.1.2": "up_blocks.0.upsamplers.0",
        "output_blocks.2.0": "up_blocks.1.resnets.0",
        "output_blocks.3.0": "up_blocks.1.resnets.1",
        "out.0": "conv_norm_out",
        "out.2": "conv_out",
    }
    inside = {
        "in_layers.0": "norm1",
        "in_layers.2": "conv1",
        "emb_layers.1": "time_emb_proj",
        "out_layers.0": "norm2",
        "out_layers.3": "conv2",
        "skip_connection": "conv_shortcut",
        "norm": "group_norm",
        "proj_out": "to_out.0",
    }
    tensors: dict[str, Tensor] = {}
    for name, tensor in port.state_dict().items():
        found = re.match(rf"({'|'.join(map(re.escape, places))})\.(.*?)\.?(weight|bias)$", name)
        assert found is not None, name
        place, part, kind = found.groups()
        path = ".".join(filter(None, (places[place], inside.get(part, part))))
        if part == "qkv":
            # Heads one after the other, each with its queries, keys and values.
            apart = tensor.squeeze(-1).unflatten(0, (-1, 3, 16))
            for number, which in enumerate("qkv"):
                tensors[f"{path.removesuffix('qkv')}to_{which}.{kind}"] = apart[:, number].flatten(0, 1)
        else:
            tensors[f"{path}.{kind}"] = tensor.squeeze(-1) if part == "proj_out" else tensor
    if mistake == "norms exchanged":
        exchanged(tensors, "mid_block.resnets.0.norm1.bias", "mid_block.resnets.0.norm2.bias")
    own.load_state_dict(tensors)
    return own.eval(), port


G = torch.Generator().manual_seed(1)
PAIRS = [
    Pair(
        "diffusers autoencoder, latent diffusion",
        ("diffusers", "ldm"),
        autoencoder,
        {"sample": torch.randn(2, 3, 16, 16, generator=G)},
        {
            "no scale": Mistake(["encoder.mid_block.attentions.0/*attention.0"], ["scale"]),
            "softmax over queries": Mistake(["encoder.mid_block.attentions.0/*attention.0"], ["softmax"]),
            "padding": Mistake(["encoder.down_blocks.0.downsamplers.0/pad.0"], ["pad"]),
            "bilinear": Mistake(["decoder.up_blocks.0.upsamplers.0/*"], ["bilinear"]),
            "epsilon": Mistake(["encoder.down_blocks.0.resnets.0.norm1/*"], ["eps"]),
            "weights not turned": Mistake(["encoder.mid_block.attentions.0/*attention.0"], ["transposed", "other way"]),
            "deviation": Mistake(["./*", "post_quant_conv/*"], ["item 1"]),
            "kernel": Mistake(["encoder.down_blocks.0.resnets.0.conv1/*"], ["weight: transposed"]),
        },
    ),
    Pair(
        "diffusers conditioned unet, latent diffusion",
        ("diffusers", "ldm"),
        conditioned,
        {
            "sample": torch.randn(2, 4, 8, 8, generator=G),
            "timestep": torch.tensor([3, 741]),
            "encoder_hidden_states": torch.randn(2, 5, 12, generator=G),
        },
        {
            "gate first": Mistake(
                ["*.ff.net.0/mul.0", "*.ff.net.0/gelu.0", "*.ff.net.0/chunk*"], ["exchanged", "halves", "other factor"]
            ),
            "heads": Mistake(["down_blocks.0.attentions.0.*.attn1*"], ["interleaved"]),
            "normed twice": Mistake(["down_blocks.0.attentions.0.transformer_blocks.0/add.2"], ["norm3", "layer_norm"]),
            "no residual": Mistake(["down_blocks.0.attentions.0/add.0"], ["not added", "missing"]),
            "skips": Mistake(["up_blocks.0.resnets.1.conv_shortcut/*"], ["columns", "order", "axis 1"]),
        },
    ),
    Pair(
        "diffusers unet, guided diffusion",
        ("diffusers", "guided_diffusion"),
        guided,
        {
            "sample": torch.randn(2, 3, 8, 8, generator=G),
            "timestep": torch.tensor([3, 741]),
            "class_labels": torch.tensor([6, 2]),
        },
        {
            "scale alone": Mistake(
                ["down_blocks.0.resnets.0/add.0", "down_blocks.0.resnets.0/mul.0"], ["1 is", "1 +", "- 1"]
            ),
            "shift first": Mistake(["down_blocks.0.resnets.0/*"], ["part 1 are exchanged"]),
            "no label": Mistake(["./add.0"], ["not added", "missing"]),
            "skips": Mistake(["up_blocks.0/cat.0"], ["parts 0 and 1"]),
            "not resized": Mistake(["down_blocks.0.downsamplers.0*"], ["turned", "reverse"]),
            "packed otherwise": Mistake(
                ["down_blocks.1.attentions.0*"],
                ["order", "interleaved", "rows", "heads"],
                known="lists the ops: three weights at once are not tried",
            ),
            "norms exchanged": Mistake(["mid_block.resnets.0.norm1/*"], ["norm2", "bias"]),
        },
    ),
]
