"""The process in which both sides live: what it reads may crash it, or ask for all memory or time.

A tokenizer of Rust or C++ may end its process on a hostile file, and a chat template is a program. So they run in a
process with limits of memory and processor time. To import transformers takes longer than to open most tokenizers:
both sides share one process.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from glassengine.asked import function, is_factory
from glassengine.errors import BackendError, CorruptError, GlassError, UsageError, first_line
from glassengine.extensions import plugin
from glassengine.prompt.huggingface import PROCESSORS, TOKENIZERS, Directory, SentencepieceFile, has_any
from glassengine.prompt.side import Conversation, Loaded, NoTokenizer, Processed, PromptSide
from glassengine.workers.processes import Processes
from glassengine.workers.protocol import Died

MEMORY = 12 << 30
"""Bytes of address space: libraries reserve some that they never use."""
SECONDS = 240
"""Of processor time, for all requests together."""
_RENDERING = 10
"""Seconds of processor time for all conversations of a side."""
_LONGEST = 1 << 22
"""Characters of a rendered conversation."""

_READ = (*TOKENIZERS, *PROCESSORS, "merges.txt", "chat_template.jinja", "added_tokens.json", "config.json")
"""Files that libraries read whole."""
_MOST_BYTES = 128 << 20
EXPECTED = (
    "a directory of transformers, FILE.gguf, genai:DIR, openvino:DIR, vllm:DIR, FILE.model of sentencepiece, or "
    "file.py:factory"
)
"""Forms of a side."""

_sides: dict[str, PromptSide] = {}
_seconds_left: dict[str, float] = {}
"""Side -> what is left of `_RENDERING`."""


def answer(request: tuple[str, str, dict[str, Any]]) -> Any:
    """Open a side, or ask the one that is open; runs in the worker.

    Raises:
        GlassError: The side cannot be opened.
    """
    name, verb, value = request
    if verb == "open":
        _limit()
        gc.disable()  # it takes half of the time in which large vocabularies are parsed
        try:
            _sides[name] = _open(value["spec"])
        except (GlassError, KeyboardInterrupt):
            raise
        except BaseException as error:  # of Rust: no Exception
            raise UsageError(
                "the tokenizer cannot be opened", got=f"{value['spec']}: {first_line(error) or type(error).__name__}"
            ) from None
        return _sides[name].opened
    side = _sides[name]
    if verb.startswith("render"):
        return _rendered(name, getattr(side, verb), value["conversation"])
    return getattr(side, verb)(**value)


def _rendered(name: str, render: Callable[[Conversation], str | None], conversation: Conversation) -> Any:
    """Return a text and None, or None and why there is none: a template is a program, which may run for ever."""

    def stop(*_: object) -> None:
        raise TimeoutError

    begun, left = time.process_time(), _seconds_left.get(name, _RENDERING)
    can_stop = hasattr(signal, "setitimer")
    try:
        if left <= 0:
            raise TimeoutError
        if can_stop:
            signal.signal(signal.SIGVTALRM, stop)
            signal.setitimer(signal.ITIMER_VIRTUAL, left)
        text = render(conversation)
        is_long = text is not None and len(text) > _LONGEST
        return (None, f"more than {_LONGEST:,} characters") if is_long else (text, None)
    except TimeoutError:
        return None, f"more than {_RENDERING} s for the conversations so far"
    except ValueError as error:
        return None, str(error)
    except (MemoryError, RecursionError) as error:
        return None, type(error).__name__
    finally:
        if can_stop:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        _seconds_left[name] = left - (time.process_time() - begun)


def _limit() -> None:
    if sys.platform == "win32":
        return
    import resource

    for kind, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, SECONDS)):
        _, hard = resource.getrlimit(kind)
        with suppress(ValueError, OSError):
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _open(spec: str) -> PromptSide:
    kind, path = kind_of(spec)
    for file in [path] if kind == "sentencepiece" else [path / name for name in _READ]:
        if file.is_file() and (size := file.stat().st_size) > _MOST_BYTES:
            expected = f"at most {_MOST_BYTES:,} bytes"
            raise CorruptError("a file is too large", got=f"{file}: {size:,} bytes", expected=expected)
    if kind == "gguf":
        return plugin("serving.ggml.prompt").GgufSide(path)  # type: ignore[no-any-return]
    if kind == "genai":
        return plugin("serving.prompts").GenaiSide(path)  # type: ignore[no-any-return]
    if kind == "vllm":
        return plugin("serving.prompts").VllmSide(path)  # type: ignore[no-any-return]
    if kind == "openvino":
        return plugin("serving.prompts").OpenvinoSide(path)  # type: ignore[no-any-return]
    if kind == "port":
        from glassengine.prompt.port import TokenizerPort

        baseline = _sides.get("baseline")
        return TokenizerPort(spec, None if baseline is None else baseline.opened.vocabulary)
    return SentencepieceFile(path) if kind == "sentencepiece" else Directory(path)


def kind_of(spec: str) -> tuple[str, Path]:
    """Return the kind of a side and its path.

    Raises:
        UsageError: It is no file or directory with a tokenizer.
    """
    prefix, _, rest = spec.partition(":")
    if prefix in ("gguf", "genai", "openvino", "vllm") and rest:
        kind, path = prefix, Path(rest)
    elif is_factory(spec):
        function(spec)
        return "port", Path(rest)
    else:
        path = Path(spec)
        kind = {".gguf": "gguf", ".model": "sentencepiece"}.get(path.suffix, "directory")
    if kind not in ("gguf", "sentencepiece"):
        if not path.is_dir():
            raise UsageError("no such directory", got=spec, expected=EXPECTED)
        more = {"directory": TOKENIZERS + PROCESSORS, "openvino": ("openvino_tokenizer.xml",)}
        names = more.get(kind, TOKENIZERS)
        if not has_any(path, names):
            raise NoTokenizer("the directory has no tokenizer", got=spec, expected=", ".join(TOKENIZERS[:4]))
    elif not path.is_file():
        raise UsageError("no such file", got=spec, expected=EXPECTED)
    return kind, path


_STARTS = """
import importlib, importlib.util as util, sys
here = sys.argv[1:]
spec = util.spec_from_file_location("glassengine", here[0] + "/__init__.py", submodule_search_locations=here)
sys.modules["glassengine"] = package = util.module_from_spec(spec)
spec.loader.exec_module(package)
importlib.import_module("glassengine.workers.pipe").serve(importlib.import_module("glassengine.prompt.worker").answer)
"""


def worker_in(python: str | Path | None) -> Processes:
    """Return a process of another interpreter: it has this package of here, and msgspec and all others of its own.

    Raises:
        UsageError: There is no such interpreter.
    """
    given = Path(python or sys.executable)
    if not given.is_file():
        raise UsageError("no such interpreter", got=str(given), hint="--python VENV/bin/python, of vLLM's environment")
    here = str(Path(__file__).parent.parent)
    return Processes(answer, 1, [str(given.absolute()), "-I", "-c", _STARTS, here])


class RemoteSide(PromptSide):
    """A side in the process of a comparison.

    Raises:
        GlassError: The files cannot be read, or ended the process.
    """

    def __init__(self, name: str, spec: str, workers: Processes) -> None:
        self.name, self.spec, self._workers = name, spec, workers
        self.opened = self._ask("open", spec=spec)

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the ids of each text."""
        return self._ask("encode", texts=texts, special=special)  # type: ignore[no-any-return]

    def encode_by_file(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the bare ids by the tokenizer's file alone."""
        return self._ask("encode_by_file", texts=texts)  # type: ignore[no-any-return]

    def render(self, conversation: Conversation) -> str:
        """Return the text of a conversation."""
        return str(self._text("render", conversation))

    def render_by_file(self, conversation: Conversation) -> str | None:
        """Return the text that transformers makes of the side's own template."""
        return self._text("render_by_file", conversation)

    def process(self) -> Mapping[str, Processed | str]:
        """Return what the processors do."""
        return self._ask("process")  # type: ignore[no-any-return]

    def load(self) -> Loaded:
        """Return what the model takes of its checkpoint."""
        return self._ask("load")  # type: ignore[no-any-return]

    def _text(self, verb: str, conversation: Conversation) -> str | None:
        text: str | None
        text, error = self._ask(verb, conversation=conversation)
        if error is not None:
            raise ValueError(error)
        return text

    def _ask(self, verb: str, **value: Any) -> Any:
        (found,) = self._workers.run([(self.name, verb, value)], attempts=1)
        if isinstance(found, Died):
            raise BackendError(
                "the process of a tokenizer has ended",
                got=f"{self.spec}: {found.reason}",
                expected=f"at most {MEMORY >> 30} GiB and {SECONDS} s of processor time",
            )
        return found
