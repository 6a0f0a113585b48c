"""Sound: codecs, vocoders, recognition and synthesis of the packages that published them, beside transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from pair import Mistake, Pair, answering, edited, part_of, shaken
from torch import Tensor, nn

G = torch.Generator().manual_seed(1)


def renamed(tensors: Mapping[str, Tensor], *pieces: tuple[str, str]) -> dict[str, Tensor]:
    """Return tensors by other names, in which each piece of text is another one, one after the other."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in pieces:
            name = name.replace(old, new)
        found[name] = tensor
    return found


def filled(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """Fill a module by name; buffers that only one side has are left."""
    missing, unexpected = module.load_state_dict({k: t.detach().clone() for k, t in tensors.items()}, strict=False)
    assert not [name for name in missing if name in dict(module.named_parameters())], missing
    assert not unexpected, unexpected
    return module.eval()


def encodec(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers import EncodecConfig, EncodecModel

    sizes = {"num_filters": 4, "hidden_size": 12, "upsampling_ratios": [4, 2], "codebook_size": 16}
    config = EncodecConfig(**sizes, codebook_dim=12, num_lstm_layers=2, target_bandwidths=[2.0], sampling_rate=800)
    torch.manual_seed(0)
    own = shaken(EncodecModel(config))
    for layer in own.quantizer.layers:
        layer.codebook.embed.normal_(0, 0.3)

    model = part_of("encodec.model", bare=["encodec"], without=["encodec.utils", "torchaudio"])
    seanet = part_of("encodec.modules.seanet")
    conv, lstm, vq = (part_of(f"encodec.{name}") for name in ("modules.conv", "modules.lstm", "quantization.core_vq"))
    conv = {
        "side": lambda: edited(conv, "(padding_total, extra_padding), mode", "(extra_padding, padding_total), mode"),
        "reflect": lambda: edited(
            conv,
            "(padding_total, extra_padding), mode=self.pad_mode",
            "(padding_total, extra_padding), mode='replicate'",
        ),
        "trim": lambda: edited(conv, "math.ceil(padding_total * self.trim_right_ratio)", "0"),
    }.get(mistake, lambda: conv)()
    lstm = edited(lstm, "y = y + x", "y = y") if mistake == "skip" else lstm
    vq = edited(vq, "dist.max(", "dist.min(") if mistake == "farthest" else vq

    with patch.multiple(seanet, SConv1d=conv.SConv1d, SConvTranspose1d=conv.SConvTranspose1d, SLSTM=lstm.SLSTM):
        options: dict[str, Any] = {"norm": "weight_norm", "causal": True, "lstm": 2, "ratios": [4, 2]}
        options |= {"dimension": 12, "n_filters": 4, "activation_params": {"alpha": 0.5 if mistake == "elu" else 1.0}}
        encoder, decoder = seanet.SEANetEncoder(**options), seanet.SEANetDecoder(**options)
    quantizers = part_of("encodec.quantization.vq")
    with patch.object(quantizers, "ResidualVectorQuantization", vq.ResidualVectorQuantization):
        quantizer = quantizers.ResidualVectorQuantizer(12, own.quantizer.num_quantizers, 16)
    other = model.EncodecModel(encoder, decoder, quantizer, [2.0], 800, 1)
    other.set_target_bandwidth(2.0)
    tensors = renamed(
        own.state_dict(),
        ("parametrizations.weight.original0", "weight_g"),
        ("parametrizations.weight.original1", "weight_v"),
        (".conv.", ".conv.conv."),
        ("layers.", "model."),
        ("quantizer.model.", "quantizer.vq.layers."),
        (".codebook.", "._codebook."),
    )
    up = {name.rsplit(".conv.conv.")[0] for name, one in other.named_modules() if name.endswith(".convtr.convtr")}
    up = {name.removesuffix(".convtr.convtr") for name in up}
    tensors = {
        name.replace(".conv.conv.", ".convtr.convtr.") if name.split(".conv.")[0] in up else name: tensor
        for name, tensor in tensors.items()
    }
    if mistake == "gates":
        for name in [name for name in tensors if "encoder" in name and "lstm" in name and name.endswith("_l1")]:
            i, f, g, o = tensors[name].chunk(4)
            tensors[name] = torch.cat([i, f, o, g])
    if mistake == "gain":
        tensors["decoder.model.0.conv.conv.weight_g"] = torch.ones_like(tensors["decoder.model.0.conv.conv.weight_g"])
    return answering(own.eval(), "audio_values"), filled(other, tensors)


def whisper(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=40,
        num_mel_bins=10,
        encoder_layers=2,
        encoder_attention_heads=3,
        decoder_layers=2,
        decoder_attention_heads=3,
        decoder_ffn_dim=96,
        encoder_ffn_dim=96,
        d_model=24,
        max_source_positions=11,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    torch.manual_seed(0)
    own = WhisperForConditionalGeneration(config)
    places = own.model.encoder.embed_positions.weight.detach().clone()
    own = shaken(own)
    own.model.encoder.embed_positions.weight.data.copy_(places)
    without = ["whisper.decoding", "whisper.transcribe"]
    model = part_of("whisper.model", bare=["whisper"], without=without)
    edits = {
        "sines": ("torch.cat([torch.sin(scaled_time), torch.cos", "torch.cat([torch.cos(scaled_time), torch.sin"),
        "places": (
            "self.positional_embedding[offset : offset + x",
            "self.positional_embedding[1 + offset : 1 + offset + x",
        ),
        "activation": ("F.gelu(self.conv2(x))", 'F.gelu(self.conv2(x), approximate="tanh")'),
        "causal": ("is_causal=mask is not None and n_ctx > 1", "is_causal=False"),
        "last norm": ("        x = self.ln(x)\n", ""),
        "stride": ("kernel_size=3, stride=2, padding=1)", "kernel_size=3, stride=2, padding=(2,))"),
    }
    if mistake in edits and mistake != "stride":
        model = edited(model, *edits[mistake])
    other = model.Whisper(model.ModelDimensions(10, 11, 24, 3, 2, 40, 16, 24, 3, 2))
    tensors = renamed(
        {name: t for name, t in own.model.state_dict().items() if "encoder.embed_positions" not in name},
        ("layers.", "blocks."),
        ("encoder_attn_layer_norm", "cross_attn_ln"),
        ("self_attn_layer_norm", "attn_ln"),
        ("final_layer_norm", "mlp_ln"),
        ("encoder_attn", "cross_attn"),
        ("self_attn", "attn"),
        ("k_proj", "key"),
        ("q_proj", "query"),
        ("v_proj", "value"),
        ("out_proj", "out"),
        ("fc1", "mlp.0"),
        ("fc2", "mlp.2"),
        ("encoder.layer_norm", "encoder.ln_post"),
        ("decoder.layer_norm", "decoder.ln"),
        ("decoder.embed_tokens", "decoder.token_embedding"),
        ("decoder.embed_positions.weight", "decoder.positional_embedding"),
    )
    if mistake == "keys":
        key, query = (f"decoder.blocks.1.cross_attn.{name}.weight" for name in ("key", "query"))
        tensors[key], tensors[query] = tensors[query], tensors[key]
    if mistake == "norms":
        for kind in ("weight", "bias"):
            one, two = f"encoder.blocks.0.attn_ln.{kind}", f"encoder.blocks.0.mlp_ln.{kind}"
            tensors[one], tensors[two] = tensors[two], tensors[one]
    if mistake == "heads":
        name = "encoder.blocks.1.attn.value"
        for kind in ("weight", "bias"):
            rows = tensors[f"{name}.{kind}"]
            tensors[f"{name}.{kind}"] = rows.unflatten(0, (3, 8)).transpose(0, 1).flatten(0, 1)
    return answering(own.eval(), "logits"), filled(other, tensors)


def dac(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers import DacConfig, DacModel

    config = DacConfig(
        encoder_hidden_size=4,
        downsampling_ratios=[2, 4],
        decoder_hidden_size=16,
        upsampling_ratios=[4, 2],
        n_codebooks=3,
        codebook_size=16,
        codebook_dim=4,
        hidden_size=16,
    )
    torch.manual_seed(0)
    own = DacModel(config)
    for quantizer in own.quantizer.quantizers:
        quantizer.codebook.weight.data.normal_()
    for module in own.modules():
        if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
            nn.init.kaiming_normal_(module.weight)
    own = shaken(own).eval()
    package = part_of("dac.model.dac", bare=["dac", "dac.model"], without=["audiotools", "audiotools.ml"])
    baseline = package.DAC(4, [2, 4], 16, 16, [4, 2], 3, 16, 4)
    tensors = {}
    for name, tensor in own.state_dict().items():
        name = renamed_dac(name)
        if name.endswith(".weight") and ".codebook." not in name:
            size = tensor.flatten(1).norm(dim=1)[:, None, None]
            tensors[name + "_g"], tensors[name + "_v"] = size, tensor * 3
        else:
            tensors[name] = tensor
    module = part_of("transformers.models.dac.modeling_dac")
    edits = {
        "dilation": ("DacResidualUnit(output_dim, dilation=9)", "DacResidualUnit(output_dim, dilation=3)"),
        "tanh": ("        hidden_state = self.tanh(hidden_state)\n", ""),
        "residual": ("output_tensor = hidden_state + output_tensor", "output_tensor = output_tensor"),
        "not normal": ("codebook = F.normalize(codebook)", "codebook = codebook * 1.0"),
        "reciprocal": ("(self.alpha + 1e-9).reciprocal() * torch", "(self.alpha + 1e-9) * torch"),
        "residuals": ("residual = residual - quantized_representation_i", "residual = residual"),
    }
    other = edited(module, *edits[mistake]) if mistake in edits else module
    candidate = other.DacModel(config)
    weights = dict(own.state_dict())
    if mistake == "alpha":
        weights["encoder.block.0.snake1.alpha"] = weights["encoder.block.0.snake1.alpha"].flip(1)
    if mistake == "flipped":
        weights["decoder.block.0.conv_t1.weight"] = weights["decoder.block.0.conv_t1.weight"].flip(-1)
    return Codec(filled(baseline, tensors)), Codec(filled(candidate, weights))


class Codec(nn.Module):
    """A codec of which sound and codes are wanted; losses are not."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own.eval()

    def forward(self, sound: Tensor) -> dict[str, Tensor]:
        made = self.own(sound)
        if isinstance(made, dict) and "audio" in made:
            return {"codes": made["codes"], "sound": made["audio"][:, 0]}
        return {"codes": made.audio_codes, "sound": made.audio_values}


def renamed_dac(name: str) -> str:
    """The name of a weight in the package: everything is a Sequential there."""
    parts = name.split(".")
    if parts[0] == "quantizer":
        return name
    inside = {"res_unit1": "0", "res_unit2": "1", "res_unit3": "2", "snake1": "3", "conv1": "4"}
    if parts[0] == "decoder":
        inside = {"snake1": "0", "conv_t1": "1", "res_unit1": "2", "res_unit2": "3", "res_unit3": "4"}
    unit = {"snake1": "0", "conv1": "1", "snake2": "2", "conv2": "3"}
    body = "block" if parts[0] == "encoder" else "model"
    if parts[1] != "block":
        return ".".join([parts[0], body, {"conv1": "0", "snake1": "3", "conv2": "4"}[parts[1]], *parts[2:]])
    place = [parts[0], body, str(int(parts[2]) + 1), "block", inside[parts[3]]]
    return ".".join([*place, "block", unit[parts[4]], *parts[5:]] if "res_unit" in name else [*place, *parts[4:]])


def hifigan(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers import VitsConfig
    from transformers.models.vits.modeling_vits import VitsHifiGan

    config = VitsConfig(
        flow_size=8,
        upsample_initial_channel=16,
        upsample_rates=[4, 2],
        upsample_kernel_sizes=[8, 4],
        resblock_kernel_sizes=[3, 5],
        resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
        speaker_embedding_size=6,
    )
    torch.manual_seed(0)
    own = shaken(VitsHifiGan(config))
    name = "TTS.vocoder.models.hifigan_generator"
    bare = ["TTS", "TTS.vocoder", "TTS.vocoder.models", "TTS.utils"]
    module = part_of(name, bare=bare, without=["trainer", "trainer.io"])
    edits = {
        "slope": ("        o = F.leaky_relu(o)\n", "        o = F.leaky_relu(o, LRELU_SLOPE)\n"),
        "mean": ("o = z_sum / self.num_kernels", "o = z_sum"),
        "condition": ("o = o + self.cond_layer(g)", "o = o"),
        "tanh": ("        o = torch.tanh(o)\n", ""),
        "padding": ("int((k * d - d) / 2)", "int((k * d - d) / 2) if d < 5 else (int((k * d - d) / 2) + 0)"),
    }
    module = edited(module, *edits[mistake]) if mistake in edits else module
    options = {"upsample_kernel_sizes": [8, 4], "upsample_initial_channel": 16, "upsample_factors": [4, 2]}
    other = module.HifiganGenerator(
        8, 1, "1", [[1, 3, 5], [1, 3, 5]], [3, 5], **options, cond_channels=6, conv_post_bias=False
    )
    tensors = renamed(own.state_dict(), ("upsampler.", "ups."), ("cond.", "cond_layer."))
    for one in [name for name in tensors if name.endswith(".weight") and "cond" not in name]:
        tensor = tensors.pop(one)
        root = one.removesuffix("weight") + "parametrizations.weight.original"
        tensors[f"{root}0"], tensors[f"{root}1"] = tensor.flatten(1).norm(dim=1)[:, None, None], tensor * 3
    if mistake == "gain":
        tensors["ups.1.parametrizations.weight.original0"] = tensors["ups.1.parametrizations.weight.original0"] * 2
    if mistake == "blocks":
        for kind in ("bias", "parametrizations.weight.original0", "parametrizations.weight.original1"):
            a, b = f"resblocks.2.convs1.0.{kind}", f"resblocks.2.convs2.0.{kind}"
            tensors[a], tensors[b] = tensors[b], tensors[a]
    return own.eval(), filled(other, tensors)


class FromMask(nn.Module):
    """The text encoder of VITS, of which people give a mask."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        mask = attention_mask.unsqueeze(-1).float()
        made = self.own(input_ids, mask, attention_mask)
        return made.last_hidden_state, made.prior_means, made.prior_log_variances


class FromLengths(nn.Module):
    """The one of the package, channels first, of which people give lengths."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
        x, means, logs, _ = self.own(input_ids, attention_mask.sum(-1))
        return x.mT, means.mT, logs.mT


def vits(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers import VitsConfig
    from transformers.models.vits.modeling_vits import VitsTextEncoder

    config = VitsConfig(
        vocab_size=30,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        window_size=4,
        ffn_dim=40,
        ffn_kernel_size=3,
        flow_size=10,
        layer_norm_eps=1e-5,
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    own = shaken(VitsTextEncoder(config))
    bare = ["TTS", "TTS.tts", "TTS.tts.layers", "TTS.tts.utils", "TTS.tts.layers.glow_tts", "TTS.tts.layers.generic"]
    attention = part_of("TTS.tts.layers.glow_tts.transformer", bare=bare, without=["scipy", "scipy.stats"])
    networks = part_of("TTS.tts.layers.vits.networks", bare=bare)
    edits = {
        "window": ("max((self.rel_attn_window_size + 1) - length, 0)", "max(self.rel_attn_window_size - length, 0)"),
        "places": ("[:, :, :length, length - 1 :]", "[:, :, :length, length - 2 : -1]"),
        "scale": ("scores_local = rel_logits / math.sqrt(self.k_channels)", "scores_local = rel_logits"),
        "padding": (
            "pad_l = (self.kernel_size - 1) // 2\n        pad_r = self.kernel_size // 2",
            "pad_l, pad_r = 0, 2",
        ),
        "residual": ("            x = self.norm_layers_2[i](x + y)", "            x = x + self.norm_layers_2[i](y)"),
    }
    attention = edited(attention, *edits[mistake]) if mistake in edits else attention
    with patch.object(networks, "RelativePositionTransformer", attention.RelativePositionTransformer):
        other = networks.TextEncoder(30, 10, 24, 40, 3, 2, 3, 0.0)
    if mistake == "embedding":
        other.hidden_channels = 1
    tensors = renamed(own.state_dict(), ("embed_tokens", "emb"), ("project.", "proj."))
    found = {}
    for name, tensor in tensors.items():
        for old, new in {"q_proj": "conv_q", "k_proj": "conv_k", "v_proj": "conv_v", "out_proj": "conv_o"}.items():
            if old in name and name.endswith("weight"):
                tensor = tensor[..., None]
            name = name.replace(old, new)
        if ".layers." in name:
            start, _, rest = name.partition(".layers.")
            number, part, last = rest.split(".", 2)
            part = {
                "attention": "attn_layers",
                "layer_norm": "norm_layers_1",
                "feed_forward": "ffn_layers",
                "final_layer_norm": "norm_layers_2",
            }[part]
            last = {"weight": "gamma", "bias": "beta"}[last] if "norm" in part else last
            name = f"{start}.{part}.{number}.{last}"
        found[name] = tensor
    return FromMask(own), FromLengths(filled(other, found))


IDS = torch.randint(3, 30, (2, 13), generator=G)
MASK = torch.ones(2, 13, dtype=torch.long)
# Without padding: the package hides queries of it, too, which is told as a difference inside.


PAIRS = [
    Pair(
        "openai-whisper, transformers' Whisper",
        ("whisper",),
        whisper,
        {
            "input_features": torch.randn(2, 10, 22, generator=G),
            "decoder_input_ids": torch.randint(3, 40, (2, 7), generator=G),
        },
        {
            "sines": Mistake(["model.encoder/add.0"], ["halves exchanged"]),
            "places": Mistake(
                ["model.decoder.embed_positions/*", "model.decoder/add*"], ["0 is added in the baseline, 1"]
            ),
            "activation": Mistake(["model.encoder/gelu.1"], ["tanh"]),
            "causal": Mistake(["model.decoder.layers.0.self_attn/*"], ["the mask is missing"]),
            "last norm": Mistake(["model.decoder.layer_norm/*"], ["layer_norm is missing", "nothing"]),
            "keys": Mistake(
                ["model.decoder.layers.1.encoder_attn*"], ["k_proj.weight and q_proj.weight are exchanged"]
            ),
            "norms": Mistake(
                ["model.encoder.layers.0.self_attn_layer_norm/*"],
                ["holds the weight of", "is read in", "of another module are read"],
                "tensors of other ops are taken for the two norms that are exchanged",
            ),
            "heads": Mistake(
                ["model.encoder.layers.1.self_attn.v_proj/*"],
                ["another order", "transposed (heads of"],
                "values in another order pass as an arrangement, up to where heads are taken apart",
            ),
        },
    ),
    Pair(
        "transformers' Dac, descript-audio-codec",
        ("dac", "einops"),
        dac,
        {"sound": torch.randn(2, 1, 96, generator=G)},
        {
            "dilation": Mistake(["own.decoder.model.1.block.4.block.1/*"], ["dilation"]),
            "tanh": Mistake(["own.decoder.model.5/*"], ["tanh is missing", "nothing"]),
            "residual": Mistake(["own.encoder.block.1.block.0/add.*"], ["not added", "nothing"]),
            "not normal": Mistake(["own.quantizer.quantizers.0/*"], ["is not divided by"]),
            "reciprocal": Mistake(["own.encoder.block.1.block.0.block.0/*"], ["reciprocal"]),
            "residuals": Mistake(["own.quantizer/sub.0"], ["not subtracted", "nothing"]),
            "alpha": Mistake(["own.encoder.block.1.block.3/*"], ["alpha): kernel flipped along axis 1"]),
            "flipped": Mistake(["own.decoder.model.1.block.1/*"], ["flipped"]),
        },
    ),
    Pair(
        "coqui's HiFi-GAN, transformers' Vits",
        ("TTS",),
        hifigan,
        {
            "spectrogram": torch.randn(2, 8, 11, generator=G),
            "global_conditioning": torch.randn(2, 6, 1, generator=G),
        },
        {
            "slope": Mistake(["./leaky_relu.2"], ["(0.1) in the candidate", "0.01 in the baseline, 0.1"]),
            "mean": Mistake(["./div.0"], ["is missing", "nothing"]),
            "condition": Mistake(["./add.0"], ["not added", "nothing"]),
            "tanh": Mistake(["./tanh.0"], ["tanh is missing", "nothing"]),
            "gain": Mistake(
                ["upsampler.1/*"],
                ["is scaled by 2"],
            ),
            "blocks": Mistake(["resblocks.2.convs1.0/*"], ["of another module are read: of resblocks.2.convs2.0"]),
        },
    ),
    Pair(
        "coqui's VITS text encoder, transformers' Vits",
        ("TTS",),
        vits,
        {"input_ids": IDS, "attention_mask": MASK},
        {
            "places": Mistake(["own.encoder.layers.0.attention/slice.1"], ["start of slice: 12 in the baseline, 11"]),
            "scale": Mistake(["own.encoder.layers.0.attention/*"], ["scale", "is missing", "div", "mul"]),
            "padding": Mistake(["own.encoder.layers.0.feed_forward*"], ["pad"]),
            "residual": Mistake(
                ["own.encoder.layers.0/add.1", "own.encoder.layers.0.dropout@1/*"], ["is not added to dropout"]
            ),
            "embedding": Mistake(["own/mul.0"], ["is missing", "4.89898"]),
        },
    ),
    Pair(
        "encodec, transformers' Encodec",
        ("encodec", "einops"),
        encodec,
        {"input_values": torch.randn(2, 1, 203, generator=G)},
        {
            "side": Mistake(["encoder.layers.0/*"], [": [6, 0] in the baseline, [0, 6]"]),
            "reflect": Mistake(["encoder.layers.0/*"], ["padding", "mode"]),
            "trim": Mistake(["decoder.layers.3*"], ["start", "end", "moved"]),
            "skip": Mistake(["encoder.layers.7*"], ["not added", "is missing"]),
            "gates": Mistake(["encoder.layers.7*"], ["blocks of"]),
            "farthest": Mistake(["./max.0", "./embedding.0"], ["min instead of max"]),
            "elu": Mistake(["encoder.layers.1.block.0/*"], ["alpha"]),
            "gain": Mistake(["decoder.layers.0*"], ["original0", "weight_g"]),
        },
    ),
]
