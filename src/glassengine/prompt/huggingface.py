"""A directory of transformers as a side: its tokenizer, chat template and generation settings."""

from __future__ import annotations

import filecmp
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from glassengine.prompt.loading import has_weights, loaded
from glassengine.prompt.processors import of_directory
from glassengine.prompt.settings import TOKENS, stated_in
from glassengine.prompt.side import (
    SPECIAL,
    Conversation,
    Loaded,
    OpenedSide,
    Processed,
    PromptSetting,
    PromptSide,
    Vocabulary,
    numbers_of,
    pieces_of,
)
from glassengine.reading.documents import read_document

_MOST_BYTES = 64 << 20


class Directory(PromptSide):
    """Tokenizer, processors and checkpoint as transformers loads them; code in the directory is never run."""

    engine = "transformers"
    weighs = True
    """Whether transformers loads the checkpoint."""

    def __init__(self, path: Path) -> None:
        vocabulary, template = self._tokens(path) if has_any(path, TOKENIZERS) else (None, None)
        config = document(path / "config.json")
        self._path, self._processors = path, {key: 0 for name in PROCESSORS for key in document(path / name)}
        self.opened = OpenedSide(
            self.engine,
            vocabulary,
            template,
            settings=self.settings(path),
            rows=_rows(config),
            has_processor=bool(self._processors),
            has_weights=self.weighs and has_weights(path),
        )

    def _tokens(self, path: Path) -> tuple[Vocabulary, str | None]:
        """Open the tokenizer; return its vocabulary and chat template."""
        self._tokenizer = self.opened_tokenizer(path)
        self._tokenizer.model_max_length = 1 << 62  # transformers warns of texts that are longer
        added = {number: token.content for number, token in self._tokenizer.added_tokens_decoder.items()}
        special = {name: numbers_of(getattr(self._tokenizer, f"{name}_token_id", None)) for name in SPECIAL}
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        return Vocabulary(pieces_of(self._tokenizer.get_vocab(), added), special, added), template

    def opened_tokenizer(self, path: Path) -> Any:
        """Return the tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)

    def settings(self, path: Path) -> dict[str, PromptSetting] | None:
        """Return the generation settings."""
        return settings_of(path, document(path / "config.json"))

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the ids of each text."""
        return [self._tokenizer.encode(text, add_special_tokens=special) for text in texts]

    def encode_by_file(self, texts: Sequence[str]) -> list[list[int]] | None:
        """Return the ids of `tokenizer.json`, or of a sentencepiece file: transformers may replace parts of either."""
        return None if self._by_file is None else self._by_file(texts)

    @functools.cached_property
    def _by_file(self) -> Callable[[Sequence[str]], list[list[int]]] | None:
        file, model = self._path / "tokenizer.json", self._path / "tokenizer.model"
        if file.is_file():
            from tokenizers import Tokenizer

            own = Tokenizer.from_file(str(file))
            own.no_truncation()
            own.no_padding()
            return lambda texts: [one.ids for one in own.encode_batch(list(texts), add_special_tokens=False)]
        with suppress(ImportError):
            return functools.partial(SentencepieceFile(model).encode, special=False) if model.is_file() else None
        return None

    def render(self, conversation: Conversation) -> str:
        """Return the text of a conversation."""
        return rendered(self._tokenizer.apply_chat_template, conversation)

    def process(self) -> Mapping[str, Processed | str]:
        """Return what the processors of transformers do."""
        return of_directory(self._path, self._processors)

    def load(self) -> Loaded:
        """Return what transformers takes of the checkpoint."""
        try:
            return loaded(self._path)
        except Exception as error:  # of a class of transformers, about the configuration
            return Loaded(0, reason=f"{type(error).__name__}: {error}")


class SentencepieceFile(PromptSide):
    """A sentencepiece model as a side: it never reads special text as special."""

    def __init__(self, path: Path) -> None:
        import sentencepiece

        self._model: Any = sentencepiece.SentencePieceProcessor(str(path))
        size = len(self._model)
        texts = [self._model.id_to_piece(number) for number in range(size)]
        is_special = [self._model.is_control(number) or self._model.is_unknown(number) for number in range(size)]
        added = {number: text for number, text in enumerate(texts) if is_special[number]}
        special = {name: numbers_of(getattr(self._model, f"{name}_id")()) for name in SPECIAL}
        pieces = pieces_of({text: number for number, text in enumerate(texts)}, added)
        vocabulary = Vocabulary(pieces, special, added, reads_special=False)
        self.opened = OpenedSide("sentencepiece", vocabulary, has_templates=False)

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the ids of each text; the library adds a BOS only when it is asked for."""
        return [list(self._model.encode(text, add_bos=special)) for text in texts]


TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt", "vocab.json", "tekken.json")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def has_any(path: Path, names: Sequence[str]) -> bool:
    """Whether a directory has one of some files."""
    return any((path / name).is_file() for name in names)


def rendered(apply: Any, conversation: Conversation) -> str:
    """Return what `apply_chat_template` of transformers makes of a conversation.

    Raises:
        ValueError: The template refuses it.
    """
    options = dict(conversation)
    messages = options.pop("messages")
    try:
        return str(apply(messages, tokenize=False, **options))
    except TimeoutError:  # of this package
        raise
    except Exception as error:  # of a template, which is a program
        raise ValueError(f"{type(error).__name__}: {error}") from None


def rendered_by_transformers(template: str | None, vocabulary: Vocabulary, conversation: Conversation) -> str:
    """Return what transformers' Jinja makes of a template, with the special tokens of a vocabulary.

    Raises:
        ValueError: The template refuses the conversation.
    """
    from transformers import PreTrainedTokenizerBase

    texts = {
        f"{name}_token": vocabulary.pieces[ids[0]].decode("utf-8", "replace")
        for name, ids in vocabulary.special.items()
        if ids
    }
    tokenizer = PreTrainedTokenizerBase(**texts)
    return rendered(functools.partial(tokenizer.apply_chat_template, chat_template=template), conversation)


_NAMES = (
    "*token*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "chat_template*",
    "*processor_config.json",
    "tekken*",
)
"""Files of tokenizers, templates and processors."""


def same_files(ours: Path, theirs: Path) -> int:
    """Return how many files of the prompt two directories have, with the same bytes and settings; 0 where not."""
    names, others = (
        {path.name for pattern in _NAMES for path in folder.glob(pattern) if path.is_file()}
        for folder in (ours, theirs)
    )
    facts = []
    for folder in (ours, theirs):
        config = document(folder / "config.json")
        settings = settings_of(folder, config) or {}
        facts.append([{name: one.value for name, one in settings.items()}, config.get("model_type"), _rows(config)])
    if facts[0] != facts[1] or names != others or (ours / "additional_chat_templates").exists():
        return 0
    is_same = all(filecmp.cmp(ours / name, theirs / name, shallow=False) for name in names)
    return len(names) if is_same else 0


def _rows(config: Mapping[str, Any]) -> int | None:
    """Return the rows of the table of embeddings."""
    text = config.get("text_config")
    rows = (text if isinstance(text, dict) else config).get("vocab_size")
    return rows if isinstance(rows, int) else None


def settings_of(path: Path, config: Mapping[str, Any]) -> dict[str, PromptSetting] | None:
    """Return what generation_config.json states, and of token ids what config.json does; None without either file."""
    file = path / "generation_config.json"
    if not config and not file.is_file():
        return None
    return stated_in(config, "config.json: ", TOKENS) | stated_in(document(file), "generation_config.json: ")


def document(path: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one where the file is missing.

    Raises:
        CorruptError: The file is no JSON object.
    """
    if not path.is_file():
        return {}
    content: dict[str, Any] = read_document(path, dict, most=_MOST_BYTES)
    return content


def described(path: Path) -> Vocabulary:
    """Return the vocabulary of a `tokenizer.json`, for engines that read it and do not list it."""
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(path))
    added = {number: token.content for number, token in own.get_added_tokens_decoder().items()}
    config = document(path.with_name("tokenizer_config.json"))
    special = {}
    for name in SPECIAL:
        token = config.get(f"{name}_token")
        text = token.get("content") if isinstance(token, dict) else token
        special[name] = numbers_of(own.token_to_id(text)) if isinstance(text, str) else ()
    return Vocabulary(pieces_of(own.get_vocab(True), added), special, added)
