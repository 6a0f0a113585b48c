"""A model of two packages, and a port to NumPy as a dump; their mistakes were written before any run."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pair import Pair, copied, part_of, shaken
from rewrites import inside, outside
from torch import Tensor, nn

G = torch.Generator().manual_seed(11)


# Speech of two voices, of two packages.
class Voices(nn.Module):
    """Masks of asteroid, [B, 2, 8, T] of a mixture [B, 8, T]."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, mixture: Tensor) -> Tensor:
        return self.own(mixture) * mixture[:, None]


class Speakers(nn.Module):
    """The same of speechbrain, which has sources first."""

    def __init__(self, own: nn.Module, mistake: str) -> None:
        super().__init__()
        self.own, self.mistake = own, mistake
        self.known: dict[Any, Tensor] = {}

    def forward(self, mixture: Tensor) -> Tensor:
        if self.mistake == "half":
            mixture = mixture.half().float()
        masks = self.own(mixture)
        if self.mistake == "memorized":
            masks = self.known.setdefault(mixture.shape, masks)
        if self.mistake == "voices":
            masks = masks.flip(0)
        return (masks * mixture).transpose(0, 1)


def voices(mistake: str) -> tuple[nn.Module, nn.Module]:
    net = part_of("asteroid.masknn.convolutional", bare=["asteroid"])
    bare = ["speechbrain", *(f"speechbrain.{name}" for name in ("nnet", "processing", "lobes", "lobes.models"))]
    for name in ("CNN", "linear", "containers"):
        module = part_of(
            f"speechbrain.nnet.{name}", bare=bare, without=["torchaudio", "torchaudio.transforms", "hyperpyyaml"]
        )
        setattr(sys.modules["speechbrain.nnet"], name, module)
    sys.modules["speechbrain"].nnet = sys.modules["speechbrain.nnet"]  # type: ignore[attr-defined]
    theirs = part_of("speechbrain.lobes.models.conv_tasnet")
    torch.manual_seed(0)
    own = net.TDConvNet(8, 2, n_blocks=2, n_repeats=2, bn_chan=6, hid_chan=10, skip_chan=0, norm_type="cLN")
    own = shaken(own)
    for name, tensor in own.named_parameters():
        if name.endswith("conv.bias") or ("gamma" not in name and "beta" not in name and name.endswith("bias")):
            tensor.data.zero_()  # the other package has none
    own.mask_net[0].weight.data.fill_(1.0)  # nor this activation
    other = theirs.MaskNet(8, 6, 10, 3, 2, 2, 2, norm_type="cLN")
    given = own.state_dict()
    tensors = {
        "layer_norm.gamma": given["bottleneck.0.gamma"], "layer_norm.beta": given["bottleneck.0.beta"],
        "bottleneck_conv1x1.conv.weight": given["bottleneck.1.weight"],
        "mask_conv1x1.conv.weight": given["mask_net.1.weight"],
    }  # fmt: skip
    for repeat in range(2):
        for block in range(2):
            at, source = f"temporal_conv_net.temporalblock_{repeat}_{block}.layers", f"TCN.{2 * repeat + block}"
            names = {
                "conv.conv.weight": "shared_block.0.weight", "act.weight": "shared_block.1.weight",
                "norm.gamma": "shared_block.2.gamma", "norm.beta": "shared_block.2.beta",
                "DSconv.conv_0.conv.weight": "shared_block.3.weight", "DSconv.act.weight": "shared_block.4.weight",
                "DSconv.act_0.gamma": "shared_block.5.gamma", "DSconv.act_0.beta": "shared_block.5.beta",
                "DSconv.conv_1.conv.weight": "res_conv.weight",
            }  # fmt: skip
            tensors |= {f"{at}.{name}": given[f"{source}.{old}"] for name, old in names.items()}
    one = "temporal_conv_net.temporalblock_1_0.layers.norm."
    two = "temporal_conv_net.temporalblock_1_0.layers.DSconv.act_0."
    if mistake == "norms":
        for part in ("gamma", "beta"):
            tensors[one + part], tensors[two + part] = tensors[two + part], tensors[one + part]
    own_shapes = other.state_dict()
    copied(other, {name: tensor.reshape(own_shapes[name].shape) for name, tensor in tensors.items()})
    for name, module in other.named_modules():
        if name.endswith("conv_0"):
            is_wrong = mistake == "reflect" and "block_1_1" in name
            module.padding_mode = "reflect" if is_wrong else "constant"
    if mistake == "dilation":
        block = other.temporal_conv_net["temporalblock_0_1"].layers["DSconv"]["conv_0"]
        block.dilation = 1
        block.conv.dilation = (1,)
    if mistake == "residual":
        block = other.temporal_conv_net["temporalblock_1_0"]
        block.__class__ = type("Block", (type(block),), {"forward": lambda self, x: self.layers(x)})
    return Voices(own).eval(), Speakers(other.eval(), mistake).eval()


# Spikes, one step of time after the other, as a dump of a port to numpy.
class Spikes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import snntorch

        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.fire = snntorch.Leaky(beta=0.9)
        self.out = snntorch.Leaky(beta=0.8, reset_mechanism="zero")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        inner, outer = torch.zeros(3, 8), torch.zeros(3, 8)
        spikes, potentials = [], []
        for now in x:
            fired, inner = self.fire(self.first(now), inner)
            spike, outer = self.out(self.second(fired), outer)
            spikes.append(spike)
            potentials.append(outer)
        return {"spikes": torch.stack(spikes), "potential": torch.stack(potentials)}


TIMES = {"x": 6 * torch.randn(5, 3, 6, generator=G)}


def spikes(mistake: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    own = shaken(Spikes())
    weights = {name: tensor.numpy() for name, tensor in own.state_dict().items()}
    inner, outer = np.zeros((3, 8), np.float32), np.zeros((3, 8), np.float32)
    if mistake == "left":
        inner = inner + np.float32(0.5)
    made: dict[str, Any] = {"x": TIMES["x"].numpy()}
    results: dict[str, list[Any]] = {"spikes": [], "potential": []}
    for time, now in enumerate(made["x"]):
        call = f"@{time}" if time else ""
        made[f"first{call}"] = now @ weights["first.weight"].T + weights["first.bias"]
        reset = (inner > 1).astype(np.float32)
        inner = np.float32(0.95 if mistake == "beta" else 0.9) * inner + made[f"first{call}"] - reset
        fired = (inner >= (0.9 if mistake == "threshold" else 1)).astype(np.float32)
        made[f"fire{call}:out[0]"], made[f"fire{call}:out[1]"] = fired, inner
        weight = weights["second.weight"] if mistake == "transposed" else weights["second.weight"].T
        made[f"second{call}"] = fired @ weight + weights["second.bias"]
        reset = (outer > 1).astype(np.float32)
        kept = outer - reset if mistake == "subtract" else (1 - reset) * outer
        outer = np.float32(0.8) * kept + made[f"second{call}"]
        if mistake == "half":
            outer = outer.astype(np.float16).astype(np.float32)
        made[f"out{call}:out[0]"], made[f"out{call}:out[1]"] = (outer > 1).astype(np.float32), outer
        if mistake == "memorized":
            results["spikes"].append(made["out:out[0]"])
            results["potential"].append(made["out:out[1]"])
        else:
            results["spikes"].append(made[f"out{call}:out[0]"])
            results["potential"].append(made[f"out{call}:out[1]"])
    path = Path(tempfile.mkdtemp()) / "spikes.npz"
    np.savez(path, **made, **{name: np.stack(values) for name, values in results.items()})
    return own, path


PAIRS = [
    Pair(
        "asteroid, speechbrain",
        ("asteroid", "asteroid_filterbanks", "speechbrain"),
        voices,
        {"mixture": torch.randn(2, 8, 12, generator=G)},
        {
            "reflect": inside("own.TCN.3*", "other, position"),
            "dilation": inside("own.TCN.1*", "other, position"),
            "residual": inside("own/add.*", "bias missing, other"),
            "norms": inside("own.TCN.2*", "swapped"),
            "half": inside("own.bottleneck*", "dtype"),
            "memorized": outside("a second call of the candidate"),
            "voices": inside("./mul.*", "permuted, swapped"),
        },
    ),
    Pair(
        "snntorch, numpy",
        ("snntorch",),
        spikes,
        TIMES,
        {
            "beta": inside("fire*", "scale, other"),
            "threshold": inside("fire*", "other, scale", known="other constants of the model are near by chance"),
            "transposed": inside("second*", "transposed"),
            "subtract": inside("out*", "other, scale, swapped"),
            "left": inside("fire/*", "stale, other, bias missing"),
            "half": inside("out/*", "dtype"),
            "memorized": inside("./stack.*", "stale, other", known="spikes are 0 and 1: another constant makes some"),
        },
    ),
]
