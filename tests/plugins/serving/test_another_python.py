"""`glass check MODEL --against PYTHON`: the model in another environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import transformers

import glassengine as glass
from glassengine.errors import UsageError

PYTHON = os.environ.get("GLASS_OTHER_TRANSFORMERS", "")
"""Interpreter that has transformers 4."""
_NET = """
import sys
import torch

OURS = "glassengine" in sys.modules

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.down(self.act(self.up(x)))

def same():
    return Net()

def changed():
    net = Net()
    net.act = torch.nn.GELU() if OURS else torch.nn.GELU(approximate="tanh")
    return net
"""


@pytest.fixture
def net(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(_NET)
    return tmp_path / "net.py"


def test_a_change_between_two_environments_is_named(net: Path) -> None:
    found = glass.check(f"{net}:changed", inputs={"x": torch.randn(3, 8)}, against=sys.executable)
    assert not found.ok
    assert found.first_divergence is not None
    assert found.first_divergence.site.startswith("act")
    assert "torch" in found.candidate
    assert found.notes[0].startswith("the environments differ: ")


@pytest.mark.slow
def test_the_same_environment_is_ok(net: Path) -> None:
    found = glass.check(f"{net}:same", inputs={"x": torch.randn(3, 8)}, against=sys.executable)
    assert found.ok
    assert not found.notes


def test_models_that_another_interpreter_cannot_load_are_refused(net: Path) -> None:
    with pytest.raises(UsageError, match="--against loads the model"):
        glass.check(torch.nn.Linear(2, 2), against=sys.executable)
    with pytest.raises(UsageError, match="--against runs BASELINE"):
        glass.check(f"{net}:same", candidate=f"{net}:changed", against=sys.executable)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="GLASS_OTHER_TRANSFORMERS names no interpreter")
def test_transformers_4_does_not_read_the_rope_of_transformers_5(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    rope = {"rope_type": "default", "rope_theta": 100.0}
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, rope_parameters=rope, **sizes)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    found = glass.check(tmp_path / "model", against=PYTHON, steps=1)
    assert found.first_divergence is not None
    assert found.first_divergence.site.startswith("model.rotary_emb")
    assert "theta" in found.first_divergence.hints[0].text
    assert any("transformers" in note for note in found.notes)
