"""A port of a language model that is a plain module: no configuration, no cache, other names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glassengine.diagnose import check
from glassengine.errors import IncomparableError
from glassengine.testing import models


class Port(nn.Module):
    """Llama by hand: ids [B, S] -> logits [B, S, V]; heads stay behind the tokens."""

    def __init__(self, own: nn.Module, base: float | None = None) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({n.replace(".", "_"): p.detach().clone() for n, p in own.named_parameters()})
        self.number, self.epsilon = own.config.num_hidden_layers, own.config.rms_norm_eps  # type: ignore[union-attr]
        self.base = base or own.config.rope_parameters["rope_theta"]  # type: ignore[union-attr, index]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.epsilon).sqrt() * self.weights[name]

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[..., None, None].float() * self.base ** (-torch.arange(0, 16, 2).float() / 16)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def hidden(self, scores: Tensor, seen: Tensor) -> Tensor:
        return scores.masked_fill(~seen[:, None, None], -1e9)

    def run(self, ids: Tensor, seen: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(ids, self.weights["model_embed_tokens_weight"])
        for i in range(self.number):
            at = f"model_layers_{i}_"
            y = self.norm(x, at + "input_layernorm_weight")
            q, k, v = ((y @ self.weights[f"{at}self_attn_{p}_proj_weight"].t()).unflatten(-1, (-1, 16)) for p in "qkv")
            q, k = self.rotated(q, positions), self.rotated(k, positions)
            q = q.unflatten(2, (2, 2))
            scores = torch.einsum("bskgd,btkd->bkgst", q, k) / 4
            shares = self.hidden(scores, seen).softmax(-1)
            mixed = torch.einsum("bkgst,btkd->bskgd", shares, v).flatten(2)
            x = x + mixed @ self.weights[at + "self_attn_o_proj_weight"].t()
            y = self.norm(x, at + "post_attention_layernorm_weight")
            gate, up = (y @ self.weights[f"{at}mlp_{p}_proj_weight"].t() for p in ("gate", "up"))
            x = x + (gate * gate.sigmoid() * up) @ self.weights[at + "mlp_down_proj_weight"].t()
        return self.norm(x, "model_norm_weight") @ self.weights["lm_head_weight"].t()


class WithMask(Port):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        size = input_ids.shape[1]
        seen = torch.ones(size, size, dtype=torch.bool).tril() & attention_mask[:, None].bool()
        return self.run(input_ids, seen, torch.arange(size).expand(input_ids.shape))


class WithoutMask(Port):
    def forward(self, input_ids: Tensor) -> Tensor:
        size = input_ids.shape[1]
        seen = torch.ones(size, size, dtype=torch.bool).tril()[None]
        return self.run(input_ids, seen, torch.arange(size)[None])


def test_a_plain_port_is_judged_in_one_forward_of_the_prompts() -> None:
    torch.set_num_threads(1)
    own = models.llama(num_hidden_layers=1)
    found = check(own, candidate=WithMask(own))
    assert found.ok and found.verdict == "rounding" and found.coverage == 1.0
    assert {pair.step for pair in found.pairs} == {0, 1, 2}, "each prompt alone, and both padded"
    assert any(skipped.site == "decode steps" and "plain module" in skipped.reason for skipped in found.skipped)


def test_a_mask_that_the_inputs_leave_out_is_one_without_padding(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    own = models.llama(num_hidden_layers=1)
    torch.save({"input_ids": torch.arange(2, 16).view(2, 7)}, tmp_path / "ids.pt")
    found = check(own, candidate=WithMask(own), inputs=str(tmp_path / "ids.pt"))
    assert found.ok and found.coverage == 1.0


@pytest.mark.slow
def test_a_mistake_in_a_plain_port_is_found_in_both_directions() -> None:
    torch.set_num_threads(1)
    own = models.llama(num_hidden_layers=1)
    found = check(own, candidate=WithoutMask(own, base=77.0))
    assert not found.ok and found.first_divergence is not None
    assert {pair.step for pair in found.pairs} == {0, 1}, "no padding where no mask is taken"
    assert not any(pair.verdict == "wrong" and "embed" in pair.site for pair in found.pairs)


@pytest.fixture
def padded(tmp_path: Path) -> str:
    """Two prompts together: the built-in ones are three cases."""
    ids, mask = torch.arange(2, 16).view(2, 7), torch.ones(2, 7, dtype=torch.int64)
    ids[1, :3] = mask[1, :3] = 0
    torch.save({"input_ids": ids, "attention_mask": mask}, tmp_path / "padded.pt")
    return str(tmp_path / "padded.pt")


class WithAlternatePairs(WithMask):
    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[..., None, None].float() * self.base ** (-torch.arange(0, 16, 2).float() / 16)
        a, b = x[..., 0::2], x[..., 1::2]
        turned = torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1).flatten(-2)
        return turned.transpose(1, 2).contiguous().transpose(1, 2)


class WithPositionsOfTheMask(WithMask):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        seen = torch.ones(2 * input_ids.shape[1:], dtype=torch.bool).tril() & attention_mask[:, None].bool()
        return self.run(input_ids, seen, (attention_mask.cumsum(-1) - 1).clamp(min=0))


@pytest.mark.slow
def test_queries_and_keys_that_are_rotated_wrong_together_are_the_first_that_is_wrong(padded: str) -> None:
    """An attention follows from neither of them alone; the line is that of the helper, and not of the forward."""
    torch.set_num_threads(1)
    own = models.llama(num_hidden_layers=1)
    first = check(own, candidate=WithAlternatePairs(own), inputs=padded).first_divergence
    assert first is not None and first.site == "model.layers.0.self_attn/add.0"
    assert first.source is not None and "q_embed = (q * cos)" in first.source
    assert first.candidate_source is not None and "torch.stack([a * angle.cos()" in first.candidate_source


def test_positions_that_begin_behind_the_padding_are_no_mistake(padded: str) -> None:
    torch.set_num_threads(1)
    own = models.llama(num_hidden_layers=1)
    found = check(own, candidate=WithPositionsOfTheMask(own), inputs=padded)
    assert found.ok and found.verdict == "rounding" and found.coverage == 1.0


class WithAMaskOfNumbers(WithPositionsOfTheMask):
    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().rotated(x, positions).transpose(1, 2).contiguous().transpose(1, 2)

    def hidden(self, scores: Tensor, seen: Tensor) -> Tensor:
        near = seen & torch.ones(seen.shape[1:], dtype=torch.bool).triu(-3)
        return scores + torch.where(near[:, None], 0.0, -1e9)[:, None]


@pytest.mark.slow
def test_a_mask_of_numbers_is_no_counterpart_of_one_of_bools() -> None:
    torch.set_num_threads(1)
    own = models.llama(num_hidden_layers=1)
    first = check(own, candidate=WithAMaskOfNumbers(own)).first_divergence
    assert first is not None and first.site == "model.layers.0.self_attn/scaled_dot_product_attention.0"


class WithWrongSum(WithMask):
    def run(self, ids: Tensor, seen: Tensor, positions: Tensor) -> Tensor:
        return super().run(ids, seen & (torch.arange(seen.shape[-1]) != 2), positions)


@pytest.mark.slow
def test_a_region_that_ends_in_a_view_is_named_by_what_computes(padded: str) -> None:
    torch.set_num_threads(1)
    own = models.llama(num_hidden_layers=1)
    first = check(own, candidate=WithWrongSum(own), inputs=padded).first_divergence
    assert first is not None and first.site == "model.layers.0.self_attn/scaled_dot_product_attention.0"
    assert first.candidate_site == "./einsum.1"
    assert first.candidate_source is not None and "bkgst,btkd->bskgd" in first.candidate_source


def test_a_module_that_takes_no_tokens_is_refused_with_what_it_takes() -> None:
    try:
        check(models.llama(), candidate=models.vision())
    except IncomparableError as error:
        assert "pixel_values" in str(error) and "input_ids" in str(error) and "name the arguments" in str(error)
    else:
        raise AssertionError("vision was taken for a language model")
