"""`glass.sites(MODEL)`: the real table, without weights."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import glassengine as glass
from glassengine.errors import UnknownNameError
from glassengine.program import load_model
from glassengine.program.representation.program import Program
from glassengine.program.representation.stored import save_program
from glassengine.testing import models
from tests import children

Exported = Callable[[str], tuple[nn.Module, Program]]
Checkpoint = Callable[[str], Path]


# Tied weights: GPT-2 and Gemma3.
@pytest.mark.parametrize(
    "family",
    [
        family if family == "gemma3" else pytest.param(family, marks=pytest.mark.slow)
        for family in sorted(models.CAUSAL_LMS)
    ],
)
def test_the_table_is_that_of_the_real_export(exported: Exported, checkpoint: Checkpoint, family: str) -> None:
    _, program = exported(family)
    assert glass.sites(checkpoint(family)) == list(program.sites)


def test_tied_weights_are_one_parameter_either_way(checkpoint: Checkpoint) -> None:
    for weights in (True, False):
        model = load_model(checkpoint("gemma3"), weights=weights).module
        assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]


def test_a_pattern(checkpoint: Checkpoint) -> None:
    directory = checkpoint("llama")
    assert [site.name for site in glass.sites(directory, "layers.*.mlp")] == [
        "model.layers.0.mlp",
        "model.layers.1.mlp",
    ]


def test_the_sites_of_a_stored_program(exported: Exported, tmp_path: Path) -> None:
    _, program = exported("llama")
    save_program(program, tmp_path)
    (tmp_path / "program.pt2").unlink()  # names are enough
    assert glass.sites(tmp_path) == list(program.sites)
    with pytest.raises(UnknownNameError, match=r"nearest: model.layers.1.mlp\b"):
        glass.sites(tmp_path, "model.layers.1.mpl")
    assert [site.name for site in glass.sites(tmp_path, "mm_default")] == ["model.layers.0.self_attn.q_proj/linear.0"]


def test_the_sites_of_a_plain_module(tmp_path: Path) -> None:
    found = glass.sites("glassengine.testing.models:vision", inputs="glassengine.testing.models:vision_inputs")
    assert "stem/conv2d.0" in {site.name for site in found}


def test_no_memory_is_taken_for_weights(tmp_path: Path) -> None:
    """A model of 2 GB (one layer of 470 M float32 parameters), of which there is only a configuration."""
    import transformers

    sizes = {"hidden_size": 8192, "intermediate_size": 8192, "num_hidden_layers": 1, "num_attention_heads": 16}
    transformers.LlamaConfig(**sizes, num_key_value_heads=16, vocab_size=1000, dtype="float32").save_pretrained(
        tmp_path
    )
    code = f"""
        import resource, torch, warnings
        warnings.simplefilter("ignore")
        import glassengine as glass
        from glassengine.program import load_model
        torch.set_num_threads(2)
        glass.sites("glassengine.testing.models:vision", inputs="glassengine.testing.models:vision_inputs")
        glass.program  # imports are done
        import transformers.models.llama.modeling_llama
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = glass.sites({str(tmp_path)!r})
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(len(found), grown // 1024)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = children.run(command, imports=children.MODELS, timeout=600, check=True)
    num_sites, grown_mib = map(int, done.stdout.split()[-2:])
    assert num_sites > 50
    assert grown_mib < 600
