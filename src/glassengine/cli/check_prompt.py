"""`glass check-prompt`: compare tokens, chat templates and generation settings of two sides, without a forward pass."""

from __future__ import annotations

from typing import Annotated

import typer

import glassengine as glass
from glassengine.cli.documents import answer
from glassengine.cli.options import print_answer
from glassengine.cli.shared import Python
from glassengine.report.terminal_without_tensors import prompt

_FORMS = "Directory of transformers, FILE.gguf, genai:DIR, openvino:DIR, vllm:DIR, or FILE.model of sentencepiece."


def command(
    baseline: Annotated[str, typer.Argument(metavar="BASELINE", help=f"Reference: {_FORMS}", show_default=False)],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="The same kinds.", show_default=False)],
    python: Python = None,
) -> int:
    """Compare tokenizer, chat template and generation settings of two sides.

    No model is run. Exit status: 0 the same, 1 something differs, 4 no tokens were comparable.
    """
    result = glass.check_prompt(baseline, candidate, python=python)
    answer(result.to_dict, lambda: print_answer(prompt(result)))
    if result.ok:
        return 0
    return 1 if result.wrong else 4
