from __future__ import annotations

from pathlib import Path

import pytest

from glassengine.report.page.data import DataFolder, ListFiles


@pytest.mark.parametrize("text", ["plain", "\u202e\u2028</script>", "\ud800 alone", "\U0001f600", '"\\\x00'])
def test_every_text_is_ascii_json_and_comes_back(tmp_path: Path, text: str) -> None:
    folder = DataFolder(tmp_path)
    folder.write("rows", 3, {text: [text, 0.1, -0.0, 5e-324, 2**60, None, True]})
    raw = folder.path("rows", 3).read_bytes()
    assert raw.isascii() and raw.startswith(b'glassReport("rows",3,') and raw.endswith(b");\n")
    assert folder.read("rows", 3) == {text: [text, 0.1, -0.0, 5e-324, 2**60, None, True]}


def test_a_file_is_written_as_soon_as_it_is_full(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    items = ListFiles(folder, "sites", 2)
    for number in range(5):
        items.add(number)
    assert folder.path("sites", 1).is_file() and not folder.path("sites", 2).exists()
    items.close()
    assert [items.item(number) for number in range(5)] == list(range(5))
    assert (folder.kinds["sites"].num_items, folder.kinds["sites"].items_per_file) == (5, 2)
