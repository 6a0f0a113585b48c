"""A redacted report has the mistake and its place, and neither texts, paths nor values; it is below 1 MB."""

from __future__ import annotations

from pathlib import Path

import pytest

from glassengine.errors import UsageError
from glassengine.report.page.redact import redacted_text
from glassengine.report.page.write import write_report
from tests.report.made_results import TEXTS, comparison, figures, layered, pair


def everything(folder: Path) -> str:
    return "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.is_file())


def test_texts_paths_and_values_are_left_out_and_the_mistake_stays(tmp_path: Path) -> None:
    secret = comparison(
        baseline="/tmp/me/models/secret-llama",
        candidate="/tmp/me/port.py:model",
        not_ok_because="differs, see /tmp/me/models/secret-llama/notes.txt",
    )
    shown = {}
    for redact in (False, True):
        write_report(secret, tmp_path / str(redact), made="glass check /tmp/me/models/secret-llama", redact=redact)
        shown[redact] = everything(tmp_path / str(redact))
    for text in ("/tmp/me", TEXTS[0], "scale=1 / 5.1", "self.scaling", "0.25"):
        assert text in shown[False] and text not in shown[True], text
    for text in ("secret-llama", "port.py:40", "the scale is 0.196078 instead of 0.176777", "2.13.0"):
        assert text in shown[True], text


def test_a_report_of_many_tensors_is_below_1_mb_and_has_the_wrong_ones(tmp_path: Path) -> None:
    many = [*layered(layers=1500, guilty=None, steps=4), pair(3, "last", "wrong", 90.0, figures=figures(0.1))]
    result = comparison(many)
    assert write_report(result, tmp_path / "all").total_bytes > 1_000_000
    written = write_report(result, tmp_path / "few", redact=True)
    assert written.total_bytes < 1_000_000 and '"last"' in everything(tmp_path / "few")
    assert write_report(result, tmp_path / "one.html", redact=True).total_bytes < 1_000_000


def test_values_of_recordings_cannot_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="without recordings"):
        write_report(comparison(), tmp_path / "page", recordings=["a", "b"], redact=True)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see /data/me/a b.txt", "see a b.txt"),
        ("C:\\Users\\me\\x.pt is missing", "x.pt is missing"),
        ("model/expand.0 reads /mlp/act", "model/expand.0 reads /mlp/act"),
        ("transformers/models/llama.py:3", "transformers/models/llama.py:3"),
    ],
)
def test_directories_of_a_machine_go_and_names_of_sites_stay(text: str, shown: str) -> None:
    assert redacted_text(text) == shown
