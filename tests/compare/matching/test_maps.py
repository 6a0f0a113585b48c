"""`--map`: names that a pattern carries over, layouts that are made one, and mistakes that are still found."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glassengine.compare import compare
from glassengine.compare.matching.layouts import _OPERATIONS
from glassengine.compare.matching.maps import MapRule, _parsed, captures, load_map
from glassengine.compare.matching.matching import pair_names
from glassengine.errors import UnknownNameError, UsageError
from glassengine.recording.write.writer import RecordingWriter
from glassengine.results import Comparison
from glassengine.sites import matches

B, S, H, HEADS = 2, 5, 24, 4
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def baseline() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    found: dict[str, torch.Tensor] = {"attention_mask": MASK}
    for i in range(2):
        for name in ("q", "k", "v", "gate", "up", "out"):
            found[f"model.layers.{i}.{name}"] = torch.randn(B, S, H, generator=g)
    return found


def port(ours: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same tensors as another implementation names and lays them out."""
    found = {}
    for i in range(2):
        of = {name: ours[f"model.layers.{i}.{name}"] for name in ("q", "k", "v", "gate", "up", "out")}
        found[f"h.{i}.qkv"] = torch.cat([of["q"], of["k"], of["v"]], -1)
        found[f"h.{i}.gate"] = of["gate"].reshape(B, S, HEADS, -1).permute(0, 2, 1, 3)
        found[f"h.{i}.up"] = of["up"].reshape(B * S, H)
        found[f"h.{i}.out"] = of["out"][MASK.bool()]
    return found


RULES = [
    {
        "baseline": f"layers.*.{name}",
        "candidate": "h.*.qkv",
        "candidate_ops": [{"op": "split", "dim": -1, "parts": 3, "index": i}],
    }
    for i, name in enumerate(("q", "k", "v"))
] + [
    {
        "baseline": "layers.*.gate",
        "candidate": "h.*.gate",
        "candidate_ops": [{"op": "permute", "dims": [0, 2, 1, 3]}, {"op": "flatten", "start": 2}],
    },
    {"baseline": "layers.*.up", "candidate": "h.*.up", "baseline_ops": [{"op": "flatten", "start": 0, "end": 1}]},
    {"baseline": "layers.*.out", "candidate": "h.*.out", "baseline_ops": [{"op": "pack", "mask": "attention_mask"}]},
]


def run(tmp_path: Path, x: Mapping[str, torch.Tensor], y: Mapping[str, torch.Tensor], **options: Any) -> Comparison:
    torch.save(dict(x), tmp_path / "x.pt")
    torch.save(dict(y), tmp_path / "y.pt")
    return compare(tmp_path / "x.pt", tmp_path / "y.pt", **options)


def test_a_port_of_other_names_and_layouts_is_identical(tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(json.dumps({"schema_version": 1, "rules": RULES}))
    result = run(tmp_path, baseline(), port(baseline()), map=tmp_path / "map.json")
    assert (result.ok, result.verdict, result.counts["compared"]) == (True, "identical", 12)
    assert {pair.method for pair in result.pairs} == {"map"}
    assert [s.site for s in result.skipped] == ["attention_mask"]
    first = result.to_dict()["pairs"][0]
    assert (first["method"], first["site"], first["candidate_site"]) == ("map", "model.layers.0.q", "h.0.qkv")


@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "up", "out"])
def test_a_planted_error_is_found_through_every_layout(tmp_path: Path, name: str) -> None:
    bad = baseline()
    bad[f"model.layers.1.{name}"][1, 3, 7] += 0.01
    result = run(tmp_path, baseline(), port(bad), map={"rules": RULES})
    assert [pair.site for pair in result.pairs if pair.verdict == "wrong"] == [f"model.layers.1.{name}"]


@pytest.mark.parametrize(
    ("at", "change"),
    [
        (0, {"candidate_ops": [{"op": "split", "dim": -1, "parts": 3, "index": 1}]}),
        (3, {"candidate_ops": [{"op": "permute", "dims": [0, 2, 3, 1]}, {"op": "flatten", "start": 2}]}),
        (4, {"baseline_ops": [{"op": "transpose", "dims": [0, 1]}, {"op": "flatten", "start": 0, "end": 1}]}),
        (5, {"baseline_ops": [{"op": "pack", "mask": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]}]}),
    ],
)
def test_a_wrong_layout_is_not_identical(tmp_path: Path, at: int, change: dict[str, Any]) -> None:
    rules: list[dict[str, Any]] = [dict(rule) for rule in RULES]
    rules[at] = {**rules[at], **change}
    result = run(tmp_path, baseline(), port(baseline()), map={"rules": rules})
    wrong = {pair.site for pair in result.pairs if pair.verdict == "wrong"}
    assert wrong == {f"model.{str(rules[at]['baseline']).replace('*', str(i))}" for i in range(2)}


def test_several_candidates_are_put_together(tmp_path: Path) -> None:
    x = {"mlp.gate_up": torch.randn(3, 8)}
    y = {"ffn.gate": x["mlp.gate_up"][:, :4].clone(), "ffn.up": x["mlp.gate_up"][:, 4:].clone()}
    rule = {"baseline": "mlp.gate_up", "candidate": ["ffn.gate", "ffn.up"], "concat_dim": -1}
    result = run(tmp_path, x, y, map={"rules": [rule]})
    assert (result.verdict, result.pairs[0].candidate_site) == ("identical", "ffn.gate + ffn.up")
    assert result.counts["unmatched_candidate"] == 0
    swapped = {**rule, "candidate": ["ffn.up", "ffn.gate"]}
    assert run(tmp_path, x, y, map={"rules": [swapped]}).verdict == "wrong"
    y["ffn.up"] = torch.randn(4, 4)
    with pytest.raises(UsageError, match=r"cannot be concatenated(.|\n)*\[3, 4\], \[4, 4\]"):
        run(tmp_path, x, y, map={"rules": [rule]})


def test_a_cast_does_not_tighten_the_tolerance(tmp_path: Path) -> None:
    x = torch.randn(64)
    rule = {"baseline": "a", "candidate": "b", "candidate_ops": [{"op": "cast", "dtype": "float32"}]}
    result = run(tmp_path, {"a": x}, {"b": x.bfloat16()}, map={"rules": [rule]})
    assert (result.verdict, result.pairs[0].reason) == ("rounding", None)
    figures = result.pairs[0].figures
    assert figures is not None
    assert figures.rtol == 1.6e-2


def test_the_counterpart_of_one_is_not_that_of_its_namesake(tmp_path: Path) -> None:
    x = {"a": torch.ones(2), "b": torch.zeros(2)}
    result = run(tmp_path, x, {"b": torch.ones(2)}, map={"rules": [{"baseline": "a", "candidate": "b"}]})
    assert [(pair.site, pair.candidate_site, pair.verdict) for pair in result.pairs] == [("a", "b", "identical")]
    assert [(s.site, s.side) for s in result.skipped] == [("b", "baseline")]


def test_tensors_without_a_rule_pair_by_name(tmp_path: Path) -> None:
    x = {"layers.0.mlp": torch.ones(2), "layers.1.mlp": torch.ones(2), "logits": torch.ones(3)}
    y = {"h.0.ffn": torch.ones(2), "logits": torch.zeros(3)}
    result = run(tmp_path, x, y, map={"rules": [{"baseline": "layers.*.mlp", "candidate": "h.*.ffn"}]})
    assert [(pair.site, pair.method) for pair in result.pairs] == [("layers.0.mlp", "map"), ("logits", "name")]
    assert [s.reason for s in result.skipped] == ["the candidate has no 'h.1.ffn', as the map calls it"]


def test_a_mapped_tensor_does_not_fall_back_to_its_namesake(tmp_path: Path) -> None:
    for side, second in {"x": "a", "y": "b"}.items():
        (tmp_path / side).mkdir()
        torch.save({second: torch.ones(2), "c": torch.ones(2)}, tmp_path / side / "step0.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "x" / "step1.pt")
    torch.save({"a": torch.zeros(2)}, tmp_path / "y" / "step1.pt")
    result = compare(tmp_path / "x", tmp_path / "y", map={"rules": [{"baseline": "a", "candidate": "b"}]})
    assert [(p.step, p.site, p.candidate_site) for p in result.pairs] == [(0, "a", "b"), (0, "c", "c")]
    assert [(s.step, s.site, s.side, s.reason) for s in result.skipped] == [
        (1, "a", "baseline", "the candidate has no 'b', as the map calls it"),
        (1, "a", "candidate", "the baseline has no tensor of this name, step and rank"),
    ]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"baseline": "layers.*.mpl", "candidate": "h.*.ffn"}, r"unknown tensor(.|\n)*nearest: model\.layers\.0\.mlp"),
        ({"baseline": "layers.*.mlp", "candidate": "h.*.fnf"}, r"names nothing in the candidate(.|\n)*h\.0\.ffn"),
        ({"baseline": "layers.*.mlp", "candidate": "ffn"}, r"several tensors(.|\n)*h\.0\.ffn, h\.1\.ffn"),
    ],
)
def test_a_rule_that_names_nothing_is_an_error(tmp_path: Path, rule: dict[str, Any], message: str) -> None:
    x = {f"model.layers.{i}.mlp": torch.ones(2) for i in range(2)}
    y = {f"h.{i}.ffn": torch.ones(2) for i in range(2)}
    with pytest.raises(UsageError, match=message):
        run(tmp_path, x, y, map={"rules": [rule]})


def test_an_operation_that_does_not_fit_says_where(tmp_path: Path) -> None:
    rule = {"baseline": "a", "candidate": "b", "candidate_ops": [{"op": "permute", "dims": [0, 1]}]}
    with pytest.raises(UsageError, match=r"does not fit 'a' and 'b', step 0: permute\(dims=\[0, 1\]\)"):
        run(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2)}, map={"rules": [rule]})
    rule = {"baseline": "a", "candidate": "b", "candidate_ops": [{"op": "pack", "mask": "mask"}]}
    with pytest.raises(UsageError, match=r"no tensors of step 0 are called 'mask'"):
        run(tmp_path, {"a": torch.ones(2)}, {"b": torch.ones(2, 2)}, map={"rules": [rule]})


def pairs(rules: dict[str, Any], ours: list[str], theirs: list[str], **aliases: Any) -> list[tuple[str, ...]]:
    found, _ = pair_names(load_map(rules).rules, ours, theirs, **aliases)
    return [(pair.baseline, *pair.candidates) for pair in found]


def test_a_rule_of_one_rank(tmp_path: Path) -> None:
    x, y, z = torch.randn(3), torch.randn(3), torch.randn(3)
    sides = {"a": ({"p": x, "q": y}, {"p": y, "q": z}), "b": ({"p": x, "q": y}, {"q": y, "r": z})}
    for name, each in sides.items():
        for rank, tensors in enumerate(each):
            with RecordingWriter(tmp_path / name / f"rank{rank}", metadata={}) as w:
                for site, tensor in tensors.items():
                    w.write(site, 0, tensor, rank=rank)
                w.commit(0)
    rules = [{"baseline": "p", "candidate": "q", "rank": 1}, {"baseline": "q", "candidate": "r", "rank": 1}]
    result = compare(tmp_path / "a", tmp_path / "b", map={"rules": rules})
    assert (result.verdict, result.coverage) == ("identical", 1.0)
    assert {(pair.rank, pair.site, pair.candidate_site) for pair in result.pairs} == {
        (0, "p", "p"), (0, "q", "q"), (1, "p", "q"), (1, "q", "r"),
    }  # fmt: skip
    with pytest.raises(UsageError, match="a rule of the map is of a rank that is not compared"):
        compare(tmp_path / "a", tmp_path / "b", map={"rules": [{**rules[0], "rank": 2}]})


def test_an_alias_file_is_a_map_in_either_direction() -> None:
    sites = ["model.layers.0.mlp", "model.layers.1.mlp", "logits"]
    aliased = ["mlp_0", "mlp_1", "logits"]
    expected = [("model.layers.0.mlp", "mlp_0"), ("model.layers.1.mlp", "mlp_1")]
    assert pairs({"layers.*.mlp": "mlp"}, sites, aliased) == expected
    assert pairs({"layers.*.mlp": "mlp"}, aliased, sites) == [(b, a) for a, b in expected]
    assert pairs({"layers.*.mlp": "mlp"}, aliased, aliased) == []
    assert pairs({"layers.1.mlp": "one"}, sites, ["one"]) == [("model.layers.1.mlp", "one")]
    assert pairs({"layers.*.mlp": "h.*.ffn"}, sites, ["h.0.ffn", "h.1.ffn"])[1] == ("model.layers.1.mlp", "h.1.ffn")
    by_node = pairs({"linear_7": "mm"}, sites, ["mm"], baseline_aliases={"linear_7": "model.layers.0.mlp"})
    assert by_node == [("model.layers.0.mlp", "mm")]


def test_an_alias_file_that_cannot_be_resolved() -> None:
    sites = ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"]
    with pytest.raises(UsageError, match=r"numbers of the alias 'mlp' are ambiguous"):
        pairs({"layers.*.mlp": "mlp"}, sites, ["mlp_0", "mlp_1"])
    with pytest.raises(UsageError, match=r"numbers of the alias 'mlp' are ambiguous"):
        pairs({"layers.*.mlp": "mlp"}, sites[:2], ["mlp_0", "mlp_1", "mlp_2"])
    with pytest.raises(UnknownNameError, match=r"unknown tensor in the map 'layers\.\*\.atn'"):
        pairs({"layers.*.atn": "attn"}, sites, ["mlp_0"])
    with pytest.raises(UnknownNameError, match="unknown alias in the map 'mpl'"):
        pairs({"layers.0.mlp": "mpl"}, sites, ["mlp"])


def test_aliases_that_a_recording_knows_pair_without_a_map(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r", metadata={"aliases": {"inter": "model.mlp/mul.0", "gone": "nowhere"}}) as w:
        w.write("model.mlp/mul.0", 0, torch.ones(2))
        w.commit(0)
    with RecordingWriter(tmp_path / "s", metadata={"aliases": {"inter": "other.ffn/mul.3"}}) as w:
        w.write("other.ffn/mul.3", 0, torch.ones(2) * 2)
        w.commit(0)
    torch.save({"inter": torch.ones(2)}, tmp_path / "d.pt")
    for x, y, verdict in (("r", "d.pt", "identical"), ("d.pt", "r", "identical"), ("r", "s", "wrong")):
        result = compare(tmp_path / x, tmp_path / y)
        assert [(pair.method, pair.verdict) for pair in result.pairs] == [("alias", verdict)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[]", "is not a map"),
        ("{}", "has no rule"),
        ('{"rules": []}', "has no rule"),
        ('{"a": 1}', "is not a map"),
        ('{"a": "b", "a": "c"}', "'a' appears twice"),
        ('{"rules": [1]}', "rule 0 is not an object"),
        ('{"rules": [{"candidate": "b"}]}', "rule 0 needs 'baseline'"),
        ('{"rules": [{"baseline": "a"}]}', "rule 0 needs 'candidate'"),
        ('{"rules": [{"baseline": "a", "candidate": ["b", 1]}]}', "rule 0 needs 'candidate'"),
        ('{"rules": [{"baseline": "a", "candidate": "b", "candidate_op": []}]}', r"'candidate_op'(.|\n)*candidate_ops"),
        ('{"rules": [{"baseline": "a", "candidate": "b", "candidate_ops": {}}]}', "is not a list"),
        (
            '{"rules": [{"baseline": "a", "candidate": "b", "candidate_ops": [{"op": "x"}]}]}',
            r"rule 0: candidate_ops\[0\]",
        ),
        ('{"rules": [{"baseline": "a", "candidate": ["b", "c"]}]}', "'concat_dim' goes with several"),
        ('{"rules": [{"baseline": "a", "candidate": "b", "concat_dim": 0}]}', "'concat_dim' goes with several"),
        ('{"rules": [{"baseline": "a", "candidate": "b", "rank": "1"}]}', "'rank' is not the number of a rank"),
        ('{"rules": [{"baseline": "a", "candidate": ["b", "c"], "concat_dim": "0"}]}', "is not an integer"),
        ('{"rules": [{"baseline": "a.*", "candidate": "b.*.*"}]}', "more wildcards"),
        ('{"rules": [{"baseline": "a.*", "candidate": "b.{2}"}]}', "more wildcards"),
        ('{"rules": [{"baseline": "re:(", "candidate": "b"}]}', "not a valid regular expression"),
        ('{"schema_version": 2, "rules": [{"baseline": "a", "candidate": "b"}]}', "another version"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_invalid_maps_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_map(tmp_path / "map.json")


def test_a_map_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.json"):
        with pytest.raises(UsageError, match="map cannot be read"):
            load_map(path)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.*.mlp", "model.layers.3.mlp", ("3",)),
        ("*.mlp", "model.layers.3.mlp", ("model.layers.3",)),
        ("layers.?.m[lm]p", "layers.3.mlp", ("3", "l")),
        ("attn:out[0]", "h.attn:out[0]", ()),
        ("attn:out[?]", "h.attn:out[1]", ("1",)),
        ("[!)]x", "ax", ("a",)),
        ("[!]x]y", "ay", ("a",)),
        ("[[0]", "[0]", ("[",)),
        ("mlp/*.*", "h.0.mlp/mul.0", ("mul", "0")),
        (r"re:layers\.(\d+)\.(\w+)", "model.layers.12.mlp", ("12", "mlp")),
    ],
)
def test_wildcards_take_the_matches_in_order(pattern: str, name: str, expected: tuple[str, ...]) -> None:
    assert expected in list(captures(pattern, name))
    assert matches(pattern, name)


NAMES = st.text(st.sampled_from("ab.*/[0]?:!-"), max_size=8)


@settings(max_examples=500, deadline=None)
@given(pattern=NAMES, name=NAMES)
def test_a_map_matches_what_a_site_pattern_matches(pattern: str, name: str) -> None:
    assert (next(captures(pattern, name), None) is not None) == matches(pattern, name)


@settings(max_examples=200, deadline=None)
@given(
    paths=st.lists(st.lists(st.sampled_from(["a", "b0", "0", "1"]), min_size=1, max_size=4), min_size=1),
    prefixes=st.tuples(st.sampled_from(["", "model.", "x.y."]), st.sampled_from(["", "net.", "a.b."])),
)
def test_a_map_and_its_inverse_pair_every_name(paths: list[list[str]], prefixes: tuple[str, str]) -> None:
    middles = list(dict.fromkeys(".".join(path) for path in paths))
    ours = [f"{prefixes[0]}layers.{middle}.mlp" for middle in middles]
    theirs = [f"{prefixes[1]}h.{middle}.ffn" for middle in middles]
    left, right = f"{prefixes[0]}layers.*.mlp", f"{prefixes[1]}h.*.ffn"
    there = pairs({"rules": [{"baseline": left, "candidate": right}]}, ours, theirs)
    back = pairs({"rules": [{"baseline": right, "candidate": left}]}, theirs, ours)
    assert there == list(zip(ours, theirs, strict=True))
    assert back == list(zip(theirs, ours, strict=True))


def test_numbered_wildcards() -> None:
    assert pairs({"rules": [{"baseline": "a.*.b.*", "candidate": "c.{2}.{1}"}]}, ["a.1.b.2"], ["c.2.1"]) == [
        ("a.1.b.2", "c.2.1")
    ]
    assert str(MapRule("a", ("b", "c"))) == "'a' -> 'b', 'c'"


def test_the_maps_of_the_guide_are_maps(root: Path) -> None:
    text = (root / "docs" / "comparing.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in text.split("```json\n")[1:]]
    assert len(blocks) == 5
    for block in blocks:
        load_map(json.loads(block))
    for name in _OPERATIONS:
        assert f"`{name}`" in text


def test_a_map_of_the_guide_works(tmp_path: Path, root: Path) -> None:
    text = (root / "docs" / "comparing.md").read_text(encoding="utf-8")
    fused = json.loads(text.split("```json\n")[2].partition("```")[0])
    x = {f"layers.0.{name}_proj": torch.randn(2, width) for name, width in (("q", 64), ("k", 16), ("v", 16))}
    result = run(tmp_path, x, {"h.0.qkv": torch.cat(list(x.values()), -1)}, map=fused)
    assert (result.verdict, result.counts["compared"]) == ("identical", 3)


GLOB = st.lists(st.sampled_from(["a", "b", ".", "/", "*", "?", "[ab]", "[!a]", "[[]", "[0]"]), max_size=8).map("".join)


@settings(max_examples=300, deadline=None)
@given(GLOB, st.text("aab./[]0", max_size=10))
def test_a_glob_walked_is_the_same_as_its_expression(pattern: str, name: str) -> None:
    glob = _parsed(pattern)
    for within in (True, False):
        found = glob._expressions[within].fullmatch(name)
        assert glob._walked(name, within) == (None if found is None else found.groups())


@pytest.mark.parametrize(
    ("pattern", "name", "count"),
    [
        ("*" + "a*" * 25 + "b", "a" * 60, 0), ("*" + "a*" * 25, "a" * 60, 2), ("*a*a*b", ("a" * 100 + ".") * 20, 0),
        ("*a" * 1000 + "b", "a" * 3000, 0), ("layers.*.mlp.*.*.*.*", "model.layers.3.mlp.experts.7.down.weight", 2),
    ],
)  # fmt: skip
def test_s4_a_glob_with_many_wildcards_ends_soon(pattern: str, name: str, count: int) -> None:
    began = time.monotonic()
    assert len(list(captures(pattern, name))) == count
    assert time.monotonic() - began < 60
