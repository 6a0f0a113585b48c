"""Molecules and graphs: messages along edges, beside other packages and beside a matrix of who is next to whom."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from excerpt import excerpt
from pair import Mistake, Pair, copied, shaken
from torch import Tensor, nn
from torch.nn import functional as F

MOLECULES = {
    "cutoff": ("0.5 * (torch.cos(input * math.pi / cutoff) + 1.0)", "(torch.cos(input * math.pi / cutoff) + 1.0)"),
    "width": ("coeff = -0.5 / torch.pow(widths, 2)", "coeff = -1.0 / torch.pow(widths, 2)"),
    "shift": ("functional.softplus(x) - math.log(2.0)", "functional.softplus(x)"),
    "direction": ("x_j = x[idx_j]", "x_j = x[idx_i]"),
    "residual": ("x = x + v", "x = v"),
    "filter": ("Wij = Wij * rcut_ij[:, None]", "Wij = Wij"),
}


class Edges(nn.Module):
    """Edges that are known, instead of a search for neighbors."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.register_buffer("edges", edges)

    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        row, col = self.edges
        return self.edges, (pos[row] - pos[col]).norm(dim=-1)


class Atoms(nn.Module):
    """SchNet of schnetpack with a sum over atoms; it takes a dictionary."""

    def __init__(self, own: nn.Module, edges: Tensor, scatter: Any) -> None:
        super().__init__()
        self.representation, self.scatter = own, scatter
        self.outnet = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 1))
        self.register_buffer("edges", edges)

    def forward(self, z: Tensor, pos: Tensor, batch: Tensor) -> Tensor:
        i, j = self.edges[1], self.edges[0]
        inputs = {"Z": z, "Rij": pos[j] - pos[i], "idx_i": i, "idx_j": j}
        x = self.outnet[0](self.representation(inputs)["scalar_representation"])
        return self.scatter(self.outnet[1](F.softplus(x) - 0.6931471805599453), batch, dim_size=2)


def molecules(mistake: str) -> tuple[nn.Module, nn.Module]:
    from torch_geometric.nn.models import SchNet

    def edit(*names: str) -> tuple[str, str] | None:
        return MOLECULES[mistake] if mistake in names else None

    base = excerpt("schnetpack", "nn/base.py", ["Dense"], xavier_uniform_=None, zeros_=None)
    radial = excerpt("schnetpack", "nn/radial.py", ["gaussian_rbf", "GaussianRBF"], edit("width"))
    cutoffs = excerpt("schnetpack", "nn/cutoff.py", ["cosine_cutoff", "CosineCutoff"], edit("cutoff"))
    activations = excerpt("schnetpack", "nn/activations.py", ["shifted_softplus"], edit("shift"))
    scatter = excerpt("schnetpack", "nn/scatter.py", ["scatter_add", "_scatter_add"])
    theirs = excerpt(
        "schnetpack",
        "representation/schnet.py",
        ["SchNetInteraction", "SchNet"],
        edit("direction", "residual", "filter"),
        Dense=base.Dense,
        scatter_add=scatter.scatter_add,
        shifted_softplus=activations.shifted_softplus,
        snn=SimpleNamespace(replicate_module=lambda make, number, shared: nn.ModuleList(make() for _ in range(number))),
        properties=SimpleNamespace(Z="Z", Rij="Rij", idx_i="idx_i", idx_j="idx_j"),
    )
    torch.manual_seed(0)
    own = shaken(
        SchNet(16, 12, 2, 10, 5.0, interaction_graph=Edges(BONDS), readout="mean" if mistake == "readout" else "add")
    )
    other = Atoms(
        theirs.SchNet(16, 2, radial.GaussianRBF(10, 5.0), cutoffs.CosineCutoff(5.0), 12), BONDS, scatter.scatter_add
    ).eval()
    weights = own.state_dict()
    tensors: dict[str, Any] = dict(other.state_dict())
    tensors["representation.embedding.weight"] = weights["embedding.weight"]
    for part in ("weight", "bias"):
        tensors[f"outnet.0.{part}"] = weights[f"lin1.{part}"]
        tensors[f"outnet.1.{part}"] = weights[f"lin2.{part}"]
        for at in range(2):
            for name, source in {
                "in2f": "conv.lin1",
                "f2out.0": "conv.lin2",
                "f2out.1": "lin",
                "filter_network.0": "mlp.0",
                "filter_network.1": "mlp.2",
            }.items():
                if f"interactions.{at}.{source}.{part}" in weights:
                    tensors[f"representation.interactions.{at}.{name}.{part}"] = weights[
                        f"interactions.{at}.{source}.{part}"
                    ]
    copied(other, tensors)
    return own, other


class Layers(nn.Module):
    """Three kinds of messages of torch_geometric, and a mean over each graph."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GCNConv, GINConv, MeanAggregation, SAGEConv

        self.gcn = GCNConv(6, 8, add_self_loops=False)
        self.sage = SAGEConv(8, 8)
        self.gin = GINConv(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), train_eps=True)
        self.pool = MeanAggregation()

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.gcn(x, edge_index))
        x = F.relu(self.sage(x, edge_index))
        x = self.gin(x, edge_index)
        return {"nodes": x, "graphs": self.pool(x, batch, dim_size=2)}


class Matrix(nn.Module):
    """The same by a matrix of who sends to whom."""

    def __init__(self, own: nn.Module, mistake: str) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({n.replace(".", "_"): p.detach().clone() for n, p in own.named_parameters()})
        self.mistake = mistake

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}_weight"], self.weights.get(f"{name}_bias"))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> dict[str, Tensor]:
        number = len(x)
        links = x.new_zeros(number, number)
        links[edge_index[1], edge_index[0]] = 1
        # Normalized from both sides.
        known = links + torch.eye(number) if self.mistake == "loops" else links
        degree = known.sum(1)
        root = torch.where(degree > 0, degree.clamp(min=1).rsqrt(), 0)
        both = root[:, None] * known * root[None]
        if self.mistake == "one side":
            both = known / degree[:, None].clamp(min=1)
        x = F.relu(both @ self.linear(x, "gcn_lin") + self.weights["gcn_bias"])
        total = (links.T if self.mistake == "direction" else links) @ x
        mean = total if self.mistake == "mean" else total / links.sum(1, keepdim=True).clamp(min=1)
        x = F.relu(self.linear(mean, "sage_lin_l") + self.linear(x, "sage_lin_r"))
        y = links @ x + (1 if self.mistake == "epsilon" else 1 + self.weights["gin_eps"]) * x
        y = F.silu(self.linear(y, "gin_nn_0")) if self.mistake == "activation" else F.relu(self.linear(y, "gin_nn_0"))
        x = self.linear(y, "gin_nn_2")
        of = F.one_hot(batch, 2).float()
        return {"nodes": x, "graphs": (of.T @ x) / (number if self.mistake == "pool" else of.sum(0)[:, None])}


def layers(mistake: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    own = shaken(Layers())
    return own, Matrix(own, mistake).eval()


class Attended(nn.Module):
    """Two attentions over neighbors of torch_geometric, the second with what is known of the edges."""

    def __init__(self) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv, GATv2Conv

        self.first = GATConv(6, 5, heads=2, add_self_loops=False)
        self.second = GATv2Conv(10, 4, heads=3, concat=False, add_self_loops=False, edge_dim=3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = F.elu(self.first(x, edge_index))
        return self.second(x, edge_index, edge_attr)


class HeadsFirst(nn.Module):
    """The same with heads first and sums that are divided at the end."""

    def __init__(self, own: nn.Module, mistake: str) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({n.replace(".", "_"): p.detach().clone() for n, p in own.named_parameters()})
        self.mistake = mistake

    def heads(self, x: Tensor, name: str, number: int) -> Tensor:
        y = F.linear(x, self.weights[f"{name}_weight"], self.weights.get(f"{name}_bias"))
        if self.mistake == "interleaved" and name == "second_lin_l":
            return y.unflatten(-1, (-1, number)).permute(2, 0, 1)
        return y.unflatten(-1, (number, -1)).transpose(0, 1)

    def mixed(self, values: Tensor, scores: Tensor, target: Tensor, number: int) -> Tensor:
        """Mix values [H, E, D] by scores [H, E] for each target."""
        heads = len(values)
        most = scores.new_full((heads, number), -torch.inf)
        most = most.scatter_reduce(1, target.expand(heads, -1), scores, "amax")
        shares = (scores - most[:, target]).exp()
        total = shares.new_zeros(heads, number).index_add(1, target, shares)
        if self.mistake != "normalized":
            shares = shares / (total[:, target] + 1e-16)
        return values.new_zeros(heads, number, values.shape[-1]).index_add(1, target, shares[..., None] * values)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index
        number = len(x)
        h = self.heads(x, "first_lin", 2)
        left = (h * self.weights["first_att_src"].transpose(0, 1)).sum(-1)
        right = (h * self.weights["first_att_dst"].transpose(0, 1)).sum(-1)
        if self.mistake == "sides":
            left, right = right, left
        scores = F.leaky_relu(left[:, source] + right[:, target], 0.01 if self.mistake == "slope" else 0.2)
        x = self.mixed(h[:, source], scores, target, number).transpose(0, 1).flatten(1)
        x = x + self.weights["first_bias"]
        x = F.relu(x) if self.mistake == "activation" else F.elu(x)
        left, right = self.heads(x, "second_lin_l", 3), self.heads(x, "second_lin_r", 3)
        edges = self.heads(edge_attr, "second_lin_edge", 3)
        met = left[:, source] + right[:, target] + (0 if self.mistake == "edges" else edges)
        scores = (F.leaky_relu(met, 0.2) * self.weights["second_att"].transpose(0, 1)).sum(-1)
        y = self.mixed(left[:, source], scores, target, number)
        y = y.sum(0) if self.mistake == "heads" else y.mean(0)
        return y + self.weights["second_bias"]


def attended(mistake: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    own = shaken(Attended())
    return own, HeadsFirst(own, mistake).eval()


G = torch.Generator().manual_seed(1)
WHOLE = torch.tensor([0, 0, 0, 0, 1, 1, 1])
"""Of seven atoms, the molecule of each."""
BONDS = torch.nonzero((WHOLE[:, None] == WHOLE) & ~torch.eye(7, dtype=torch.bool)).T.contiguous()
LINKS = torch.nonzero((torch.rand(7, 7, generator=G) < 0.4) & ~torch.eye(7, dtype=torch.bool)).T.contiguous()
PAIRS = [
    Pair(
        "schnet, torch_geometric and schnetpack",
        ("torch_geometric", "schnetpack"),
        molecules,
        {
            "z": torch.tensor([6, 1, 1, 8, 7, 1, 1]),
            "pos": torch.randn(7, 3, generator=G),
            "batch": WHOLE,
        },
        {
            "cutoff": Mistake(["interactions.0.conv/mul.*"], ["2 times", "0.5", "twice", "factor"]),
            "width": Mistake(["distance_expansion/*"], ["times", "factor", "0.5"]),
            "shift": Mistake(["interactions.0.mlp.1/*", "interactions.0.conv.nn.1/*"], ["0.693147 is not subtracted"]),
            "direction": Mistake(["interactions.0.conv/index_select.*"], ["instead of", "index", "exchanged"]),
            "residual": Mistake(["./add.0"], ["not added", "residual", "missing"]),
            "filter": Mistake(["interactions.0.conv/mul.*"], ["missing", "not multiplied", "has mul"]),
            "readout": Mistake(["readout/*"], ["mean", "sum", "times", "div"]),
        },
    ),
    Pair(
        "convolutions, torch_geometric and a matrix",
        ("torch_geometric",),
        layers,
        {"x": torch.randn(7, 6, generator=G), "edge_index": LINKS, "batch": WHOLE},
        {
            "loops": Mistake(["gcn*"], ["has new_zeros", "eye", "add", "diagonal"]),
            "one side": Mistake(["gcn*"], ["rsqrt", "pow", ": 0 in the baseline, 1", "instead of gcn/mul.0"]),
            "direction": Mistake(["sage*"], ["transpos", "index", "exchanged"]),
            "mean": Mistake(["sage*"], ["not divided", "mean"]),
            "epsilon": Mistake(["gin/*"], ["the baseline has add", "eps", "add.0 is not multiplied"]),
            "activation": Mistake(["gin.nn.1/*"], ["silu"]),
            "pool": Mistake(["pool*"], ["divided", "times", "div"]),
        },
    ),
    Pair(
        "attention over neighbors, torch_geometric and heads first",
        ("torch_geometric",),
        attended,
        {
            "x": torch.randn(7, 6, generator=G),
            "edge_index": LINKS,
            "edge_attr": torch.randn(LINKS.shape[1], 3, generator=G),
        },
        {
            "sides": Mistake(["first*"], ["exchanged", "instead of", "att_src"]),
            "slope": Mistake(["first/leaky_relu.0"], ["slope"]),
            "normalized": Mistake(["first*"], ["not divided", "div"]),
            "activation": Mistake(["./elu.0"], ["relu"]),
            "interleaved": Mistake(["second/*"], ["interleaved", "heads", "view"]),
            "edges": Mistake(["second/*"], ["not added", "missing"]),
            "heads": Mistake(["second/*"], ["mean", "sum", "times"]),
        },
    ),
]
