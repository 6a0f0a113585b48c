"""Text to tokens and back by foreign tokenizers, and chat templates, which are foreign programs: bounded, elsewhere.

They are compiled code: nothing interrupts them, and what fails in them may end the process. So text is taken apart in a
process of its own, with bounds on time and memory. Tokens become text again after every step, for which that would be
slow; how much a decoder can make of a token is bounded before it is used.

The sandbox keeps a template from the machine, and does not keep it from filling memory or running for ever: repeated
texts, nested loops, widths of formats. Each of them ends with the process, which may take so much memory and time.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from glassengine.errors import CorruptError, UsageError
from glassengine.reading.documents import parsed
from glassengine.reading.files import read_text, shown
from glassengine.reading.patterns import num_repeats

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

MOST_SECONDS = 20.0
MOST_MEMORY = 512 << 20
MOST_BYTES = 16 << 20
_ENDED, _RAISED = b"+", b"-"


def bounded(
    render: Callable[[], str],
    *,
    what: str = "a chat template",
    memory: int | None = None,
    seconds: float | None = None,
    most: int | None = None,
    quiet: bool = False,
) -> str:
    """Return what `render` returns; what it changes is not seen here.

    Where processes cannot be forked it is called as it is.

    Args:
        render: Foreign code.
        what: How to call it in an error.
        memory: Bytes beyond what this process has; None for `MOST_MEMORY`.
        seconds: Until it is stopped; None for `MOST_SECONDS`.
        most: Bytes of text; None for `MOST_BYTES`.
        quiet: Whether nothing that it prints to stderr is seen.

    Raises:
        CorruptError: It raised, or took too much time or memory.
    """
    if resource is None or sys.platform == "darwin":
        try:
            return render()
        except BaseException as error:  # compiled code may fail with something other than an `Exception`
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CorruptError(f"{what} failed", got=f"{type(error).__name__}: {error}"[:4000]) from error
    memory = MOST_MEMORY if memory is None else memory
    seconds = MOST_SECONDS if seconds is None else seconds
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # From Python 3.12 on, wherever there are threads. The child runs this template, and no code that takes locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _render(render, reader, writer, (memory, seconds), quiet=quiet)
    os.close(writer)
    try:
        answer = _answer(reader, what, seconds, MOST_BYTES if most is None else most)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    text = answer[1:].decode("utf-8", "replace")
    if answer[:1] == _ENDED:
        return text
    raise CorruptError(f"{what} failed", got=text or "its process ended: too much memory, or a crash")


def _render(render: Callable[[], str], reader: int, writer: int, bounds: tuple[int, float], *, quiet: bool) -> None:
    """Write the text and end the process; nothing of what belongs to the parent is run."""
    try:
        os.close(reader)
        # Ctrl-C reaches the parent as well, which alone stops this process.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            faulthandler.disable()  # it may write elsewhere
        # Most of the address space that this process has belongs to libraries and mapped files.
        pages = int(read_text("/proc/self/statm", most=1000).split()[0])
        memory, cpu = pages * os.sysconf("SC_PAGE_SIZE") + bounds[0], int(bounds[1]) + 1
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # compiled code aborts where it gets no memory
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu))
        try:
            answer = _ENDED + render().encode("utf-8", "replace")
        except BaseException as error:
            answer = _RAISED + f"{type(error).__name__}: {error}"[:4000].encode("utf-8", "replace")
        view = memoryview(answer)
        while view:
            view = view[os.write(writer, view) :]
    finally:
        os._exit(0)


def _answer(reader: int, what: str, seconds: float, most: int) -> bytes:
    end = time.monotonic() + seconds
    answer = bytearray()
    while True:
        left = end - time.monotonic()
        if left <= 0 or not select.select([reader], [], [], left)[0]:
            raise CorruptError(f"{what} does not end", got=f"{seconds:.0f} seconds")
        piece = os.read(reader, 1 << 16)
        if not piece:
            return bytes(answer)
        answer += piece
        if len(answer) > most:
            raise CorruptError(f"{what} writes too much", got=f"more than {most:,} bytes")


# Of the text: a token of one byte takes 200 bytes here and there, and up to 20 as it is sent.
_MEMORY_PER_BYTE = 512
_SENT_PER_BYTE = 32
_BYTES_PER_SECOND = 50_000
_MOST_ITEMS = 1 << 30
_MOST_GROWTH = 1024
_MOST_DECODERS = 1000
_MOST_REPEATS = 3
TextCallback = Callable[[str], None]


def encode(tokenizer: Any, prompts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
    """Tokenize as transformers does.

    Args:
        tokenizer: Of the model.
        prompts: Texts.
        add_special_tokens: False for text that has them already, as a chat template writes it.

    Raises:
        UsageError: A prompt has no tokens at all, or the tokenizer fails, or takes too much time or memory.
    """
    rows = token_rows(tokenizer, prompts, add_special_tokens=add_special_tokens)
    for text, row in zip(prompts, rows, strict=True):
        if not row:
            raise UsageError("the prompt has no tokens", got=repr(text), hint="--input-text TEXT")
    return rows


def token_rows(tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
    """Return the tokens of texts, of which there may be none.

    Raises:
        UsageError: As for `encode`.
    """

    def tokenized() -> str:
        given = {"add_special_tokens": add_special_tokens}
        return json.dumps([list(map(int, tokenizer(text, **given)["input_ids"])) for text in texts])

    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    bounds: dict[str, Any] = {
        "memory": MOST_MEMORY + _MEMORY_PER_BYTE * size, "seconds": MOST_SECONDS + size / _BYTES_PER_SECOND,
        "most": MOST_BYTES + _SENT_PER_BYTE * size,
    }  # fmt: skip
    try:
        answer = bounded(tokenized, what="the tokenizer", quiet=True, **bounds)
        return parsed(answer, list[list[int]], "what the tokenizer made", items=_MOST_ITEMS)
    except CorruptError as error:
        got = error.got if "failed" in error.what else f"{error.what}: {error.got}"
        raise UsageError("the tokenizer takes no prompt", got=got) from error


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of tokens, without the special ones.

    Raises:
        UsageError: The tokenizer fails.
    """
    try:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))
    except BaseException as error:
        # Of compiled code; not an `Exception`, so that it is not caught as an expected one.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        got = shown(f"{type(error).__name__}: {error}")[:400]
        raise UsageError("the tokenizer makes no text of these tokens", got=got) from error


def require_bounded_decoder(tokenizer: Any, where: str) -> None:
    """Refuse a tokenizer that can make a long text of a few tokens.

    Raises:
        CorruptError: It can.
    """
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return
    waiting: list[Any] = [parsed(decoder.__getstate__(), dict[str, Any], where, what="the decoder of the tokenizer")]
    growth, count = 1, 0
    while waiting:
        one = waiting.pop()
        waiting += one.get("decoders") or ()
        count += 1
        if one.get("type") == "Replace":
            growth *= _growth(one["pattern"], str(one["content"]), where)
        if growth > _MOST_GROWTH or count > _MOST_DECODERS:
            got = f"{shown(where)}: {count:,} decoders, {growth:,} characters of one"
            raise CorruptError("the decoder of the tokenizer is out of proportion", got=got)


def _growth(pattern: dict[str, str], content: str, where: str) -> int:
    """Return how many characters a replacement makes of one."""
    text = pattern.get("String")
    if text:
        return max(1, -(-len(content) // len(text)))
    repeats = num_repeats(pattern.get("Regex", ""))
    if repeats is None or repeats > _MOST_REPEATS:
        got = f"{shown(where)}: {shown(pattern.get('Regex', ''))[:400]}"
        raise CorruptError("a pattern of the tokenizer's decoder may never finish", got=got)
    return len(content) + 1  # of nothing, between all characters


class TextStream:
    """Turns tokens into pieces of text that never have to be taken back."""

    def __init__(self, tokenizer: Any, on_text: TextCallback) -> None:
        self._tokenizer, self._on_text = tokenizer, on_text
        self._sent = ""

    def put(self, tokens: Sequence[int]) -> None:
        """Send what is certain of all tokens so far: an unfinished character or trailing space may still change."""
        text = self._text(tokens)
        if not text.endswith("\ufffd"):
            self._send(text.rstrip(" "))

    def end(self, tokens: Sequence[int]) -> None:
        """Send the rest."""
        self._send(self._text(tokens))

    def _text(self, tokens: Sequence[int]) -> str:
        return decode(self._tokenizer, tokens)

    def _send(self, text: str) -> None:
        if len(text) > len(self._sent) and text.startswith(self._sent):
            self._on_text(text[len(self._sent) :])
            self._sent = text
