"""Values over time: forecasts by patches, decisions by what was seen and done before."""

from __future__ import annotations

from typing import Any

import torch
from excerpt import excerpt
from pair import Mistake, Pair, copied, shaken
from torch import Tensor, nn

PATCHES = {
    "order": (
        "x = x.permute(0, 1, 3, 2)  # x: [bs x nvars x patch_num x patch_len]",
        "x = x.reshape(*x.shape[:2], x.shape[3], x.shape[2])",
    ),
    "causal": ("is_causal=False", "is_causal=True"),
    "residual": (
        "if not self.pre_norm:\n            src = self.norm_ffn(src)",
        "if not self.pre_norm:\n            src = self.norm_ffn(src2)",
    ),
    "unbiased": ("unbiased=False", "unbiased=True"),
    "last": ("x = x + self.mean\n", "x = x + x[:, -1:]\n"),
}


class Forecast(nn.Module):
    """PatchTST of neuralforecast; channels last outside, first inside."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.model = own

    def forward(self, past_values: Tensor) -> dict[str, Tensor]:
        return {"prediction_outputs": self.model(past_values.permute(0, 2, 1)).permute(0, 2, 1)}


class Predicted(nn.Module):
    """Of transformers, only what is predicted."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(self, past_values: Tensor) -> dict[str, Tensor]:
        return {"prediction_outputs": self.own(past_values=past_values).prediction_outputs}


def patches(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers import PatchTSTConfig, PatchTSTForPrediction

    norms = excerpt(
        "neuralforecast",
        "common/_modules.py",
        ["RevIN"],
        PATCHES[mistake] if mistake in ("unbiased", "last") else None,
    )
    theirs = excerpt(
        "neuralforecast",
        "models/patchtst.py",
        [
            "Transpose",
            "get_activation_fn",
            "positional_encoding",
            "PatchTST_backbone",
            "Flatten_Head",
            "TSTiEncoder",
            "TSTEncoder",
            "TSTEncoderLayer",
            "_MultiheadAttention",
            "_ScaledDotProductAttention",
        ],
        PATCHES[mistake] if mistake in ("order", "causal", "residual") else None,
        RevIN=norms.RevIN,
    )
    torch.manual_seed(0)
    config = PatchTSTConfig(
        num_input_channels=2,
        context_length=26,
        patch_length=6,
        patch_stride=4,
        num_hidden_layers=2,
        d_model=16,
        num_attention_heads=2,
        ffn_dim=24,
        prediction_length=5,
        scaling="std",
        loss="mse",
        share_embedding=True,
        use_cls_token=False,
        norm_type="batchnorm",
        pre_norm=False,
        do_mask_input=False,
        pooling_type=None,
        activation_function="gelu",
        channel_attention=False,
    )
    own = shaken(PatchTSTForPrediction(config))
    other = Forecast(
        theirs.PatchTST_backbone(
            2,
            1,
            26,
            5,
            6,
            4,
            n_layers=2,
            hidden_size=16,
            n_heads=2,
            linear_hidden_size=24,
            # With scores that are handed on there are scores at all; here none are.
            res_attention=False,
            affine=False,
        )
    ).eval()
    weights = own.state_dict()
    names = {
        "self_attn.W_Q": "self_attn.q_proj",
        "self_attn.W_K": "self_attn.k_proj",
        "self_attn.W_V": "self_attn.v_proj",
        "self_attn.to_out.0": "self_attn.out_proj",
        "norm_attn.1": "norm_sublayer1.batchnorm",
        "norm_ffn.1": "norm_sublayer3.batchnorm",
        "ff.0": "ff.0",
        "ff.3": "ff.3",
    }
    if mistake == "norms":
        names["norm_attn.1"], names["norm_ffn.1"] = names["norm_ffn.1"], names["norm_attn.1"]
    tensors: dict[str, Any] = dict(other.state_dict())
    tensors["model.backbone.W_pos"] = weights["model.encoder.positional_encoder.position_enc"]
    for part in ("weight", "bias", "running_mean", "running_var"):
        if part in ("weight", "bias"):
            tensors[f"model.backbone.W_P.{part}"] = weights[f"model.encoder.embedder.input_embedding.{part}"]
            tensors[f"model.head.linear.{part}"] = weights[f"head.projection.{part}"]
            if part == "weight" and mistake != "flattened":  # features first here, patches first there
                tensors["model.head.linear.weight"] = (
                    weights["head.projection.weight"].unflatten(1, (6, 16)).mT.flatten(1)
                )
        for number in range(2):
            for name, source in names.items():
                found = weights.get(f"model.encoder.layers.{number}.{source}.{part}")
                if found is not None:
                    tensors[f"model.backbone.encoder.layers.{number}.{name}.{part}"] = found
    copied(other, tensors)
    return Predicted(own).eval(), other


DECISIONS = {
    "causal": ("return torch.tril(mask)", "return torch.tril(mask, 1)"),
    "order": (
        "[rtg_embedding, state_embedding, action_embedding]",
        "[state_embedding, rtg_embedding, action_embedding]",
    ),
    "slice": ("self._output(h[:, 1::3, :])", "self._output(h[:, 2::3, :])"),
    "squashed": ("torch.tanh(self._output(h[:, 1::3, :]))", "self._output(h[:, 1::3, :])"),
    "time": (
        "rtg_embedding = self._rtg_embed(return_to_go) + position_embedding",
        "rtg_embedding = self._rtg_embed(return_to_go)",
    ),
}


class Trajectory(nn.Module):
    """The decision transformer of d3rlpy with the arguments of transformers; a mask of its own meaning."""

    def __init__(self, own: nn.Module, mistake: str) -> None:
        super().__init__()
        self.own, self.mistake = own, mistake

    def forward(
        self, states: Tensor, actions: Tensor, returns_to_go: Tensor, timesteps: Tensor, attention_mask: Tensor
    ) -> Tensor:
        hidden = attention_mask if self.mistake == "inverted" else 1 - attention_mask
        if self.mistake == "mask":
            hidden = torch.zeros_like(attention_mask)
        return self.own(states, actions, returns_to_go, timesteps, hidden)


class Actions(nn.Module):
    """Of transformers, what is to be done."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own

    def forward(
        self, states: Tensor, actions: Tensor, returns_to_go: Tensor, timesteps: Tensor, attention_mask: Tensor
    ) -> Tensor:
        return self.own(
            states=states,
            actions=actions,
            returns_to_go=returns_to_go,
            timesteps=timesteps,
            attention_mask=attention_mask,
        ).action_preds


def decisions(mistake: str) -> tuple[nn.Module, nn.Module]:
    from transformers import DecisionTransformerConfig, DecisionTransformerModel

    theirs = excerpt(
        "d3rlpy",
        "models/torch/transformers.py",
        [
            "create_attention_mask",
            "CausalSelfAttention",
            "MLP",
            "Block",
            "PositionEncoding",
            "SimplePositionEncoding",
            "GPT2",
            "_init_weights",
            "ContinuousDecisionTransformer",
        ],
        DECISIONS.get(mistake),
        # When it acts it leaves out the last action, and so has one token less than the other.
        ("if not self.training:", "if False:"),
        TorchObservation=Tensor,
        Encoder=nn.Module,
        Parameter=nn.Parameter,
    )
    torch.manual_seed(0)
    config = DecisionTransformerConfig(
        state_dim=5,
        act_dim=3,
        hidden_size=16,
        max_ep_len=20,
        n_layer=2,
        n_head=2,
        n_inner=64,
        activation_function="gelu",
        layer_norm_epsilon=0.003,
        vocab_size=1,
        n_positions=32,
        use_cache=False,
    )
    own = shaken(DecisionTransformerModel(config))
    own.encoder.wpe.weight.data.zero_()  # type: ignore[union-attr,operator]
    other = Trajectory(
        theirs.ContinuousDecisionTransformer(
            encoder=nn.Linear(5, 16),
            embed_size=16,
            position_encoding=theirs.SimplePositionEncoding(16, 20),
            action_size=3,
            num_heads=2,
            context_size=6,
            num_layers=2,
            attn_dropout=0.1,
            resid_dropout=0.1,
            embed_dropout=0.1,
            activation=nn.GELU("tanh") if mistake == "activation" else nn.GELU(),
        ),
        mistake,
    ).eval()
    weights = own.state_dict()
    tensors: dict[str, Any] = dict(other.state_dict())
    tensors["own._position_encoding._embed.weight"] = weights["embed_timestep.weight"]
    for part in ("weight", "bias"):
        for name, source in {
            "_encoder": "embed_state",
            "_action_embed": "embed_action",
            "_rtg_embed": "embed_return",
            "_embed_ln": "embed_ln",
            "_gpt2._layer_norm": "encoder.ln_f",
            "_output": "predict_action.0",
        }.items():
            tensors[f"own.{name}.{part}"] = weights[f"{source}.{part}"]
        for number in range(2):
            at, source = f"own._gpt2._transformer.{number}", f"encoder.h.{number}"
            turned = {
                name: weights[f"{source}.{name}.{part}"].t()  # [I, O] there, and a bias stays as it is
                for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
            }
            packed = turned["attn.c_attn"].chunk(3)
            for name, tensor in zip("qkv", packed, strict=True):
                tensors[f"{at}._attention._{name}.{part}"] = tensor
            tensors[f"{at}._attention._proj.{part}"] = turned["attn.c_proj"]
            tensors[f"{at}._mlp._l1.{part}"] = turned["mlp.c_fc"]
            tensors[f"{at}._mlp._l2.{part}"] = turned["mlp.c_proj"]
            tensors[f"{at}._layer_norm1.{part}"] = weights[f"{source}.ln_1.{part}"]
            tensors[f"{at}._layer_norm2.{part}"] = weights[f"{source}.ln_2.{part}"]
    copied(other, tensors)
    return Actions(own).eval(), other


G = torch.Generator().manual_seed(1)
PAIRS = [
    Pair(
        "patchtst, neuralforecast",
        ("neuralforecast",),
        patches,
        {"past_values": torch.randn(3, 26, 2, generator=G).cumsum(1)},
        {
            "unbiased": Mistake(["own.model.scaler.scaler/*"], ["var(", "unbiased", "correction", "ddof", "times"]),
            "order": Mistake(["own.model.encoder.embedder.input_embedding/*"], ["transpos", "permut", "order", "view"]),
            "causal": Mistake(["own.model.encoder.layers.0.self_attn/*"], ["causal"]),
            "residual": Mistake(["own.model.encoder.layers.0/*"], ["residual", "missing", "not added"]),
            "norms": Mistake(["own.model.encoder.layers.0.norm_sublayer1.batchnorm/*"], ["norm_sublayer3", "norm"]),
            "flattened": Mistake(
                ["own.head.projection/*", "own.head.flatten/*"], ["are interleaved", "order", "permut", "transpos"]
            ),
            "last": Mistake(["own/add.*"], ["reads", "operand", "not added"]),
        },
    ),
    Pair(
        "decision transformer, d3rlpy",
        ("d3rlpy",),
        decisions,
        {
            "states": torch.randn(2, 6, 5, generator=G),
            "actions": torch.randn(2, 6, 3, generator=G).tanh(),
            "returns_to_go": torch.randn(2, 6, 1, generator=G) * 3,
            "timesteps": torch.stack([torch.arange(4, 10), torch.arange(6)]),
            "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]),
        },
        {
            "mask": Mistake(["own.encoder.h.0.attn/*"], ["causal alone: the rest of the mask is missing"]),
            "inverted": Mistake(
                ["own.encoder.h.0.attn/*"],
                ["inverted"],
                known="rows that see no key have scores near -10000, rounded more than an explanation allows",
            ),
            "causal": Mistake(["own.encoder*mask*", "own.encoder.h.0.attn/*", "own.encoder/*"], ["mask", "causal"]),
            "order": Mistake(["own/stack.0"], ["order", "exchanged", "operand"]),
            "slice": Mistake(["own/select.*", "own.predict_action.0/*"], [": 1 in the baseline, 2"]),
            "squashed": Mistake(["own.predict_action.1/*"], ["tanh", "missing", "not applied"]),
            "time": Mistake(["own/add.*"], ["missing", "not added", "skipped", "operand"]),
            "activation": Mistake(["own.encoder.h.0.mlp.act/*"], ["tanh"]),
        },
    ),
]
