"""What people click and what tables hold: packages for recommendation and tabular data beside each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional

import torch
from excerpt import excerpt
from pair import Mistake, Pair, copied, shaken
from torch import Tensor, nn

SASREC = {
    "causal": ("if not bidirectional:", "if bidirectional:"),
    "last": ("item_seq_len - 1)", "item_seq_len - 2)"),
    "scale": ("math.sqrt(self.attention_head_size)", "math.sqrt(self.all_head_size)"),
    "activation": (
        "x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))",
        "0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))",
    ),
    "positions": ("            item_seq.size(1), dtype", "            1, 1 + item_seq.size(1), dtype"),
}


class Causal(nn.Module):
    """SASRec as the BERT of transformers: positions up to the one asked for."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=30,
            hidden_size=24,
            num_hidden_layers=2,
            num_attention_heads=3,
            intermediate_size=40,
            max_position_embeddings=9,
            type_vocab_size=1,
            is_decoder=True,
            use_cache=False,
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, item_seq: Tensor, item_seq_len: Tensor) -> Tensor:
        found = self.bert(input_ids=item_seq, attention_mask=(item_seq != 0).long()).last_hidden_state
        return found[torch.arange(len(found)), item_seq_len - 1]


def sasrec(mistake: str) -> tuple[nn.Module, nn.Module]:
    def edit(*names: str) -> tuple[str, str] | None:
        return SASREC[mistake] if mistake in names else None

    layers = excerpt(
        "recbole",
        "model/layers.py",
        ["MultiHeadAttention", "FeedForward", "TransformerLayer", "TransformerEncoder"],
        edit("scale", "activation"),
    )
    base = excerpt(
        "recbole",
        "model/abstract_recommender.py",
        ["SequentialRecommender"],
        edit("causal"),
        AbstractRecommender=nn.Module,
        ModelType=SimpleNamespace(SEQUENTIAL=0),
    )
    SASRec = excerpt(
        "recbole",
        "model/sequential_recommender/sasrec.py",
        ["SASRec"],
        edit("last", "positions"),
        SequentialRecommender=base.SequentialRecommender,
        TransformerEncoder=layers.TransformerEncoder,
        BPRLoss=None,
    ).SASRec
    fields = ("USER_ID_FIELD", "ITEM_ID_FIELD", "LIST_SUFFIX", "ITEM_LIST_LENGTH_FIELD", "NEG_PREFIX")
    config = dict.fromkeys(fields, "") | {
        "MAX_ITEM_LIST_LENGTH": 9,
        "device": "cpu",
        "n_layers": 2,
        "n_heads": 3,
        "hidden_size": 24,
        "inner_size": 40,
        "hidden_dropout_prob": 0.1,
        "attn_dropout_prob": 0.1,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-3 if mistake == "epsilon" else 1e-12,
        "initializer_range": 0.02,
        "loss_type": "CE",
    }
    torch.manual_seed(0)
    theirs = shaken(SASRec(config, SimpleNamespace(num=lambda name: 30)))
    weights = theirs.state_dict()
    ours = {
        "embeddings.word_embeddings.weight": weights["item_embedding.weight"],
        "embeddings.position_embeddings.weight": weights["position_embedding.weight"],
        "embeddings.token_type_embeddings.weight": torch.zeros(1, 24),
    }
    names = {
        "attention.self.query": "multi_head_attention.query",
        "attention.self.key": "multi_head_attention.key",
        "attention.self.value": "multi_head_attention.value",
        "attention.output.dense": "multi_head_attention.dense",
        "attention.output.LayerNorm": "multi_head_attention.LayerNorm",
        "intermediate.dense": "feed_forward.dense_1",
        "output.dense": "feed_forward.dense_2",
        "output.LayerNorm": "feed_forward.LayerNorm",
    }
    for part in ("weight", "bias"):
        ours[f"embeddings.LayerNorm.{part}"] = weights[f"LayerNorm.{part}"]
        for number in range(2):
            for name, other in names.items():
                ours[f"encoder.layer.{number}.{name}.{part}"] = weights[f"trm_encoder.layer.{number}.{other}.{part}"]
    baseline = Causal().eval()
    copied(baseline.bert, ours)
    if mistake == "exchanged":
        own = theirs.trm_encoder.layer[1].multi_head_attention  # type: ignore[union-attr,index]
        own.key, own.value = own.value, own.key  # type: ignore[union-attr]
    return baseline, theirs


CROSS = {
    "activation": (
        "torch.tanh(v_x)\n                v_x = torch.matmul(self.C",
        "torch.relu(v_x)\n                v_x = torch.matmul(self.C",
    ),
    "softmax": ("gating_score_of_experts.softmax(1)", "gating_score_of_experts.softmax(0)"),
    "bias": ("dot_ = uv_x + self.bias[i]", "dot_ = uv_x"),
    "transposed": ("self.C_list[i][expert_id], v_x", "self.C_list[i][expert_id].t(), v_x"),
    "residual": ("x_l = moe_out + x_l ", "x_l = moe_out + x_0 "),
}


class Tables(nn.Module):
    """Ids and numbers of one matrix, looked up in bags, as torchrec has it."""

    def __init__(self, cross: nn.Module, deep: nn.Module) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 4, mode="sum") for _ in range(3))
        self.cross, self.deep, self.over = cross, deep, nn.Linear(14 + 8, 1)

    def forward(self, X: Tensor) -> Tensor:  # as deepctr calls it
        ids = X[:, :3].long()
        x = torch.cat([*(bag(ids[:, at : at + 1]) for at, bag in enumerate(self.bags)), X[:, 3:]], 1)
        return torch.sigmoid(self.over(torch.cat([self.deep(x), self.cross(x)], 1))).squeeze(1)


class Columns(nn.Module):
    """Column by column, as deepctr has it."""

    def __init__(self, cross: nn.Module, deep: nn.Module, out: nn.Module) -> None:
        super().__init__()
        self.embedding_dict = nn.ModuleDict({f"C{at}": nn.Embedding(20, 4) for at in range(3)})
        self.crossnet, self.dnn, self.out = cross, deep, out
        self.dnn_linear = nn.Linear(8 + 14, 1, bias=False)

    def forward(self, X: Tensor) -> Tensor:
        rows = [own(X[:, at : at + 1].long()) for at, own in enumerate(self.embedding_dict.values())]
        x = torch.cat([torch.flatten(torch.cat(rows, dim=-1), start_dim=1), X[:, 3:]], dim=-1)
        stack = torch.cat((self.crossnet(x), self.dnn(x)), dim=-1)
        return self.out(self.dnn_linear(stack)).squeeze(-1)


def crossing(mistake: str) -> tuple[nn.Module, nn.Module]:
    own = excerpt("torchrec", "modules/crossnet.py", ["LowRankMixtureCrossNet"])
    helpers = excerpt("torchrec", "modules/utils.py", ["extract_module_or_tensor_callable"])
    deep = excerpt(
        "torchrec",
        "modules/mlp.py",
        ["MLP", "Perceptron"],
        SwishLayerNorm=None,
        extract_module_or_tensor_callable=helpers.extract_module_or_tensor_callable,
    )
    found = excerpt("deepctr_torch", "layers/activation.py", ["activation_layer", "Identity", "Dice"])
    core = excerpt(
        "deepctr_torch", "layers/core.py", ["DNN", "PredictionLayer"], activation_layer=found.activation_layer
    )
    other = excerpt("deepctr_torch", "layers/interaction.py", ["CrossNetMix"], CROSS.get(mistake))
    torch.manual_seed(0)
    ours = shaken(Tables(own.LowRankMixtureCrossNet(14, 2, 3, 4, torch.tanh), deep.MLP(14, [10, 8])))
    theirs = Columns(other.CrossNetMix(14, 4, 3, 2), core.DNN(14, [10, 8]), core.PredictionLayer()).eval()
    weights = ours.state_dict()

    def stacked(name: str) -> Tensor:
        return torch.stack([weights[f"cross.{name}.{at}"] for at in range(2)])

    over = weights["over.weight"]
    tensors = {
        "crossnet.U_list": stacked("U_kernels"),
        "crossnet.V_list": stacked("V_kernels").mT,
        "crossnet.C_list": stacked("C_kernels"),
        "crossnet.bias": stacked("bias"),
        "out.bias": weights["over.bias"],
        "dnn_linear.weight": over if mistake == "order" else torch.cat([over[:, 8:], over[:, :8]], 1),
    }
    for at in range(3):
        tensors[f"crossnet.gating.{at}.weight"] = weights[f"cross.gates.{at}.weight"]
        tensors[f"embedding_dict.C{at}.weight"] = weights[f"bags.{at}.weight"]
    for at in range(2):
        for part in ("weight", "bias"):
            tensors[f"dnn.linears.{at}.{part}"] = weights[f"deep._mlp.{at}._linear.{part}"]
    copied(theirs, tensors)
    return ours, theirs


INTEREST = {
    "padding": ("keys_masks = keys_masks < keys", "keys_masks = keys_masks <= keys"),
    "difference": ("queries - user_behavior, queries", "user_behavior - queries, queries"),
    "mask": ("(-2 ** 32 + 1)", "0"),
    "activation": ("fc = self.activation_layers[i](fc)", "fc = torch.tanh(fc)"),
}


class Asked(nn.Module):
    """Attention over a history of items, by recbole."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.items, self.attention, self.over = nn.Embedding(40, 6, padding_idx=0), layer, nn.Linear(12, 1)

    def forward(self, item: Tensor, history: Tensor, length: Tensor) -> dict[str, Tensor]:
        query, keys = self.items(item), self.items(history)
        interest = self.attention(query, keys, length).squeeze(1)
        return {"score": self.over(torch.cat([interest, query], -1)).squeeze(-1), "interest": interest}


class Pooled(nn.Module):
    """The same by deepctr: of three dimensions throughout."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding, self.attention, self.dnn_linear = nn.Embedding(40, 6), layer, nn.Linear(12, 1)

    def forward(self, item: Tensor, history: Tensor, length: Tensor) -> dict[str, Tensor]:
        query = self.embedding(item.unsqueeze(1))
        hist = self.attention(query, self.embedding(history), length.unsqueeze(1))
        deep = torch.flatten(torch.cat([hist, query], dim=-1), start_dim=1)
        return {"score": self.dnn_linear(deep).reshape(-1), "interest": hist.squeeze(1)}


def interest(mistake: str) -> tuple[nn.Module, nn.Module]:
    def edit(*names: str) -> tuple[str, str] | None:
        return INTEREST[mistake] if mistake in names else None

    own = excerpt("recbole", "model/layers.py", ["MLPLayers", "SequenceAttLayer", "activation_layer"])
    found = excerpt("deepctr_torch", "layers/activation.py", ["activation_layer", "Identity", "Dice"])
    core = excerpt(
        "deepctr_torch",
        "layers/core.py",
        ["DNN", "LocalActivationUnit"],
        edit("difference", "activation"),
        activation_layer=found.activation_layer,
    )
    other = excerpt(
        "deepctr_torch",
        "layers/sequence.py",
        ["AttentionSequencePoolingLayer"],
        edit("padding", "mask"),
        LocalActivationUnit=core.LocalActivationUnit,
    )
    torch.manual_seed(0)
    layer = own.SequenceAttLayer(torch.arange(7)[None], (24, 10, 8), softmax_stag=True, return_seq_weight=False)
    ours = shaken(Asked(layer))
    pooling = other.AttentionSequencePoolingLayer(
        (10, 8), weight_normalization=mistake != "normalized", embedding_dim=6
    )
    theirs = Pooled(pooling).eval()
    weights = ours.state_dict()
    tensors = {"embedding.weight": weights["items.weight"]}
    for part in ("weight", "bias"):
        tensors[f"dnn_linear.{part}"] = weights[f"over.{part}"]
        # The scale is in the weights here.
        tensors[f"attention.local_att.dense.{part}"] = weights[f"attention.dense.{part}"] / 6**0.5
        for at, number in enumerate((1, 4)):
            name = f"attention.att_mlp_layers.mlp_layers.{number}.{part}"
            tensors[f"attention.local_att.dnn.linears.{at}.{part}"] = weights[name]
    copied(theirs, tensors)
    return ours, theirs


TOKENS = {
    "first": ("x = X + self.attn(X)", "x = self.attn_normadd(X, self.attn)"),
    "outside": ("return X + self.dropout(sublayer(self.ln(X)))", "return X + self.ln(self.dropout(sublayer(X)))"),
    "interleaved": ('q, "b s (h d) -> b h s d", h=self.n_heads', 'q, "b s (d h) -> b h s d", h=self.n_heads'),
    "scale": ("q, k) / math.sqrt(self.head_dim)", "q, k) / math.sqrt(X.shape[-1])"),
}


class Rows(nn.Module):
    """FT-Transformer of pytorch-widedeep, which embeds elsewhere and reads the whole last block."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.zeros(1, 1, 16))
        self.cont_weight, self.cont_bias = (nn.Parameter(torch.zeros(1, 4, 16)) for _ in range(2))
        self.cat = nn.Embedding(11, 16)
        self.cat_bias = nn.Parameter(torch.zeros(1, 2, 16))
        self.register_buffer("first", torch.tensor([0, 5]))
        self.encoder = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x_cont: Tensor, x_cat: Tensor) -> Tensor:
        numbers = self.cont_weight * x_cont.unsqueeze(2) + self.cont_bias
        words = self.cat(x_cat + self.first) + self.cat_bias
        x = torch.cat([self.cls.repeat(len(x_cont), 1, 1), numbers, words], 1)
        return self.head(self.encoder(x)[:, 0])


def rows(mistake: str) -> tuple[nn.Module, nn.Module]:
    from rtdl_revisiting_models import FTTransformer

    # What the package calls ReGLU is its GEGLU: right is what the other package has.
    right = (
        "class REGLU(nn.Module):\n    def forward(self, x):\n        x, gates = x.chunk(2, dim=-1)\n"
        "        return x * F.gelu(gates)"
    )
    gates = excerpt(
        "pytorch_widedeep",
        "models/_get_activation_fn.py",
        ["GEGLU", "REGLU", "get_activation_fn"],
        None if mistake == "gate" else (right, right.replace("gelu", "relu")),
    )
    layers = excerpt(
        "pytorch_widedeep",
        "models/tabular/transformers/_attention_layers.py",
        ["FeedForward", "NormAdd", "LinearAttentionLinformer"],
        TOKENS[mistake] if mistake in ("outside", "interleaved", "scale") else None,
        get_activation_fn=gates.get_activation_fn,
        **KINDS,
    )
    blocks = excerpt(
        "pytorch_widedeep",
        "models/tabular/transformers/_encoders.py",
        ["FTTransformerEncoder"],
        TOKENS[mistake] if mistake == "first" else None,
        FeedForward=layers.FeedForward,
        NormAdd=layers.NormAdd,
        LinearAttentionLinformer=layers.LinearAttentionLinformer,
        **KINDS,
    )
    torch.manual_seed(0)
    ours = shaken(
        FTTransformer(
            n_cont_features=4,
            cat_cardinalities=[5, 6],
            d_out=3,
            n_blocks=2,
            d_block=16,
            attention_n_heads=2,
            attention_dropout=0.1,
            ffn_d_hidden=20,
            ffn_d_hidden_multiplier=None,
            ffn_dropout=0.1,
            residual_dropout=0.1,
            linformer_kv_compression_ratio=0.5,
            linformer_kv_compression_sharing="headwise",
        )
    )
    made = [
        blocks.FTTransformerEncoder(16, 7, 2, True, 0.1, 0.1, 1.25, 0.5, False, "reglu", first_block=at == 0)
        for at in range(2)
    ]
    theirs = Rows(made).eval()
    weights = ours.state_dict()
    tensors = {
        "cls": weights["cls_embedding.weight"][None, None],
        "cont_weight": weights["cont_embeddings.weight"][None],
        "cont_bias": weights["cont_embeddings.bias"][None],
        "cat.weight": torch.cat([weights[f"cat_embeddings.embeddings.{at}.weight"] for at in range(2)]),
        "cat_bias": weights["cat_embeddings.bias"][None],
        "first": theirs.first,
    }
    for part in ("weight", "bias"):
        tensors[f"head.0.{part}"] = weights[f"backbone.output.normalization.{part}"]
        tensors[f"head.2.{part}"] = weights[f"backbone.output.linear.{part}"]
        for at in range(2):
            ours_at, theirs_at = f"backbone.blocks.{at}", f"encoder.{at}"
            order = "kqv" if mistake == "packed" else "qkv"
            tensors[f"{theirs_at}.attn.qkv_proj.{part}"] = torch.cat(
                [weights[f"{ours_at}.attention.W_{name}.{part}"] for name in order]
            )
            for name, other in {
                "attn.out_proj": "attention.W_out",
                "ff.w_1": "ffn.linear1",
                "ff.w_2": "ffn.linear2",
                "ff_normadd.ln": "ffn_normalization",
                "attn_normadd.ln": "attention_normalization",
            }.items():
                unused = theirs.state_dict()[f"{theirs_at}.{name}.{part}"]
                tensors[f"{theirs_at}.{name}.{part}"] = weights.get(f"{ours_at}.{other}.{part}", unused)
    for at in range(2):
        tensors[f"encoder.{at}.attn.E"] = weights[f"backbone.blocks.{at}.attention.key_compression.weight"].T
        tensors[f"encoder.{at}.attn.F"] = weights[f"backbone.blocks.{at}.attention.value_compression.weight"].T
    copied(theirs, tensors)
    return ours, theirs


KINDS: dict[str, Any] = {"Tensor": Tensor, "Optional": Optional, "Tuple": tuple}
G = torch.Generator().manual_seed(1)
IDS = torch.randint(1, 30, (3, 7), generator=G)
LENGTHS = torch.tensor([7, 4, 6])
WATCHED = IDS.masked_fill(torch.arange(7) >= LENGTHS[:, None], 0)
PAIRS = [
    Pair(
        "sasrec, recbole",
        ("recbole",),
        sasrec,
        {"item_seq": WATCHED, "item_seq_len": LENGTHS},
        {
            "causal": Mistake(["bert.encoder.layer.0.attention.self/*", "bert*/*mask*"], ["causal", "mask"]),
            "last": Mistake(["./sub.0", "./index.0"], ["index", "position", "sub", "off by", "shift"]),
            "scale": Mistake(["bert.encoder.layer.0.attention.self/*"], ["scale", "factor", "times"]),
            "activation": Mistake(["bert.encoder.layer.0.intermediate.intermediate_act_fn/*"], ["tanh"]),
            "positions": Mistake(
                ["bert.embeddings.position_embeddings/*", "bert.embeddings/add.1"],
                ["position_embeddings.weight is moved"],
            ),
            "epsilon": Mistake(["bert.embeddings.LayerNorm/*"], ["eps"]),
            "exchanged": Mistake(["bert.encoder.layer.1.attention.self*"], ["value", "exchanged"]),
        },
    ),
    Pair(
        "deep and cross, torchrec and deepctr",
        ("torchrec", "deepctr_torch"),
        crossing,
        {"X": torch.cat([torch.randint(20, (6, 3), generator=G).float(), torch.randn(6, 2, generator=G)], 1)},
        {
            "activation": Mistake(["cross/tanh.0"], ["relu"]),
            "softmax": Mistake(["cross/softmax.0"], ["axis", "dim"]),
            "bias": Mistake(["cross/add.0"], ["bias", "missing", "not added"]),
            "transposed": Mistake(["cross/matmul.*"], ["transpos"]),
            "residual": Mistake(["cross/add.*"], ["instead of"]),
            "order": Mistake(["over/*", "./cat.1"], ["order", "parts 0 and 1 of cat are exchanged"]),
        },
    ),
    Pair(
        "interest, recbole and deepctr",
        ("recbole", "deepctr_torch"),
        interest,
        {
            "item": torch.randint(1, 40, (3,), generator=G),
            "history": torch.randint(1, 40, (3, 7), generator=G),
            "length": LENGTHS,
        },
        {
            "padding": Mistake(["attention/masked_fill.0", "attention/ge.0", "attention/div.0"], ["a position sees"]),
            "difference": Mistake(["attention/sub.0"], ["sign", "exchanged", "order", "negat"]),
            "normalized": Mistake(
                ["attention/softmax.0", "attention/masked_fill.0"], ["softmax", "missing", "skipped", "not applied"]
            ),
            "mask": Mistake(["attention/masked_fill.0", "attention/div.0"], ["mask", "fill"]),
            "activation": Mistake(["attention.att_mlp_layers.mlp_layers.2/*"], ["tanh"]),
        },
    ),
    Pair(
        "ft-transformer, rtdl and widedeep",
        ("rtdl_revisiting_models", "pytorch_widedeep", "einops"),
        rows,
        {"x_cont": torch.randn(5, 4, generator=G), "x_cat": torch.randint(5, (5, 2), generator=G)},
        {
            "gate": Mistake(["backbone.blocks.0.ffn.activation/*"], ["gelu"]),
            "first": Mistake(["backbone.blocks.0.attention*", "backbone/add.0"], ["norm"]),
            "outside": Mistake(["backbone.blocks.0.ffn_normalization/*"], ["norm", "reads", "order"]),
            "interleaved": Mistake(["backbone.blocks.0.attention/*"], ["interleaved", "heads"]),
            "scale": Mistake(["backbone.blocks.0.attention/*"], ["divisor"]),
            "packed": Mistake(["backbone.blocks.0.attention.*"], ["instead of", "of backbone.blocks.0.attention.W_k"]),
        },
    ),
]
