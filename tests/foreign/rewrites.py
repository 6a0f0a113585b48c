"""Models of packages beside rewrites of a few dozen lines; their mistakes were written before any run."""

from __future__ import annotations

import torch
from pair import Mistake, Pair, shaken
from torch import Tensor, nn
from torch.nn import functional as F

G = torch.Generator().manual_seed(7)


# States of complex numbers: a scan there, a loop here.
class Looped(nn.Module):
    """S5 with a gated part behind it, [B, L, 6]."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake, self.kept = mistake, None
        self.first, self.second = nn.LayerNorm(6), nn.LayerNorm(6)
        self.poles = nn.Parameter(torch.zeros(8, dtype=torch.complex64))
        self.read = nn.Parameter(torch.zeros(6, 8, dtype=torch.complex64))
        self.write, self.direct = nn.Parameter(torch.zeros(8, 6, 2)), nn.Parameter(torch.zeros(6))
        self.step = nn.Parameter(torch.zeros(8, 1))
        self.up, self.down = nn.Linear(6, 12, bias=False), nn.Linear(6, 6, bias=False)

    def states(self, x: Tensor) -> Tensor:
        write, step = torch.view_as_complex(self.write), self.step[:, 0].exp()
        decay = torch.exp(self.poles * step)
        if self.mistake == "bilinear":
            decay = (1 + step / 2 * self.poles) / (1 - step / 2 * self.poles)
        drive = x.to(write.dtype) @ (((decay - 1) / self.poles)[:, None] * write).T
        state = torch.zeros(len(x), 8, dtype=write.dtype)
        if self.mistake == "kept" and self.kept is not None:
            state = self.kept
        found = []
        for t in range(x.shape[1]):
            state = decay * state + drive[:, t]
            found.append(state)
        self.kept = state.detach()
        seen = torch.stack(found, 1) @ self.read.T
        seen = seen.imag if self.mistake == "imaginary" else seen.real
        return seen if self.mistake == "direct" else seen + self.direct * x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.mistake == "bfloat16":
            x = x.bfloat16().float()
        x = self.second(F.gelu(self.states(x)) + x)
        value, gate = self.up(x).chunk(2, -1)
        return self.down(value * F.gelu(gate)) + x


def scanned(mistake: str) -> tuple[nn.Module, nn.Module]:
    from s5.s5_model import S5Block

    torch.manual_seed(0)
    own = S5Block(6, 8, bidir=False).eval()
    for name in ("attn_norm", "ff_norm", "ff_enc", "ff_dec"):
        shaken(own.get_submodule(name))
    own.s5.seq.log_step.data += 2
    other = Looped(mistake).eval()
    pairs = {
        "poles": "s5.seq.Lambda", "read": "s5.seq.C", "write": "s5.seq.B", "direct": "s5.seq.D",
        "step": "s5.seq.log_step", "first": "attn_norm", "second": "ff_norm", "up": "ff_enc", "down": "ff_dec",
    }  # fmt: skip
    given = own.state_dict()
    tensors = {}
    for name in other.state_dict():
        head, _, rest = name.partition(".")
        tensors[name] = given[f"{pairs[head]}.{rest}" if rest else pairs[head]].reshape(other.state_dict()[name].shape)
    if mistake == "transposed":
        tensors["down.weight"] = tensors["down.weight"].T
    other.load_state_dict(tensors)
    return own, other


# Attention over points in frames of their own.
class Frames(nn.Module):
    """Two heads of invariant point attention, heads first."""

    def __init__(self, own: nn.Module, mistake: str) -> None:
        super().__init__()
        self.mistake, self.held = mistake, None
        for name, child in own.named_children():
            if isinstance(child, nn.Linear):
                self.add_module(name, nn.Linear(child.in_features, child.out_features, child.bias is not None))
        pairs = own.to_pairwise_attn_bias[0]
        self.pairs = nn.Linear(pairs.in_features, 2)
        self.spread = nn.Parameter(torch.zeros(2))

    def heads(self, x: Tensor, width: int) -> Tensor:
        return x.unflatten(-1, (2, width)).transpose(1, 2)

    def forward(
        self, single_repr: Tensor, pairwise_repr: Tensor, rotations: Tensor, translations: Tensor, mask: Tensor
    ) -> Tensor:
        if self.mistake == "units":
            translations *= 0.1
        if self.mistake == "first frames":
            self.held = rotations if self.held is None else self.held
            rotations = self.held
        turn, shift = rotations[:, None], translations[:, None, :, None]
        query, key, value = (self.heads(getattr(self, f"to_scalar_{part}")(single_repr), 4) for part in "qkv")
        points = []
        for part in "qkv":
            local = self.heads(getattr(self, f"to_point_{part}")(single_repr), 6).unflatten(-1, (2, 3))
            points.append(local @ (turn.transpose(-1, -2) if self.mistake == "turned" else turn) + shift)
        away = (points[0][:, :, :, None] - points[1][:, :, None]).square().sum((-1, -2))
        spread = F.softplus(self.spread) if self.mistake != "softened" else self.spread.exp()
        factor = (3 * 2 * 9 / (1 if self.mistake == "halved" else 2)) ** -0.5
        scores = query @ key.transpose(-1, -2) * 12**-0.5 - 0.5 * away * spread[:, None, None] * factor
        scores = scores + self.pairs(pairwise_repr).permute(0, 3, 1, 2) * 3**-0.5
        seen = mask[:, None, :, None] & mask[:, None, None, :]
        if self.mistake != "padding":
            scores = scores.masked_fill(~seen, -torch.finfo(scores.dtype).max)
        shares = scores.softmax(-1)
        if self.mistake == "half":
            shares = shares.half().float()
        gathered = torch.einsum("bhij,bhjdc->bhidc", shares, points[2]) - shift
        local = gathered @ turn.transpose(-1, -2)
        parts = [shares @ value, local.flatten(-2), (local.square().sum(-1) + 1e-8).sqrt()]
        parts.append(torch.einsum("bhij,bijd->bhid", shares, pairwise_repr))
        return self.to_out(torch.cat([part.transpose(1, 2).flatten(2) for part in parts], -1))


def frames(mistake: str) -> tuple[nn.Module, nn.Module]:
    from invariant_point_attention import InvariantPointAttention

    torch.manual_seed(0)
    own = shaken(
        InvariantPointAttention(
            dim=12, heads=2, scalar_key_dim=4, scalar_value_dim=4, point_key_dim=2, point_value_dim=2,
            pairwise_repr_dim=5,
        )
    )  # fmt: skip
    other = Frames(own, mistake).eval()
    names = {"pairs": "to_pairwise_attn_bias.0", "spread": "point_weights"}
    given = own.state_dict()
    tensors = {}
    for name in other.state_dict():
        head, _, rest = name.partition(".")
        source = names.get(head, head)
        tensors[name] = given[f"{source}.{rest}" if rest else source]
    other.load_state_dict(tensors)
    return own, other


# Interactions of features that are compressed layer by layer.
class Interactions(nn.Module):
    """xDeepFM of four fields, [B, 4] ids."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.starts = [0, 5, 9, 16]
        self.table, self.weights, self.bias = nn.Embedding(19, 6), nn.Embedding(19, 1), nn.Parameter(torch.zeros(1))
        self.mix = nn.ModuleList([nn.Linear(16, 8), nn.Linear(16, 8)])
        self.out = nn.Linear(12, 1)
        self.deep = nn.Sequential(nn.Linear(24, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.2), nn.Linear(10, 1))

    def forward(self, x: Tensor) -> Tensor:
        rows = x if self.mistake == "starts" else x + torch.tensor(self.starts)
        embedded = self.table(rows)
        pooled, hidden = [], embedded
        for number, mix in enumerate(self.mix):
            pairs = torch.einsum("bid,bjd->bdij", embedded, hidden)
            if self.mistake == "order" and number:
                pairs = pairs.transpose(-1, -2)
            made = mix(pairs.flatten(2))
            made = F.relu(made) if self.mistake != "activation" else F.leaky_relu(made, 0.1)
            if number == 0:
                now, later = made.split(4, -1)
                now, later = (later, now) if self.mistake == "halves" else (now, later)
                pooled.append(now.sum(1))
                hidden = later.transpose(1, 2)
            else:
                pooled.append(made.sum(1))
        crossed = self.out(torch.cat(pooled, -1))
        score = self.weights(rows).sum(1) + self.bias + crossed + self.deep(embedded.flatten(1))
        return score[:, 0] if self.mistake == "logits" else score[:, 0].sigmoid()


def interactions(mistake: str) -> tuple[nn.Module, nn.Module]:
    from torchfm.model.xdfm import ExtremeDeepFactorizationMachineModel

    torch.manual_seed(0)
    own = shaken(ExtremeDeepFactorizationMachineModel([5, 4, 7, 3], 6, (10,), 0.2, (8, 8)))
    other = Interactions(mistake).eval()
    names = {
        "table": "embedding.embedding", "weights": "linear.fc", "bias": "linear.bias", "mix": "cin.conv_layers",
        "out": "cin.fc", "deep": "mlp.mlp",
    }  # fmt: skip
    given = own.state_dict()
    tensors = {}
    for name, tensor in other.state_dict().items():
        head, _, rest = name.partition(".")
        tensors[name] = given[f"{names[head]}.{rest}" if rest else names[head]].reshape(tensor.shape)
    other.load_state_dict(tensors)
    if mistake == "training":
        other.deep.train()
    return own, other


# Convolutions over a stream: what was read before is kept from one chunk to the next.
class Stream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from pytorch_tcn import TemporalConv1d

        self.first = TemporalConv1d(4, 4, 3, dilation=2)
        self.norm = nn.BatchNorm1d(4)
        self.second = TemporalConv1d(4, 4, 3, dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.first(x, inference=True)))
        return self.second(hidden, inference=True) + x


class Windows(nn.Module):
    """The same with a list of what was kept, and windows times a matrix."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake
        self.first, self.second = nn.Linear(12, 4), nn.Linear(12, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.1)
        self.past = [torch.zeros(1, 4, 4), torch.zeros(1, 4, 4)]

    def read(self, number: int, x: Tensor, linear: nn.Linear) -> Tensor:
        slot = 0 if self.mistake == "shared" else number
        whole = torch.cat([self.past[slot], x], -1)
        if self.mistake != "stale" or number == 0:
            self.past[slot] = whole[..., -4:] if self.mistake != "early" else whole[..., -5:-1]
        length = x.shape[-1]
        step = 1 if self.mistake == "dilation" and number else 2
        start = 4 - 2 * step
        taps = [whole[..., start + step * tap : start + step * tap + length] for tap in range(3)]
        return linear(torch.stack(taps, 2).flatten(1, 2).transpose(1, 2)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.read(0, x, self.first))
        hidden = F.relu(self.drop(hidden))
        if self.mistake == "written":
            x.add_(self.read(1, hidden, self.second))
            return x
        return self.read(1, hidden, self.second) + x


def stream(mistake: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    own, other = shaken(Stream()), Windows(mistake).eval()
    for name in ("first", "second"):
        source, target = own.get_submodule(name), other.get_submodule(name)
        weight = source.weight.data.flip(-1) if mistake == "flipped" and name == "second" else source.weight.data
        target.weight.data, target.bias.data = weight.flatten(1).clone(), source.bias.data.clone()
    other.norm.load_state_dict(own.norm.state_dict())
    if mistake == "dropout":
        other.drop.train()
    return own, other


def outside(*because: str) -> Mistake:
    """Return a mistake outside of the operations, whose cause is named by one of these texts."""
    return Mistake([], because=because)


def inside(sites: str, kinds: str, known: str = "") -> Mistake:
    return Mistake(sites.split(), kinds=kinds.split(", "), known=known)


def turns(count: int) -> Tensor:
    made, _ = torch.linalg.qr(torch.randn(2, count, 3, 3, generator=G))
    return made * made.det()[..., None, None]


LEFT = "something is left of the call before"
PAIRS = [
    Pair(
        "s5-pytorch, rewritten",
        ("s5",),
        scanned,
        [{"x": torch.randn(2, 7, 6, generator=G)} for _ in range(3)],
        {
            # Its scan runs under a transform that leaves no module names.
            "bilinear": inside("./add.0", "other"),
            "imaginary": inside("./permute.7", "swapped, position"),  # one of the two parts of a number
            "direct": inside("./add.0", "bias missing, other"),
            "transposed": inside("./t.2", "transposed"),
            "kept": outside(LEFT),
            "bfloat16": inside("./add.0", "dtype", known="the rounded copy is named as another operand"),
        },
    ),
    Pair(
        "invariant-point-attention, rewritten",
        ("invariant_point_attention",),
        frames,
        [
            {
                "single_repr": torch.randn(2, 5, 12, generator=G),
                "pairwise_repr": torch.randn(2, 5, 5, 5, generator=G),
                "rotations": turns(5),
                "translations": torch.randn(2, 5, 3, generator=G),
                "mask": torch.tensor([[True] * 5, [True, True, True, False, False]]),
            }
            for _ in range(2)
        ],
        {
            "halved": inside("./mul.*", "scale"),
            "padding": inside("./masked_fill.*", "mask"),
            "turned": inside("./expand.* ./einsum.*", "transposed"),
            "softened": inside("./softplus.*", "activation"),
            "units": outside("the candidate writes to it"),
            "first frames": outside(LEFT),
            "half": inside("./softmax.* ./einsum.*", "dtype"),
        },
    ),
    Pair(
        "torchfm xdeepfm, rewritten",
        ("torchfm",),
        interactions,
        {"x": torch.stack([torch.randint(0, n, (6,), generator=G) for n in (5, 4, 7, 3)], 1)},
        {
            "starts": inside("embedding* linear*", "position, other, swapped"),
            "order": inside("cin*", "transposed, permuted, swapped"),
            "activation": inside("cin*", "activation"),
            "halves": inside("cin*", "swapped"),
            "training": outside("training mode"),
            "logits": inside("*sigmoid*", "activation, other"),
        },
    ),
    Pair(
        "pytorch-tcn streaming, rewritten",
        ("pytorch_tcn",),
        stream,
        [{"x": torch.randn(1, 4, 5, generator=G)} for _ in range(4)],
        {
            "dilation": inside("second*", "other, position"),
            "flipped": inside("second*", "permuted"),
            "stale": inside("second*", "stale, other"),  # what it remembers is zero
            "early": inside("first*", "position, stale, other"),  # what it remembers differs
            "shared": inside("second* first*", "stale, swapped"),
            "written": outside("the candidate writes to it"),
            "dropout": outside("training mode"),
        },
    ),
]
