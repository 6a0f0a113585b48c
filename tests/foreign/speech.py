"""Sound: codecs, vocoders, recognition and synthesis of the packages that published them, beside transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from pair import Mistake, Pair, edited, part_of, shaken
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
    return own.eval(), filled(other, tensors)


PAIRS = [
    Pair(
        "encodec, transformers' Encodec",
        ("encodec", "einops"),
        encodec,
        {"input_values": torch.randn(2, 1, 203, generator=G)},
        {
            "side": Mistake(["encoder.layers.0/*"], ["pad: [6, 0] here, [0, 6]"]),
            "reflect": Mistake(["encoder.layers.0/*"], ["padding", "mode"]),
            "trim": Mistake(["decoder.layers.3*"], ["start", "end", "moved"]),
            "skip": Mistake(["encoder.layers.7*"], ["not added", "is missing"]),
            "gates": Mistake(["encoder.layers.7*"], ["blocks of"]),
            "farthest": Mistake(["./max.0", "./embedding.0"], ["max here, min"]),
            "elu": Mistake(["encoder.layers.1.block.0/*"], ["alpha"]),
            "gain": Mistake(["decoder.layers.0*"], ["original0", "weight_g"]),
        },
    ),
]
