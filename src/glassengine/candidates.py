"""The kinds of candidates of `glass check`: what users write, and which options a kind refuses, and why.

This is the one list of them. `--help` and error messages are made from it, a test holds the README against it, and
`diagnose.router` has the handler of each kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from glassengine.asked import is_factory
from glassengine.errors import UnknownNameError, UsageError
from glassengine.extensions import SERVING, registered
from glassengine.stores.objects import EXTRAS

FLAGS = {
    "map": "--map",
    "layout": "--layout",
    "session_options": "--session-options",
    "backend": "--backend",
    "quantize": "--quantize",
    "passes": "--pass",
    "all_levels": "--all-levels",
    "bisect_outputs": "--bisect-outputs",
    "accumulation": "--accum",
    "reproduction": "--reproduction",
    "tensor_parallel": "--tensor-parallel",
    "pipeline_parallel": "--pipeline-parallel",
    "jobs": "--jobs",
    "graft": "--graft",
    "graft_until_clean": "--graft-until-clean",
}
"""Argument of `glass.check` -> flag, of the options that some kind refuses."""


@dataclass(frozen=True)
class Refusal:
    """Why a kind of candidate cannot honor an option."""

    what: str
    hint: str | None = None


@dataclass(frozen=True)
class CandidateKind:
    """A kind of candidate.

    Attributes:
        name: In a word.
        forms: What users write -> what it is.
        refuses: Flag -> why.
    """

    name: str
    forms: Mapping[str, str]
    refuses: Mapping[str, Refusal] = field(default_factory=dict)


def _each(flags: Iterable[str], what: str, hint: str | None = None) -> dict[str, Refusal]:
    return {flag: Refusal(what.format(flag=flag), hint) for flag in flags}


def _not_served(*flags: str) -> dict[str, Refusal]:
    return _each(flags, "{flag} is not for a serving engine", "leave it out")


_LAYOUT = _each(["--layout"], "{flag} is for a recording of a serving engine")
_MAP = _each(["--map"], "{flag} is for a record of tensors")
_SESSION = _each(
    ["--session-options"],
    "{flag} are for an ONNX file as candidate",
    "glass check MODEL --candidate model.onnx",
)
_BUILD = _each(
    ["--tensor-parallel", "--pipeline-parallel", "--quantize"], "{flag} is for the engine that a check builds"
)
_LEVELS = _each(["--all-levels", "--bisect-outputs"], "--all-levels and --bisect-outputs are for engines") | _each(
    ["--backend", "--pass"], "--backend and --pass build an engine of BASELINE", "remove them, or --candidate MODEL"
)
_SERVED = _not_served("--map", "--pass", "--accum", "--all-levels", "--bisect-outputs", "--jobs")
_GRAFT = _each(["--graft", "--graft-until-clean"], "{flag} is for a model as candidate", "--candidate MODEL")
_OPS = _each(["--reproduction", "--accum"], "--reproduction and --accum are for ops")
_WRITES = _each(["--quantize"], "matrices are rounded by back-ends that write models", "--backend gguf")

BUILT = CandidateKind("built", {}, _LAYOUT | _MAP | _SESSION | _WRITES | _GRAFT)
WRITTEN = CandidateKind(
    "written", {}, _LAYOUT | _SERVED | _SESSION | _GRAFT | _not_served("--tensor-parallel", "--pipeline-parallel")
)
SERVED = CandidateKind(
    "served",
    {
        "gguf:FILE": "a GGUF file, run by llama.cpp",
        "genai:DIR": "a folder of ONNX Runtime GenAI",
        "vllm:DIR": "a model, run by vLLM",
        "executorch:FILE": "a .pte file of ExecuTorch",
        "openvino:DIR": "a decoder of OpenVINO",
    },
    _SERVED | _SESSION | _BUILD | _GRAFT | _not_served("--backend"),
)
ENGINE = CandidateKind(
    "engine", {"ENGINE": "a directory that glass build wrote"}, _LAYOUT | _MAP | _SESSION | _BUILD | _GRAFT
)
RECORD = CandidateKind(
    "record", {"RECORD": "a recording, or a dump of another tool"}, _LAYOUT | _SESSION | _BUILD | _LEVELS | _GRAFT
)
QUANTIZED = CandidateKind("quantized", {}, _LAYOUT | _MAP | _SESSION | _BUILD | _LEVELS | _OPS | _GRAFT)
QUANTIZED_MODEL = CandidateKind("quantized model", {}, _OPS | _GRAFT)
"""A model that turns out to be quantized when it is loaded."""
MODEL = CandidateKind(
    "model",
    {"TARGET": "a Hugging Face directory or id, an adapter, file.py:factory, package.module:factory, .onnx or .pt2"},
    _LAYOUT | _MAP | _BUILD | _LEVELS,
)
GIVEN = CandidateKind("given", {}, _BUILD)
"""Any candidate that is given, whatever kind it turns out to be."""
KINDS = (BUILT, WRITTEN, SERVED, ENGINE, RECORD, QUANTIZED, MODEL)


def forms() -> str:
    """Return what `--candidate` takes, for `--help`."""
    return ", ".join(form for kind in (MODEL, ENGINE, RECORD, SERVED) for form in kind.forms)


def expected() -> str:
    """Return what a candidate may be, in words, for errors."""
    return "; ".join(f"{form}: {words}" for kind in KINDS for form, words in kind.forms.items())


def require_kind(candidate: object) -> None:
    """Require that the word before the colon of `word:PLACE` is a kind of served file.

    Raises:
        UnknownNameError: It is none, and names no store, function or path either.
    """
    word, colon, _ = candidate.partition(":") if isinstance(candidate, str) else ("", "", "")
    known = [form.partition(":")[0] for form in SERVED.forms] + list(registered(SERVING))
    if (
        not colon
        or len(word) < 2
        or not re.fullmatch(r"[a-z][a-z0-9_-]*", word)
        or word in (*known, *EXTRAS, "file", "local")
    ):
        return
    if not is_factory(str(candidate)) and not Path(str(candidate)).exists():
        raise UnknownNameError("kind of candidate", word, known, hint=f"--candidate is {expected()}")


def flags_of(**arguments: object) -> list[str]:
    """Return the flags of the arguments of `glass.check` that were given, as far as some kind refuses them."""
    return [
        flag
        for name, flag in FLAGS.items()
        if arguments.get(name) and not (type(arguments[name]) is int and arguments[name] == 1)
    ]


def refuse(kind: CandidateKind, flags: Iterable[str], candidate: object, *, honored: Iterable[str] = ()) -> None:
    """Raise if a kind of candidate cannot honor an option.

    Args:
        kind: Of the candidate.
        flags: That were given.
        candidate: As it was given; None for what the check builds.
        honored: Flags that this candidate honors all the same.

    Raises:
        UsageError: It cannot.
    """
    for flag in flags:
        if flag in kind.refuses and flag not in honored:
            refusal = kind.refuses[flag]
            got = "no --candidate" if candidate is None else f"the candidate {candidate}"
            raise UsageError(refusal.what, got=got, hint=refusal.hint)
