from __future__ import annotations

from glassengine.executable.cache_store import KeyDifference, Parts, differences, digest, explain_miss

STORED: Parts = {
    "graph": {"calls": "aten.addmm.default", "arguments": "(%0, %1, %2)"},
    "inputs": {"0": "float32[30]", "1": "float32[2, 10]"},
    "versions": {"torch": "2.13"},
}


def changed(**parts: dict[str, str]) -> Parts:
    return {**STORED, **{name: {**STORED[name], **values} for name, values in parts.items()}}


def test_key_is_of_the_values_and_not_of_their_order() -> None:
    shuffled = {name: dict(reversed(values.items())) for name, values in reversed(STORED.items())}
    assert digest(shuffled) == digest(STORED) and len(digest(STORED)) == 40
    assert digest(changed(versions={"torch": "2.14"})) != digest(STORED)


def test_differences_are_both_ways() -> None:
    wanted = {**changed(inputs={"1": "float32[4, 10]", "2": "int64[1]"}), "options": {"level": "3"}}
    assert differences(STORED, wanted) == [
        KeyDifference("inputs", "1", "float32[2, 10]", "float32[4, 10]"),
        KeyDifference("inputs", "2", "", "int64[1]"),
        KeyDifference("options", "level", "", "3"),
    ]
    assert [(d.stored, d.wanted) for d in differences(wanted, STORED)][1] == ("int64[1]", "")


def test_nearest_entry_has_the_same_calls_before_anything_else() -> None:
    wanted = changed(inputs={"0": "float32[20]", "1": "float32[2, 30]"})
    other_calls = {**wanted, "graph": {"calls": "aten.mm.default", "arguments": "(%0, %1)"}}
    miss = explain_miss(wanted, [("mm", other_calls), ("addmm", STORED)])
    assert str(miss) == (
        "inputs.0: float32[30] -> float32[20]; inputs.1: float32[2, 10] -> float32[2, 30] (nearest: addmm)"
    )
    assert str(explain_miss(wanted, [("mm", other_calls)])) == "no entry has these operations"
    assert str(explain_miss(wanted, [])) == "nothing is stored yet"


def test_operations_that_are_new_and_compiled_otherwise() -> None:
    other = {**changed(versions={"torch": "2.14"}), "graph": {"calls": "aten.mm.default", "arguments": ""}}
    text = "no entry has these operations; compiled otherwise, too: versions.torch: 2.13 -> 2.14"
    assert str(explain_miss(other, [("addmm", STORED)])) == text


def test_of_a_long_value_the_words_that_differ_are_shown() -> None:
    flags = [f"flag{index}" for index in range(50)]
    shown = str(KeyDifference("processor", "flags", " ".join(flags), " ".join([*flags[1:], "amx"])))
    assert shown == "processor.flags: -flag0 +amx"
