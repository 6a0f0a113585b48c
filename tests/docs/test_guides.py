"""Every block of the guide pages runs, and prints what the page shows."""

from __future__ import annotations

import functools
import operator
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import glassengine as glass
from glassengine.cli.foreign import absent, ours
from glassengine.cli.main import COMMANDS, load_command
from tests.docs.conftest import blocks_of

Run = Callable[[Path], list[str]]

PAGES = [
    "a-kernel-beside-its-reference.md",
    "causes-of-another-prompt.md",
    "coding-agents.md",
    "coming-from-ditto.md",
    "coming-from-pytorch-neuronx-eager-debug.md",
    "coming-from-pytorch-neuronx-snapshots.md",
    "coming-from-pytorch-neuronx-steps.md",
    "coming-from-pytorch-neuronx.md",
    "coming-from-tensorrt-llm-whole-models.md",
    "coming-from-tensorrt-llm.md",
    "coming-from-transformers.md",
    "continuous-integration.md",
    "kernels-that-tolerances-judge-wrongly.md",
    "my-dump-comes-from-another-framework.md",
    "my-dump-comes-from-tinygrad-or-cpp.md",
    "my-rollout-is-not-my-policy.md",
    "my-server-answers-differently.md",
    "my-server-executorch.md",
    "my-server-llama-cpp.md",
    "my-server-onnx-runtime-genai.md",
    "my-server-others.md",
    "my-server-vllm.md",
    "notebooks-and-viewers.md",
    "onnx-and-pt2.md",
    "quantized-and-adapted.md",
    "temperature-0-and-still-another-answer.md",
    "the-prompt-differs.md",
    "trust.md",
    "watching.md",
    "what-kind-of-mistake.md",
]


NEEDS = {"continuous-integration.md": "jq"}
"""What a page uses of the machine."""
ELSEWHERE = (
    "my-dump-comes-from-another-framework.md",
    "my-dump-comes-from-tinygrad-or-cpp.md",
    "my-server-executorch.md",
    "my-server-vllm.md",
)
"""Pages of packages in an environment of their own: run by `tests/foreign` and `tests/serving_engines`."""


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE])
def test_every_block_runs_and_prints_what_is_shown(page: str, root: Path, run_guide: Run) -> None:
    if page in NEEDS and shutil.which(NEEDS[page]) is None:
        pytest.skip(f"{NEEDS[page]} is not on this machine")
    if page == "quantized-and-adapted.md":
        pytest.importorskip("peft")
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


BULLET = re.compile(r"^- (?:.*\n)(?:  .*\n)*", re.MULTILINE)


@functools.cache
def executed(page: str) -> str:
    return "\n".join(block.text for block in blocks_of(page) if block.mark != "original")


def codes_of(page: str) -> Iterator[tuple[str, str]]:
    """Yield (bullet, inline code) of everything that a bullet names in code."""
    for bullet in BULLET.findall(re.sub(r"^```.*?^```|^<!--.*?-->", "", page, flags=re.DOTALL | re.MULTILINE)):
        for code in re.findall(r"`([^`]+)`", bullet):
            yield bullet, " ".join(code.split())


@functools.cache
def flags_of(command: str) -> set[str]:
    parameters = load_command(command).params
    return {flag for parameter in parameters for flag in (*parameter.opts, *parameter.secondary_opts)}


def unchecked(bullet: str, code: str, page: str, source: str) -> str | None:
    """Return what is wrong with a piece of code in a bullet: a name that is not there, or a call that nothing runs."""
    words = code.split()
    if words[0] == "glass" and len(words) > 1:
        if words[1] not in COMMANDS:
            return f"no command {words[1]}"
        known, asked = flags_of(words[1]), [word for word in words[2:] if word.startswith("--")]
    else:
        known = {flag for name in COMMANDS for flag in flags_of(name)}
        asked = [word for word in words if word.startswith("--") and words[0].startswith("--")]
    for flag in asked:
        name = flag.partition("=")[0]
        if bullet.startswith("- Not there:"):
            if f"--{ours(name[2:])}" in known or absent(name) is None:
                return f"{name} is there, or is not told of"
        elif f"--{ours(name[2:])}" not in known:
            return f"no flag {name}"
    if words[0].startswith("--") or words[0] == "glass":
        return None
    if attributes := re.match(r"glass\.(\w+(?:\.\w+)*)", code):
        try:
            operator.attrgetter(attributes[1])(glass)
        except AttributeError:
            return f"no {attributes[0]}"
    if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+(=\S+)?", code):
        return None if code.partition("=")[0].lower() in source else "no such variable"
    for call in re.findall(r"([A-Za-z_]\w*)\(", code) + re.findall(r"\b([a-z_]\w*)=", code):
        if not re.search(rf"\b{call}\s*[(=]", executed(page)):
            return f"nothing on the page runs {call}"
    return None


@pytest.fixture(scope="module")
def source(root: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8").lower() for path in (root / "src").rglob("*.py"))


@pytest.mark.parametrize("page", PAGES)
def test_f37_code_in_bullets_is_there_and_runs(page: str, root: Path, source: str) -> None:
    text = (root / "docs" / "guide" / page).read_text(encoding="utf-8")
    problems = {code: unchecked(bullet, code, text, source) for bullet, code in codes_of(text)}
    assert not {code: problem for code, problem in problems.items() if problem is not None}


@pytest.mark.parametrize(
    ("bullet", "problem"),
    [
        ("- Same: `glass biuld x`\n", "no command biuld"),
        ("- Same: `glass build x --no-such`\n", "no flag --no-such"),
        ("- `--engine_dir` and `--no-such DIR`\n", "no flag --no-such"),
        ("- Not there: `--backend`\n", "is there, or is not told of"),
        ("- Not there: `--cp-size`, `--peft-ids`\n", None),
        ("- Better: `glass.no_such`\n", "no glass.no_such"),
        ("- Better: `glass.metrics.no_such`\n", "no glass.metrics.no_such"),
        ("- Better: `glass.record(net, 1)` does\n  it\n", "nothing on the page runs record"),
        ("- Better: `record(...)`\n\n```python\nrecord(1)\n```\n", None),
        ("- Better: `record(...)`\n\n<!-- check\nrecord(1)\n-->\n", None),
        (
            "- Better: `record(...)`\n\n<!-- original -->\n```python\nrecord(1)\n```\n",
            "nothing on the page runs record",
        ),
        ("- Better: `debug=`\n", "nothing on the page runs debug"),
        ("- `NO_SUCH_VARIABLE=1` and `--metrics`\n", "no such variable"),
        ("- `XLA_FLAGS` and `layers.*.mlp`\n", None),
    ],
)
def test_a_bullet_that_is_wrong_is_found(bullet: str, problem: str | None) -> None:
    found = [unchecked(where, code, bullet, "xla_flags") for where, code in codes_of(bullet)]
    assert next((str(one) for one in found if one is not None), "None").endswith(str(problem))


def test_a_check_that_fails_is_found(tmp_path: Path, run_guide: Run) -> None:
    (tmp_path / "page.md").write_text("text\n\n<!-- check\nassert 1 > 2\n-->\n")
    with pytest.raises(AssertionError):
        run_guide(tmp_path / "page.md")
