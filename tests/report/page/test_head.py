from __future__ import annotations

from glassengine.report.page.head import facts_of, filled, is_of_one_process, table


def test_differences_stand_first_and_long_lists_are_shortened() -> None:
    flags = [f"flag{number}" for number in range(40)]
    sides = {
        "baseline": {"cpu": "a", "versions": {"torch": "2.13"}, "flags": [*flags, "old"], "only": 1},
        "candidate": {"cpu": "a", "versions": {"torch": "2.12"}, "flags": [*flags, "new", "newer"]},
    }
    found = {fact.name: fact for fact in facts_of(sides)}
    assert [fact.differs for fact in facts_of(sides)] == [True, True, True, False]
    assert (found["versions.torch"].baseline, found["versions.torch"].candidate) == ("2.13", "2.12")
    assert (found["flags"].baseline, found["flags"].candidate) == ("old", "new newer")
    assert (found["only"].baseline, found["only"].candidate) == ("1", "")
    assert not is_of_one_process(sides) and is_of_one_process({"baseline": {"a": 1}, "candidate": {"a": 1}})


def test_facts_of_every_kind_are_text_without_surprises() -> None:
    deep: dict[str, object] = {}
    for _ in range(50):
        deep = {"x": deep}
    found = facts_of({"baseline": {"deep": deep, "text": "\u202eabc\n", "long": "y" * 9999, "none": None}})
    texts = {fact.name: fact.baseline for fact in found}
    assert texts["text"] == "\\u202eabc\\n" and len(texts["long"]) < 2100 and "none" not in texts
    assert facts_of({}) == []


def test_a_table_has_no_empty_column_and_sets_numbers_right() -> None:
    rows = [("1", "a.b", "", "8.1e+7"), ("12", "c", "", "0.5%")]
    shown = table("T", "About.", ("step", "site", "note", "error"), rows)
    assert shown.columns == ("step", "site", "error") and shown.kinds == ("number", "code", "number")
    assert shown.rows == (("1", "a.b", "8.1e+7"), ("12", "c", "0.5%"))
    assert filled(table("T", "About.", ("step",), []), shown) == (shown,)
