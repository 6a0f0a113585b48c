"""The program of a causal language model is the model: values of every step, of every module, whatever the family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from glassengine.capture.observers import observing, run_program
from glassengine.errors import UsageError
from glassengine.program.export.export import export_causal_lm
from glassengine.program.kinds.causal_lm import exportable_experts
from glassengine.program.representation.outputs import DerivedValues, add_outputs
from glassengine.program.representation.program import Program
from glassengine.sites import Site
from glassengine.testing import models

Exported = Callable[[str], tuple[nn.Module, Program]]

FAMILIES = [
    pytest.param(family, marks=pytest.mark.slow) if family == "phi3" else family for family in sorted(models.CAUSAL_LMS)
]
PADDED = {"batch": 2, "left_padding": 3}
CACHE_LENGTH = 20


class Steps:
    """Prefill and decode steps of one batch, on the untouched model with its own cache and masks, and on the program.

    Legend: B batch, S new tokens, T cache length.
    """

    def __init__(self, model: nn.Module, program: Program, *, batch: int, left_padding: int, prompt: int) -> None:
        assert program.layout is not None
        self.model: Any = model
        self.program = program
        self.cache = DynamicCache(config=self.model.config)
        self.kv = program.layout.allocate(batch, CACHE_LENGTH, torch.float32)
        self.tokens = torch.randint(3, 250, (batch, prompt), generator=torch.Generator().manual_seed(1))
        self.valid = torch.zeros(batch, CACHE_LENGTH, dtype=torch.int64)
        self.left_padding = left_padding
        self.start = 0

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the inputs of the coming step, cache included."""
        slots = torch.arange(self.start, self.start + self.tokens.shape[1])
        self.valid[:, slots] = 1
        self.valid[1:, : self.left_padding] = 0
        positions = (self.valid.cumsum(-1) - 1).clamp(min=0)[:, slots]
        named = {"input_ids": self.tokens, "attention_mask": self.valid.clone(), "position_ids": positions}
        return {**named, "cache_position": slots, **self.kv}

    def reference(self, inputs: dict[str, torch.Tensor], observe: Any = None) -> torch.Tensor:
        """Return the logits of the untouched model."""
        seen = int(inputs["cache_position"][-1]) + 1
        with torch.no_grad(), observing(self.model, observe or (lambda site, tensor: None)):
            result = self.model(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"][:, :seen],
                position_ids=inputs["position_ids"],
                past_key_values=self.cache,
                use_cache=True,
            )
        return result.logits

    def advance(self, results: dict[str, torch.Tensor], logits: torch.Tensor) -> None:
        """Take the program's caches and the reference's next token into the next step."""
        self.kv = {past: results[present] for past, present in self.program.caches.items()}
        self.start += self.tokens.shape[1]
        self.tokens = logits[:, -1].argmax(-1, keepdim=True)


def run_steps(model: nn.Module, program: Program, *, batch: int = 1, left_padding: int = 0, prompt: int = 9) -> None:
    steps = Steps(model, program, batch=batch, left_padding=left_padding, prompt=prompt)
    for _ in range(4):
        inputs = steps.inputs()
        before = {name: tensor.clone() for name, tensor in inputs.items()}
        results = run_program(program, inputs)
        assert all(torch.equal(inputs[name], before[name]) for name in inputs), "the interpreter changed an input"
        logits = steps.reference(inputs)
        real = steps.valid[:, inputs["cache_position"]].bool()
        torch.testing.assert_close(results["logits"][real], logits[real], rtol=1e-5, atol=2e-5)
        steps.advance(results, logits)


# The prompt of 13 is longer than the sliding window of Gemma3 (8), so that its mask matters from the prefill on.
@pytest.mark.parametrize("scenario", [{}, PADDED, {"prompt": 13, **PADDED}], ids=["one", "padded", "long"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_equal_the_untouched_model(
    exported: Exported, family: str, scenario: dict[str, int]
) -> None:
    run_steps(*exported(family), **scenario)


def test_the_sliding_window_is_in_effect(exported: Exported) -> None:
    """Planted: with a window that covers the prompt the same weights give other logits."""
    model = models.gemma3(sliding_window=64)
    with pytest.raises(AssertionError):
        run_steps(model, exported("gemma3")[1], prompt=13)


def module_sites(program: Program) -> list[Site]:
    return [site for site in program.sites if site.kind == "module" and ":in" not in site.name]


@pytest.mark.parametrize("family", FAMILIES)
def test_module_outputs_are_those_that_hooks_see(exported: Exported, family: str) -> None:
    """Without padding and with a cache as long as the prompt, every module has the same output on both sides."""
    model, program = exported(family)
    assert program.layout is not None
    steps = Steps(model, program, batch=2, left_padding=0, prompt=CACHE_LENGTH)
    inputs = steps.inputs()
    eager: dict[str, torch.Tensor] = {}
    # By default experts see their tokens in another order, which no name can tell.
    with exportable_experts(model):
        steps.reference(inputs, lambda site, tensor: eager.__setitem__(site, tensor.clone()))
    values: dict[str, torch.Tensor] = dict(inputs)
    run_program(program, inputs, lambda node, value: values.setdefault(node.name, value))
    sites = module_sites(program)
    for site in sites:
        if site.name.startswith(".:out.past_key_values"):
            continue
        torch.testing.assert_close(values[site.node], eager[site.name], rtol=1e-5, atol=2e-5, msg=site.name)
    # Every module that hooks see has a site: containers, tuples of the rotary embedding, the root.
    assert set(eager) <= {site.name for site in sites}
    assert ".:out.logits" in eager
    assert not [site.name for site in program.sites if site.name.startswith(".@")]
    assert len(sites) > 10


def test_one_cache_site_per_layer_and_kind(exported: Exported) -> None:
    _, program = exported("llama")
    found = [site.name for site in program.sites if site.kind == "kv"]
    assert found == [f"model.layers.{i}.self_attn:kv.{kind}" for i in (0, 1) for kind in ("key", "value")]
    for site in program.sites.resolve(["*:kv.*"]):
        assert site.shape == ("batch", 2, "cache", 16)
        assert site.axes == {"batch": 0, "cache": 2}


def test_names_that_the_documents_use(exported: Exported) -> None:
    """Aliases: FX nodes, the N-th matrix product, the N-th attention."""
    _, program = exported("llama")
    table = program.sites
    products = [s for s in table if s.kind == "op" and s.op in {"linear", "matmul", "mm", "addmm", "bmm"}]
    assert table.match("mm_default") == [products[0]]
    for number in (1, len(products) - 1):
        assert table.match(f"mm_default_{number}") == [products[number]]
    assert table.match(f"mm_default_{len(products)}") == []
    attentions = [s for s in table if s.op == "scaled_dot_product_attention" and s.kind == "op"]
    assert [s.name for s in attentions] == [
        f"model.layers.{i}.self_attn/scaled_dot_product_attention.0" for i in (0, 1)
    ]
    assert table.match("gpt_attention_plugin") == table.match("fake_gpt_attention_plugin") == [attentions[0]]
    assert table.match("fake_gpt_attention_plugin_1") == table.match("gpt_attention_plugin_1") == [attentions[1]]
    for site in table:
        assert site.kind != "op" or site in table.match(site.node)


def test_sites_name_their_source_line(exported: Exported) -> None:
    _, program = exported("llama")
    (site,) = program.sites.resolve(["model.layers.1.mlp/mul.0"])
    assert site.source is not None
    assert site.source.startswith("transformers/")
    assert all("glassengine" not in (s.source or "") for s in program.sites)


def test_no_mark_is_left_and_no_assertion_or_size_is_a_site(exported: Exported) -> None:
    for family in ("llama", "gemma3", "mixtral"):
        _, program = exported(family)
        assert not [node for node in program.graph.nodes if "glass" in str(node.target)]
        assert not [s for s in program.sites if s.op.startswith(("_assert", "sym_"))]


def test_every_node_is_derived_or_returned_as_the_interpreter_has_it(exported: Exported) -> None:
    """DerivedValues against the interpreter, for every op site, with only the planned nodes returned."""
    from glassengine.program.representation.outputs import plan_outputs

    for family in ("llama", "gemma3"):
        model, program = exported(family)
        nodes = [site.node for site in program.sites if site.kind == "op"]
        plan = plan_outputs(program, nodes)
        watched = add_outputs(program, plan.added)
        steps = Steps(model, program, **PADDED, prompt=9)
        for _ in range(2):
            inputs = steps.inputs()
            values: dict[str, torch.Tensor] = {}
            results = run_program(
                watched, inputs, lambda node, value, values=values: values.setdefault(node.name, value)
            )
            after = {**inputs, **{past: results[present] for past, present in program.caches.items()}}
            derived = DerivedValues(
                watched, after, {k: v for k, v in results.items() if k not in program.caches.values()}
            )
            for node in nodes:
                assert torch.equal(derived[node], values[node]), node
            steps.advance(results, results["logits"])
        assert len(plan.added) + len(plan.derived) >= len(set(nodes))


def test_a_model_with_a_cache_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import cache_utils

    class KeepsItsOwnWay(cache_utils.DynamicIndexedLayer):
        """A layer that keeps more than keys and values."""

    monkeypatch.setattr("glassengine.program.kinds.causal_lm.DynamicCache", lambda **_: cache_utils.DynamicCache())
    monkeypatch.setattr(cache_utils, "DynamicLayer", KeepsItsOwnWay)
    with pytest.raises(UsageError, match=r"cache of an unknown kind\n.*KeepsItsOwnWay[\s\S]*plain module"):
        export_causal_lm(models.llama())


_TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_RECURRENT_GEMMA = {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 64,
    "lru_width": 32,
    "block_types": ["recurrent", "attention"],
}


@pytest.mark.parametrize(
    ("name", "settings", "got"),
    [
        (
            "Rwkv",
            {"attention_hidden_size": 32, "intermediate_size": 64},
            "RwkvForCausalLM filled no cache in layers 0, 1",
        ),
        ("RecurrentGemma", _RECURRENT_GEMMA, "RecurrentGemmaForCausalLM filled no cache in layers 0$"),
        ("xLSTM", {"num_blocks": 2, "num_heads": 2}, "AttributeError: .*rnn_state"),
    ],
)
def test_a_model_that_keeps_its_values_elsewhere_is_refused(name: str, settings: dict[str, Any], got: str) -> None:
    model = models.from_config(f"{name}ForCausalLM", f"{name}Config", {**_TINY, **settings})
    with pytest.raises(UsageError, match=rf"(?m)cache of an unknown kind\n.*{got}") as raised:
        export_causal_lm(model)
    assert "glass build MODEL --inputs FILE" in str(raised.value)


def test_a_model_that_raises_without_a_cache_too_is_not_said_to_have_another_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models.llama()

    def planted(*args: object, **kwargs: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(model.model.layers[1].mlp, "forward", planted)
    with pytest.raises(ValueError, match="planted"):
        export_causal_lm(model)
