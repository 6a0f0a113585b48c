from __future__ import annotations

from glassengine.report.head import facts_tables, filled, table


def test_differences_stand_first_and_long_lists_are_shortened() -> None:
    flags = [f"flag{number}" for number in range(40)]
    sides = {
        "baseline": {"cpu": "a", "versions": {"torch": "2.13"}, "flags": [*flags, "old"], "only": 1},
        "candidate": {"cpu": "a", "versions": {"torch": "2.12"}, "flags": [*flags, "new", "newer"]},
    }
    apart, same = facts_tables(sides)
    found = {name: (ours, theirs) for name, ours, theirs in apart.rows}
    assert found == {
        "versions.torch": ("2.13", "2.12"),
        "flags": ("old", "new newer"),
        "only": ("1", "not known"),
    }
    assert same.rows == (("cpu", "a"),) and same.sentence == "Of both sides."
    assert "one process" in facts_tables({"baseline": {"a": 1}, "candidate": {"a": 1}})[1].sentence


def test_facts_of_every_kind_are_text_without_surprises() -> None:
    deep: dict[str, object] = {}
    for _ in range(50):
        deep = {"x": deep}
    found = facts_tables({"baseline": {"deep": deep, "text": "\u202eabc\n", "long": "y" * 9999, "none": None}})
    texts = {name: ours for name, ours, _ in found[0].rows}
    assert texts["text"] == "\\u202eabc\\n" and len(texts["long"]) < 2100 and "none" not in texts
    assert not any(one.rows for one in facts_tables({}))


def test_a_table_has_no_empty_column_and_sets_numbers_right() -> None:
    rows = [("1", "a.b", "", "8.1e+7"), ("12", "c", "", "0.5%")]
    shown = table("T", "About.", ("step", "site", "note", "error"), rows)
    assert shown.columns == ("step", "site", "error") and shown.kinds == ("number", "code", "number")
    assert shown.rows == (("1", "a.b", "8.1e+7"), ("12", "c", "0.5%"))
    assert filled(table("T", "About.", ("step",), []), shown) == (shown,)
