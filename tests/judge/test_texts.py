from __future__ import annotations

import torch

from glassengine.judge.cases import Case
from glassengine.judge.texts import texts_of
from glassengine.program import load_model
from glassengine.testing import models


def test_each_step_reads_what_was_given_or_chosen_before() -> None:
    model = load_model(models.llama(num_hidden_layers=1))
    ids, mask = torch.tensor([[0, 7, 8], [4, 5, 6]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    case = Case("padded", 3, input_ids=ids, attention_mask=mask)
    alone = Case("by token", 4, input_ids=ids[1:], one_token=True)
    chosen = {"padded": [90, 91, 92], "by token": [1, 2, 30, 31]}
    assert texts_of(model, [case, alone, Case("plain", 1)], chosen) == {
        "padded": ("7 8", "90", "91"),
        "by token": ("4", "5", "6", "30"),
    }
    bundled = load_model("examples/tiny-llama")
    (text,) = texts_of(bundled, [Case("prompt", 1, input_ids=torch.tensor([[5, 6]]))], {})["prompt"]
    assert isinstance(text, str) and text != "5 6"
