"""Every block of the guide pages runs, and prints what the page shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[[Path], list[str]]

PAGES = [
    "coming-from-ditto.md",
    "coming-from-pytorch-neuronx.md",
    "coming-from-tensorrt-llm.md",
    "coming-from-transformers.md",
    "onnx-and-pt2.md",
    "quantised-and-adapted.md",
]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_and_prints_what_is_shown(page: str, root: Path, run_guide: Run) -> None:
    problems = run_guide(root / "docs" / "guide" / page)
    assert not problems, "\n".join(problems)


def test_every_page_of_that_kind_is_run(root: Path) -> None:
    assert sorted(path.name for path in (root / "docs" / "guide").glob("*.md")) == PAGES


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("```console\n$ echo a\nb\n```\n", "'b' is not what is printed"),
        ("```console\n$ echo a\na\nb\n```\n", "'b' is not what is printed"),
        ("```console\n$ printf 'a\\nb\\n'\na\n```\n", "(the end of the output)"),
        ("```console\n$ echo a\n```\n", "(the end of the output)"),
        ("```console\n$ glass run nothing --input-text a\n...\n```\n", "exit status 2"),
        ("```console\n$ glass run nothing --input-text a\n...\n$ echo $?\n1\n```\n", "'1' is not what is printed"),
        ("```python\nprint(1 > 2)\n```\n\n<!-- output -->\n```text\nTrue\n```\n", "'True' is not what is printed"),
        ("```bash\nrm -rf /\n```\n", "neither run nor marked"),
    ],
)
def test_a_page_that_is_wrong_is_found(page: str, problem: str, tmp_path: Path, run_guide: Run) -> None:
    (tmp_path / "page.md").write_text(page)
    (found,) = run_guide(tmp_path / "page.md")
    assert problem in found


@pytest.mark.parametrize(
    "page",
    [
        "```console\n$ echo '0.25 seconds'\n0.5 seconds\n```\n",
        "```console\n$ printf 'a\\nb\\nc\\n'\na\n...\nc\n$ echo 'took long'\ntook ...\n```\n",
        "```console\n$ glass run nothing --input-text a\n...\n$ echo $?\n2\n```\n",
        "```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n<!-- output -->\n```text\n1\n```\n",
        "<!-- file: a.txt -->\n```json\n{}\n```\n\n```console\n$ cat a.txt\n{}\n```\n",
        "<!-- original -->\n```bash\nrm -rf /\n```\n",
    ],
)
def test_a_page_that_is_right_passes(page: str, tmp_path: Path, run_guide: Run) -> None:
    (tmp_path / "page.md").write_text(page)
    assert run_guide(tmp_path / "page.md") == []
