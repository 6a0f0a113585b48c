"""Site names and the patterns that find them."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutput

from glassengine.errors import UnknownNameError, UsageError
from glassengine.sites import (
    ROOT,
    Site,
    SiteTable,
    matches,
    op_site,
    other_spellings,
    patterns_of,
    port_leaves,
    port_site,
    tap_site,
    with_call,
)


def site(name: str, node: str = "n", kind: str = "op", aliases: tuple[str, ...] = ()) -> Site:
    return Site(name, kind, node, "linear", "float32", ("batch", 4), {"batch": 0}, None, "f", aliases)


# -- grammar -----------------------------------------------------------------------------------------------------------


def test_names_are_put_together_as_the_grammar_says() -> None:
    assert with_call("model.layers.6", 0) == "model.layers.6"
    assert with_call("model.layers.6", 1) == "model.layers.6@1"
    assert op_site(with_call("model.mlp", 2), "mul", 0) == "model.mlp@2/mul.0"
    assert port_site("model.mlp", ":out") == "model.mlp"
    assert port_site("model.mlp", ":out[0]") == "model.mlp:out[0]"
    assert port_site("model.mlp", ":in.x") == "model.mlp:in.x"
    assert tap_site("model.mlp@1", "inter") == "model.mlp@1.inter"
    assert tap_site(ROOT, "inter") == "inter"


@dataclass
class Pair:
    left: torch.Tensor
    right: object


def test_ports_have_keys_for_every_container() -> None:
    x = torch.zeros(1)
    named = namedtuple("named", "first second")
    tree = (x, {"a": [x, None]}, OrderedDict(b=x), BaseModelOutput(last_hidden_state=x), named(x, 3), Pair(x, {"c": x}))
    assert [port for port, _ in port_leaves(":out", tree)] == [
        ":out[0]",
        ":out[1].a[0]",
        ":out[2].b",
        ":out[3].last_hidden_state",
        ":out[4].first",
        ":out[5].left",
        ":out[5].right.c",
    ]
    assert [port for port, _ in port_leaves(":out", x)] == [":out"]
    assert list(port_leaves(":out", (None, 3, "x"))) == []


# -- patterns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("layers.*.mlp_output", "model.layers.6.mlp_output"),
        ("mlp_output", "model.layers.6.mlp_output"),
        ("mlp/mul.0", "model.layers.6.mlp/mul.0"),
        ("*", "."),
        (".", "."),
        ("model.rotary_emb:out[0]", "model.rotary_emb:out[0]"),
        ("rotary_emb:out[?]", "model.rotary_emb:out[1]"),
        ("layers.[01].mlp", "model.layers.[01].mlp"),
        ("layers.[ab].mlp", "model.layers.b.mlp"),
        ("self_attn:kv.key", "model.layers.0.self_attn:kv.key"),
        ("mlp@1/mul.?", "model.mlp@1/mul.3"),
        (r"re:layers\.\d+\.mlp$", "model.layers.12.mlp"),
        ("re:mul", "model.mlp/mul.0"),
    ],
)
def test_pattern_matches(pattern: str, name: str) -> None:
    assert matches(pattern, name)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("lp_output", "model.layers.6.mlp_output"),  # not at a dot
        ("mul", "model.mlp/mul.0"),  # not the whole suffix
        ("0", "model.mlp/mul.0"),  # the dot of an occurrence is no boundary
        ("mlp", "model.mlp/mul.0"),
        ("model", "model.mlp"),
        ("out[0]", "model.rotary_emb:out[1]"),
        ("rotary_emb:out[0]", "model.rotary_emb:out0"),  # [0] is literal
        ("MLP", "model.mlp"),
        (r"re:layers\.\d$", "model.layers.12"),
    ],
)
def test_pattern_does_not_match(pattern: str, name: str) -> None:
    assert not matches(pattern, name)


def test_an_invalid_regular_expression_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match=r"not a valid regular expression\n.*re:\("):
        matches("re:(", "x")


PART = st.text("abz019_", min_size=1, max_size=4)
PATH = st.lists(PART, min_size=1, max_size=4).map(".".join)
NAME = st.tuples(PATH, st.sampled_from(["", "@1", ":out[0]", ":in.x", "/mul.0", "@2/view.13"])).map("".join)


@given(NAME)
def test_a_name_matches_itself_and_every_suffix_at_a_dot_of_its_path(name: str) -> None:
    path, rest = name.split("/")[0], name[len(name.split("/")[0]) :]
    parts = path.split(".")
    for start in range(len(parts)):
        assert matches(".".join(parts[start:]) + rest, name)
    assert matches("*", name)


@given(NAME, NAME)
def test_a_pattern_without_wildcards_matches_suffixes_only(pattern: str, name: str) -> None:
    assert matches(pattern, name) == (
        name == pattern or (name.endswith("." + pattern) and ("/" in pattern or "/" not in name))
    )


@given(NAME, st.integers(0, 20))
def test_a_star_stands_for_anything(name: str, cut: int) -> None:
    cut = min(cut, len(name))
    assert matches(name[:cut] + "*", name)
    assert matches("*" + name[cut:], name)
    assert not matches(name + "?*", name)


# -- table -------------------------------------------------------------------------------------------------------------

TABLE = SiteTable(
    [
        site("model.layers.0.mlp/linear.0", "linear", aliases=("linear", "mm_default")),
        site("model.layers.0.mlp", "linear", "module"),
        site("model.layers.1.mlp/linear.0", "linear_1", aliases=("linear_1", "mm_default_1")),
        site("model.layers.1.mlp", "linear_1", "module"),
        site("model.layers.1.mlp.inter", "linear_1", "tap"),
    ]
)


def test_a_name_comes_before_an_alias_and_an_alias_before_a_pattern() -> None:
    assert [s.name for s in TABLE.match("model.layers.0.mlp")] == ["model.layers.0.mlp"]
    assert [s.name for s in TABLE.match("mm_default")] == ["model.layers.0.mlp/linear.0"]
    assert [s.name for s in TABLE.match("linear_1")] == ["model.layers.1.mlp/linear.0"]
    assert [s.name for s in TABLE.match("layers.*.mlp")] == ["model.layers.0.mlp", "model.layers.1.mlp"]


@pytest.mark.parametrize("pattern", ["mm_default*", "linear*", "*_default*", r"re:^mm_default(_\d+)?$"])
def test_a_pattern_of_aliases_is_tried_last(pattern: str) -> None:
    assert [s.name for s in TABLE.match(pattern)] == ["model.layers.0.mlp/linear.0", "model.layers.1.mlp/linear.0"]
    # Whatever matches a site as well means that.
    assert [s.name for s in TABLE.match("*linear.?")] == ["model.layers.0.mlp/linear.0", "model.layers.1.mlp/linear.0"]
    assert [s.name for s in TABLE.match("re:inter|mm_default")] == ["model.layers.1.mlp.inter"]


def test_several_patterns_resolve_in_graph_order_without_repeats() -> None:
    found = [s.name for s in TABLE.resolve(["inter", "mm_default", "layers.1.*", "inter"])]
    assert found == [s.name for s in TABLE if "0.mlp/" in s.name or "layers.1" in s.name]


def test_sites_of_a_node_op_first() -> None:
    assert [s.kind for s in TABLE.by_node["linear_1"]] == ["op", "module", "tap"]
    turned = SiteTable(reversed(TABLE))
    assert [s.kind for s in turned.by_node["linear_1"]] == ["op", "tap", "module"]


def test_an_unknown_name_gets_the_nearest_sites_and_aliases() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown site 'model.layers.1.mpl'") as error:
        TABLE.resolve(["model.layers.1.mpl"])
    assert "nearest: model.layers.1.mlp" in str(error.value)
    assert "glass sites" in str(error.value)
    with pytest.raises(UnknownNameError, match=r"nearest: mm_default_1"):
        TABLE.resolve(["mm_defalt_1"])


def test_a_name_used_twice_is_refused() -> None:
    with pytest.raises(UsageError, match=r"used twice\n.*got: b"):
        SiteTable([site("a"), site("b"), site("b"), site("a.c")])


def test_a_site_survives_json() -> None:
    original = site("model.mlp", aliases=("linear", "mm_default"))
    assert Site.from_dict(json.loads(json.dumps(original.to_dict()))) == original


def test_f39_a_string_is_one_pattern() -> None:
    assert patterns_of("h.6.mlp_output") == ("h.6.mlp_output",) and patterns_of(["a", "b"]) == ("a", "b")
    assert patterns_of(iter(["a"])) == ("a",) and patterns_of(()) == ()
    for wrong in (None, 3, [3], [None]):
        with pytest.raises(UsageError, match="debug is not a list of patterns"):
            patterns_of(wrong, "debug")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("layers.0:out[0]", "layers.0"),
        (".:out[0]", "."),
        ("gpt_attention_plugin", "fake_gpt_attention_plugin"),
        ("gpt_attention_plugin_3", "fake_gpt_attention_plugin_3"),
        ("model.gpt_attention_plugin_3[0]", "model.fake_gpt_attention_plugin_3[0]"),
    ],
)
def test_f39_f41_names_with_another_spelling(name: str, other: str) -> None:
    assert other in other_spellings(name) and name in other_spellings(other)


@pytest.mark.parametrize("name", ["x:out[1]", "x:out[0].y", "x:out.y", "x:in[0]", "x:kv.key"])
def test_names_without_another_spelling(name: str) -> None:
    assert other_spellings(name) == ()
