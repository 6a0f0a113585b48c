"""Models of packages beside other packages, files and dumps of them; mistakes were written down before any run."""

from __future__ import annotations

import copy
import importlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pair import Mistake, Pair, copied, edited, part_of, shaken
from rewrites import inside, outside
from torch import Tensor, nn
from torch.nn import functional as F

G = torch.Generator().manual_seed(11)


# Splines of a flow, of two packages.
class Flow(nn.Module):
    """Couplings one after the other: a value, and the logarithm of the determinant."""

    def __init__(self, parts: list[nn.Module], call: str, mistake: str = "") -> None:
        super().__init__()
        self.parts, self.call, self.mistake = nn.ModuleList(parts), call, mistake

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        total = torch.zeros(len(x))
        if self.mistake == "clamped":
            x.clamp_(-2, 2)
        for part in self.parts:
            x, one = getattr(part, self.call)(x)
            total = total + one
        return {"x": x, "log_det": -total if self.mistake == "sign" else total}


SPLINES = {
    "width": ("DEFAULT_MIN_BIN_WIDTH = 1e-3", "DEFAULT_MIN_BIN_WIDTH = 1e-2"),
    "tail": ("        outputs[outside_interval_mask] = inputs[outside_interval_mask]\n        logabsdet[outside_interval_mask] = 0\n    elif tails == \"circular\"", "    elif tails == \"circular\""),
}


def splines(mistake: str) -> tuple[nn.Module, nn.Module]:
    import normflows
    from nflows.nn.nets import ResidualNet
    from nflows.transforms.coupling import PiecewiseRationalQuadraticCouplingTransform
    from nflows.utils.torchutils import create_alternating_binary_mask

    torch.manual_seed(0)

    def net(inputs: int, outputs: int) -> nn.Module:
        return ResidualNet(inputs, outputs, hidden_features=8, num_blocks=1)

    def own_part(even: bool) -> nn.Module:
        return PiecewiseRationalQuadraticCouplingTransform(
            create_alternating_binary_mask(4, even=even), net, num_bins=4, tails="linear", tail_bound=3.0,
            apply_unconditional_transform=True,
        )  # fmt: skip

    own = shaken(Flow([own_part(False), own_part(True)], "forward"))
    parts = []
    for even in (False, True):
        made = normflows.flows.CoupledRationalQuadraticSpline(
            4, 1, 8, num_bins=4, tail_bound=3.0, reverse_mask=even,
            dropout_probability=0.1 if mistake == "dropout" else 0.0,
        )  # fmt: skip
        parts.append(made)
    other = Flow(parts, "inverse", mistake).eval()
    given = {name.replace("parts.0.", "parts.0.prqct.").replace("parts.1.", "parts.1.prqct."): tensor
             for name, tensor in own.state_dict().items()}  # fmt: skip
    if mistake == "exchanged":
        for part in ("weight", "bias"):
            name = f"parts.1.prqct.transform_net.final_layer.{part}"
            one = given[name].unflatten(0, (2, 11)).clone()
            one[:, :4], one[:, 4:8] = one[:, 4:8].clone(), one[:, :4].clone()
            given[name] = one.flatten(0, 1)
    other.load_state_dict(given)
    if mistake == "dropout":
        other.train()
    if mistake in SPLINES:
        coupling = sys.modules["normflows.flows.neural_spline.coupling"]
        changed = edited(importlib.import_module("normflows.utils.splines"), *SPLINES[mistake])
        for part in other.parts:
            for module in (part.prqct, part.prqct.unconditional_transform):
                module.__class__ = _with(type(module), coupling, changed)
                if mistake == "width":
                    module.min_bin_width = 1e-2
    return own, other


def _with(kind: type, coupling: Any, changed: Any) -> type:
    """Return a class whose splines are those of a changed module."""
    text = Path(coupling.__file__).read_text()
    module = type(sys)(coupling.__name__)
    module.__dict__.update(__package__=coupling.__package__, __file__=coupling.__file__)
    exec(compile(text, coupling.__file__, "exec"), module.__dict__)
    module.splines = changed  # type: ignore[attr-defined]
    return getattr(module, kind.__name__)


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
        module = part_of(f"speechbrain.nnet.{name}", bare=bare, without=["torchaudio", "torchaudio.transforms", "hyperpyyaml"])
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
        type(block)  # the class is shared: an own one for this block
        block.__class__ = type("Block", (type(block),), {"forward": lambda self, x: self.layers(x)})
    return Voices(own).eval(), Speakers(other.eval(), mistake).eval()


# Faces, as an ONNX file.
def faces(mistake: str) -> tuple[nn.Module, Any]:
    import onnx
    from onnx import numpy_helper

    absent = ["torchvision", "torchvision.transforms", "torchvision.ops", "torchvision.ops.boxes", "PIL"]
    absent.append("facenet_pytorch.models.utils.detect_face")
    kept = {name: sys.modules.get(name) for name in absent}
    net = part_of("facenet_pytorch.models.mtcnn", bare=["facenet_pytorch", "facenet_pytorch.models"], without=absent)
    for name, module in kept.items():  # others look whether these are there
        if module is None:
            sys.modules.pop(name, None)
    torch.manual_seed(0)
    own = shaken(net.ONet(pretrained=False))
    other = copy.deepcopy(own)
    if mistake == "slope":
        other.prelu2.weight.data, other.prelu3.weight.data = own.prelu3.weight.data, own.prelu2.weight.data
    if mistake == "half":
        for parameter in other.parameters():
            parameter.data = parameter.data.half().float()
    path = Path(tempfile.mkdtemp()) / "faces.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = torch.randn(2, 3, 48, 48)
        torch.onnx.export(other, (example,), str(path), dynamo=True, external_data=False, verbose=False)
    model = onnx.load(str(path))
    graph = model.graph
    for node in graph.node:
        for attribute in node.attribute:
            if mistake == "rows" and node.op_type == "Transpose" and list(attribute.ints) == [0, 3, 2, 1]:
                attribute.ints[:] = [0, 2, 3, 1]
            if mistake == "softmax" and node.op_type == "Softmax" and attribute.name == "axis":
                attribute.i = 0
    if mistake == "exchanged":
        names = [value.name for value in graph.output]
        for node in graph.node:  # the values of two results change places, and cut to the shape of each
            pass
        two = {value.name: value for value in graph.output}
        del graph.output[:]
        graph.output.extend(two[name] for name in (names[1], names[0], names[2]))
    if mistake == "memorized":
        with torch.no_grad():
            result = own(PICTURES["x"])[0]
        name = graph.output[0].name
        for node in graph.node:
            node.output[:] = [f"{name}_before" if one == name else one for one in node.output]
        made = onnx.helper.make_node("Constant", [], [name], value=numpy_helper.from_array(result.numpy()))
        graph.node.append(made)
    onnx.save(model, str(path))
    return own, path


PICTURES = {"x": torch.randn(2, 3, 48, 48, generator=G)}

# Sound in codes, as TorchScript.
SOUND = {
    "reciprocal": ("layers", "(alpha + 1e-9).reciprocal() * torch.sin(alpha * x).pow(2)", "torch.sin(alpha * x).pow(2)"),
    "rotated": ("attention", "torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)"),
}


def sound(mistake: str) -> tuple[nn.Module, nn.Module]:
    from snac import snac as package

    names = [f"snac.{name}" for name in ("attention", "layers", "vq", "snac")]
    originals = {name: importlib.import_module(name) for name in names}
    options: dict[str, Any] = dict(
        sampling_rate=8000, encoder_dim=16, encoder_rates=[2, 2], decoder_dim=64, decoder_rates=[2, 2],
        attn_window_size=4, codebook_size=16, codebook_dim=4, vq_strides=[2, 1], noise=False, depthwise=True,
    )  # fmt: skip
    torch.manual_seed(0)
    own = shaken(package.SNAC(**options))
    made = package
    if mistake in SOUND:
        from pair import rewritten

        _, old, new = SOUND[mistake]
        made = rewritten(names, (old, new))[-1]
    options |= {"noise": mistake == "noise", "attn_window_size": 2 if mistake == "window" else 4}
    other = made.SNAC(**options)
    given = own.state_dict()
    if mistake == "noise":  # the blocks of noise are none of the weights
        given = {**other.state_dict(), **{_moved(name): tensor for name, tensor in given.items()}}
    if mistake == "books":
        a, b = "quantizer.quantizers.0.out_proj.", "quantizer.quantizers.1.out_proj."
        given = {(b + n[len(a):] if n.startswith(a) else a + n[len(b):] if n.startswith(b) else n): t for n, t in given.items()}
    other.load_state_dict(given)
    del originals
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped: nn.Module = Untrimmed(other.eval()) if mistake == "codes" else other.eval()
        return own, torch.jit.trace(wrapped, (torch.randn(1, 1, 64),), check_trace=False)


def _moved(name: str) -> str:
    parts = name.split(".")
    if parts[:2] == ["decoder", "model"] and len(parts) > 4 and parts[3] == "block" and parts[4] in "234":
        parts[4] = str(int(parts[4]) + 1)
    return ".".join(parts)


class Untrimmed(nn.Module):
    """Codes in another order than they were made."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, audio_data: Tensor) -> Any:
        sound, codes = self.own(audio_data)
        return sound, [codes[0].flip(-1), codes[1]]


# Spikes, one step of time after the other, as a dump of a port to numpy.
class Spikes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        import snntorch

        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.fire = snntorch.Leaky(beta=0.9, init_hidden=True)
        self.out = snntorch.Leaky(beta=0.8, init_hidden=True, output=True, reset_mechanism="zero")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        spikes, potential = self.out(self.second(self.fire(self.first(x))))
        return {"spikes": spikes, "potential": potential}


TIMES = [{"x": 2 * torch.randn(3, 6, generator=G)} for _ in range(5)]


def spikes(mistake: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    own = shaken(Spikes())
    weights = {name: tensor.numpy() for name, tensor in own.state_dict().items()}
    inner, outer = np.zeros((3, 8), np.float32), np.zeros((3, 8), np.float32)
    if mistake == "left":
        inner = inner + np.float32(0.5)
    folder = Path(tempfile.mkdtemp()) / "dump"
    folder.mkdir()
    first: dict[str, Any] = {}
    for step, given in enumerate(TIMES):
        x = given["x"].numpy()
        made: dict[str, Any] = {"x": x}
        made["first"] = x @ weights["first.weight"].T + weights["first.bias"]
        reset = (inner > 1).astype(np.float32)
        beta = np.float32(0.95 if mistake == "beta" else 0.9)
        inner = beta * inner + made["first"] - reset
        made["fire"] = (inner >= (0.9 if mistake == "threshold" else 1)).astype(np.float32)
        weight = weights["second.weight"] if mistake == "transposed" else weights["second.weight"].T
        made["second"] = made["fire"] @ weight + weights["second.bias"]
        reset = (outer > 1).astype(np.float32)
        kept = outer - reset if mistake == "subtract" else (1 - reset) * outer
        outer = np.float32(0.8) * kept + made["second"]
        made["spikes"], made["potential"] = (outer > 1).astype(np.float32), outer
        if mistake == "half":
            made["potential"] = outer = outer.astype(np.float16).astype(np.float32)
        first = first or made
        if mistake == "memorized":
            made = {**made, "spikes": first["spikes"], "potential": first["potential"]}
        for name, value in made.items():
            np.save(folder / f"{name}-step{step}.npy", value)
    return own, folder


# Patches that are mixed, as a dump of a port to JAX.
IMAGES = {"input": torch.randn(2, 3, 8, 8, generator=G)}


def mixed(mistake: str) -> tuple[nn.Module, Any]:
    import jax
    import jax.numpy as jnp
    from mlp_mixer_pytorch import MLPMixer

    torch.manual_seed(0)
    own = shaken(MLPMixer(image_size=8, channels=3, patch_size=4, dim=4, depth=2, num_classes=5, expansion_factor=1, expansion_factor_token=2))
    weights = {name: tensor.numpy() for name, tensor in own.state_dict().items()}
    seen: dict[str, Any] = {}

    def keep(name: str, value: Any) -> Any:
        seen[name] = np.asarray(value)
        return value

    def linear(name: str, x: Any) -> Any:
        return keep(name, x @ weights[f"{name}.weight"].squeeze(-1).T + weights[f"{name}.bias"] if weights[f"{name}.weight"].ndim == 3 else x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"])

    def mix(name: str, x: Any, turned: bool) -> Any:
        """Of tokens, [B, C, N], as of channels, [B, N, C]."""
        def one(part: str, x: Any) -> Any:
            weight = weights[f"{name}.{part}.weight"]
            if weight.ndim == 3:
                weight = weight[..., 0]
                if mistake == "transposed" and name == "3.0.fn":
                    weight = weight.T
                return keep(f"{name}.{part}", jnp.einsum("oi,bic->boc", weight, x) + weights[f"{name}.{part}.bias"][:, None])
            return keep(f"{name}.{part}", x @ weight.T + weights[f"{name}.{part}.bias"])

        hidden = one("0", x)
        hidden = keep(f"{name}.1", jax.nn.gelu(hidden, approximate=mistake == "gelu"))
        if mistake == "half":
            hidden = hidden.astype(jnp.float16).astype(jnp.float32)
        return keep(name, one("3", hidden))

    def norm(name: str, x: Any) -> Any:
        eps = 1e-3 if mistake == "eps" else 1e-5
        centered = x - x.mean(-1, keepdims=True)
        scaled = centered / jnp.sqrt((centered**2).mean(-1, keepdims=True) + eps)
        return keep(name, scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"])

    x = jnp.asarray(IMAGES["input"].numpy())
    keep("input", x)
    parts = x.reshape(2, 3, 2, 4, 2, 4)
    order = (0, 2, 4, 1, 3, 5) if mistake == "patches" else (0, 2, 4, 3, 5, 1)
    x = keep("0", parts.transpose(order).reshape(2, 4, 48))
    x = keep("1", x @ weights["1.weight"].T + weights["1.bias"])
    for layer in ("2", "3"):
        x = keep(f"{layer}.0", mix(f"{layer}.0.fn", norm(f"{layer}.0.norm", x), True) + x)
        x = keep(f"{layer}.1", mix(f"{layer}.1.fn", norm(f"{layer}.1.norm", x), False) + x)
        keep(layer, x)
    x = keep("5", norm("4", x).mean(1))
    result = x @ weights["6.weight"].T + weights["6.bias"]
    if mistake == "rows":
        result = result[::-1]
    seen["output"] = np.asarray(result)
    if mistake == "dropped":
        seen["output"] = seen["output"][:, :4]
    path = Path(tempfile.mkdtemp()) / "jax.npz"
    np.savez(path, **seen)
    return own, path


PAIRS = [
    Pair(
        "nflows, normflows",
        ("nflows", "normflows"),
        splines,
        {"x": 2 * torch.randn(6, 4, generator=G)},
        {
            "width": inside("parts*", "scale, other"),
            "tail": inside("parts*", "mask, other"),
            "exchanged": inside("parts.1*", "swapped"),
            "dropout": outside("training mode"),
            "clamped": outside("writes", "in place", "x after the forward"),
            "sign": outside("log_det"),
        },
    ),
    Pair(
        "asteroid, speechbrain",
        ("asteroid", "speechbrain"),
        voices,
        {"mixture": torch.randn(2, 8, 12, generator=G)},
        {
            "reflect": inside("own.TCN.3*", "other, position"),
            "dilation": inside("own.TCN.1*", "other, position"),
            "residual": inside("own*", "bias missing, other"),
            "norms": inside("own.TCN.2*", "swapped"),
            "half": inside("own*", "dtype"),
            "memorized": outside("second call"),
            "voices": inside("*", "permuted, swapped"),
        },
    ),
    Pair(
        "facenet-pytorch, ONNX Runtime",
        ("facenet_pytorch",),
        faces,
        PICTURES,
        {
            "slope": inside("prelu2*", "swapped"),
            "half": inside("conv1*", "dtype"),
            "rows": inside("*permute* *clone* *view* dense5*", "permuted, transposed"),
            "softmax": inside("softmax6_1*", "transposed, other"),
            "exchanged": outside("0", "1"),
            "memorized": outside("depend", "constant", "second call"),
        },
    ),
    Pair(
        "snac, TorchScript",
        ("snac",),
        sound,
        {"audio_data": torch.randn(2, 1, 64, generator=G)},
        {
            "reciprocal": inside("encoder.block.1.block.0.block.0*", "scale, other"),
            "window": inside("encoder.block.3*", "permuted, other, mask"),
            "rotated": inside("encoder.block.3*", "position, scale"),
            "books": inside("quantizer.quantizers.0.out_proj*", "swapped"),
            "noise": outside("random", "draws"),
            "codes": outside("1"),
        },
    ),
    Pair(
        "snntorch, numpy",
        ("snntorch",),
        spikes,
        TIMES,
        {
            "beta": inside("fire*", "scale, other"),
            "threshold": inside("fire*", "other, scale"),
            "transposed": inside("second*", "transposed"),
            "subtract": inside("out*", "other, scale, swapped"),
            "left": inside("fire*", "stale, other, bias missing"),
            "half": inside("out*", "dtype"),
            "memorized": outside("spikes", "potential"),
        },
    ),
    Pair(
        "mlp-mixer-pytorch, jax",
        ("mlp_mixer_pytorch", "jax"),
        mixed,
        IMAGES,
        {
            "transposed": inside("3.0.fn.0*", "transposed"),
            "gelu": inside("2.0.fn.1*", "activation"),
            "eps": inside("2.0.norm*", "eps"),
            "patches": inside("0* ./*", "permuted"),
            "half": inside("2.0.fn.3*", "dtype"),
            "rows": inside("6*", "permuted"),
            "dropped": outside("output"),
        },
    ),
]
