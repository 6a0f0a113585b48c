"""What is called after a model's own forward, with its result, is a part of that step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from glassengine.capture.runs.record import record
from glassengine.recording.read.reader import Recording


class Served(nn.Module):
    """Gives hidden states; logits of some rows are computed by who calls it, as serving engines do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        hidden: Tensor = self.layer(self.embed(input_ids)).tanh()
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits


def serve(model: Served, steps: int = 3) -> list[Tensor]:
    found = []
    ids = torch.tensor([1, 2, 3])
    positions = torch.arange(3)
    with torch.inference_mode():
        for _ in range(steps):
            hidden = model(ids, positions)
            found.append(model.compute_logits(hidden[[-1]]))
            ids, positions = found[-1].argmax(-1), positions[-1:] + 1
    return found


def test_f43_logits_after_the_forward_belong_to_its_step(tmp_path: Path) -> None:
    model = Served()
    with record(model, tmp_path / "r"):
        found = serve(model)
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0, 1, 2] and opened.complete
    for step, logits in enumerate(found):
        assert opened.sites(step)[-3:] == [".", "lm_head:in[0]", "lm_head"]
        assert torch.equal(opened.tensor("lm_head", step), logits)
    # One sequence, its tokens in one row.
    assert opened.metadata["token_ids"] == [[1, 2, 3, *(int(logits.argmax()) for logits in found[:-1])]]


def test_an_encoder_still_belongs_to_the_step_that_follows(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.spare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.decoder(x)

    model, x = Two(), torch.randn(3, 4)
    with record(model, tmp_path / "r"):
        model(model.encoder(x))
        # Another sample: the encoder came ahead once, and gets nothing that came out of a forward.
        model(model.encoder(x + 1))
        # Of what came out, but not its rows.
        model.spare(torch.ones(3, 4))
        model(x)
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0, 1, 2]
    assert [site for site in opened.sites(1) if ":" not in site] == ["encoder", "decoder", "."]
    assert [site for site in opened.sites(2) if ":" not in site] == ["spare", "decoder", "."]


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_what_fails_after_the_forward(is_interrupted: bool, tmp_path: Path) -> None:
    model = Served()
    kind = KeyboardInterrupt if is_interrupted else ValueError

    def fail(*_: object) -> None:
        raise kind("planted")

    with record(model, tmp_path / "r"):
        serve(model, 1)
        handle = model.lm_head.register_forward_hook(fail)
        with pytest.raises(kind):
            serve(model, 1)
        handle.remove()
        serve(model, 1)
    opened = Recording.open(tmp_path / "r")
    assert opened.steps == [0, 1, 2] and "lm_head" in opened.sites(2) and "." in opened.sites(1)
