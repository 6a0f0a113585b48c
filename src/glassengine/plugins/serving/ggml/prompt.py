"""A GGUF file as a side of a prompt comparison: llama.cpp tokenizes, and reads no tensor."""

from __future__ import annotations

import ctypes as c
import importlib
import importlib.util
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from datetime import datetime
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from glassengine.errors import UsageError
from glassengine.plugins.serving.ggml.child import find_library
from glassengine.plugins.serving.ggml.file import GgufFile, Many
from glassengine.plugins.serving.ggml.library import LOG, LOGGED, Library, Opaque, Pointer, logged
from glassengine.prompt.huggingface import rendered_by_transformers
from glassengine.prompt.side import (
    Conversation,
    NoTokenizer,
    OpenedSide,
    PromptSetting,
    PromptSide,
    Vocabulary,
    bytes_of,
    numbers_of,
    require_countable,
)

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "llama_vocab_bos": (c.c_int32, [Pointer]),
    "llama_vocab_eos": (c.c_int32, [Pointer]),
    "llama_vocab_pad": (c.c_int32, [Pointer]),
    "llama_vocab_is_eog": (c.c_bool, [Pointer, c.c_int32]),
    "llama_vocab_get_attr": (c.c_int, [Pointer, c.c_int32]),
    "llama_vocab_get_text": (c.c_char_p, [Pointer, c.c_int32]),
    "llama_vocab_type": (c.c_int, [Pointer]),
    "llama_tokenize": (
        c.c_int32,
        [Pointer, c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool],
    ),
}
_STYLES = {1: "pieces", 2: "bytes", 3: "plain", 4: "pieces"}
"""llama_vocab_type -> how pieces are spelled."""
_UNKNOWN, _CONTROL, _USER_DEFINED = 1, 8, 16
"""Attributes of a token."""
_VOCAB_ONLY = 72
"""Where recent builds have `vocab_only` in `llama_model_params`; found by trial elsewhere."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Key below `general.sampling` -> name of transformers."""
_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0}
_BPE = 2
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_NORMS = ("attn_norm", "ffn_norm")
_NOTHING: Mapping[str, str] = {}
_LIMITS = {
    "end token split": "llama.cpp knows ends of a generation by their names, whatever the file says of them",
}
_LIMITS_OF_BPE = _LIMITS | {"normalization": "llama.cpp does not normalize texts for BPE vocabularies"}


class GgufSide(PromptSide):
    """The vocabulary of a GGUF file in llama.cpp.

    Raises:
        NoTokenizer: The file has no vocabulary.
        UsageError: llama.cpp does not load it.
        CorruptError: The file is damaged.
    """

    def __init__(self, path: Path) -> None:
        file = GgufFile(path)
        model = file.settings.get("tokenizer.ggml.model")
        if model in (None, "none"):
            raise NoTokenizer("the GGUF file has no tokenizer", got=str(path), hint="convert it with its tokenizer")
        tokens = file.settings.get("tokenizer.ggml.tokens")
        require_countable(tokens.number if isinstance(tokens, Many) else len(tokens or ()))
        self._renderer: _Renderer | None = None
        self._library = Library(str(find_library(None)))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
        self._library.llama_log_set(LOG, None)
        self._library.llama_backend_init()
        self._model = _load(self._library, path, _vocab_only(self._library))
        if not self._model:
            raise UsageError("llama.cpp does not load the vocabulary", got=f"{path}: {logged()}")
        self._vocab = self._library.llama_model_get_vocab(self._model)
        self._room = (c.c_int32 * (1 << 20))()
        warnings = [line for line in LOGGED if "pre-tokenizer" in line or "DEGRADED" in line]
        vocabulary = self._vocabulary(file)
        template = file.settings.get("tokenizer.chat_template")
        table = file.tensors.get("token_embd.weight")
        self.opened = OpenedSide(
            "llama.cpp",
            vocabulary,
            template if isinstance(template, str) else None,
            variables={"enable_thinking": True, "date_string": f"{datetime.now():%d %b %Y}"},
            settings=self._settings(file, vocabulary),
            rows=None if table is None else table.shape[0],
            limits=_LIMITS_OF_BPE if self._library.llama_vocab_type(self._vocab) == _BPE else _LIMITS,
            warnings=warnings,
        )

    def _vocabulary(self, file: GgufFile) -> Vocabulary:
        library, vocab = self._library, self._vocab
        size = library.llama_vocab_n_tokens(vocab)
        texts = [library.llama_vocab_get_text(vocab, number).decode("utf-8", "replace") for number in range(size)]
        attributes = [library.llama_vocab_get_attr(vocab, number) for number in range(size)]
        added = {number: texts[number] for number in range(size) if attributes[number] & (_CONTROL | _USER_DEFINED)}
        style = _STYLES.get(library.llama_vocab_type(vocab), "plain")
        pieces = [text.encode() if number in added else bytes_of(text, style) for number, text in enumerate(texts)]
        ends = [number for number in added if library.llama_vocab_is_eog(vocab, number)]
        eos = library.llama_vocab_eos(vocab)
        special = {
            "bos": numbers_of(library.llama_vocab_bos(vocab)),
            "eos": tuple(dict.fromkeys([*numbers_of(eos), *ends])),
            "pad": numbers_of(library.llama_vocab_pad(vocab)),
            "unk": tuple(number for number in range(size) if attributes[number] & _UNKNOWN)[:1],
        }
        return Vocabulary(pieces, special, added)

    @staticmethod
    def _settings(file: GgufFile, vocabulary: Vocabulary) -> dict[str, PromptSetting]:
        settings = {name: PromptSetting(value, "default of llama-server", False) for name, value in _DEFAULTS.items()}
        for key, name in _SAMPLING.items():
            value = file.settings.get(f"general.sampling.{key}")
            if value is not None:
                settings[name] = PromptSetting(value, f"general.sampling.{key}")
        if vocabulary.special["eos"]:
            settings["eos_token_id"] = PromptSetting(
                list(vocabulary.special["eos"]), "tokens that end a generation", False
            )
        return settings

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """Return the ids of each text; text that spells a special token becomes it."""
        found = []
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            number = self._library.llama_tokenize(
                self._vocab, data, len(data), self._room, len(self._room), special, True
            )
            found.append(self._room[: max(number, 0)])
        return found

    def render(self, conversation: Conversation) -> str:
        """Return the text that llama.cpp's own Jinja makes, or transformers' where xllamacpp is not installed."""
        vocabulary, template = self.opened.vocabulary, self.opened.template
        assert vocabulary is not None
        if template is not None and _has_server() and _is_for_server(conversation):
            self._renderer = self._renderer or _Renderer(template, vocabulary)
            return self._renderer.render(conversation)
        return rendered_by_transformers(template, vocabulary, conversation)

    def render_by_file(self, conversation: Conversation) -> str | None:
        """Return the text that transformers makes of the template in the file."""
        vocabulary = self.opened.vocabulary
        if vocabulary is None or self.opened.template is None or not _has_server():
            return None
        return rendered_by_transformers(self.opened.template, vocabulary, conversation)


class _Renderer:
    """llama-server with a model of nothing and the template of a file: it renders, and never generates.

    Args:
        template: Source of the template.
        vocabulary: Has the special tokens that the template may write.
    """

    def __init__(self, template: str, vocabulary: Vocabulary) -> None:
        xllamacpp = importlib.import_module("xllamacpp")  # without types
        texts = {name: vocabulary.pieces[ids[0]].decode() for name, ids in vocabulary.special.items() if ids}
        with tempfile.TemporaryDirectory(prefix="glassengine-template-") as folder:
            parameters = xllamacpp.CommonParams()
            parameters.model.path = str(_write_tiny(Path(folder) / "template.gguf", template, texts))
            parameters.port, parameters.use_jinja, parameters.warmup = 0, True, False
            parameters.n_parallel, parameters.n_ctx, parameters.verbosity = 1, 64, -1
            self._server = xllamacpp.Server(parameters)

    def render(self, conversation: Conversation) -> str:
        """Return the text of a conversation.

        Raises:
            ValueError: llama.cpp refuses it.
        """
        body = json.dumps({"add_generation_prompt": False, **conversation}).encode()
        address = urlsplit(self._server.listening_address).netloc
        with closing(HTTPConnection(address)) as connection:
            connection.request("POST", "/apply-template", body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read().decode("utf-8", "replace")
        if reply.status != HTTPStatus.OK:
            raise ValueError(text[:1000])
        return str(json.loads(text)["prompt"])


def _is_for_server(conversation: Conversation) -> bool:
    """Whether llama-server takes a conversation: it continues a last turn of the assistant, and sees if a file says."""
    messages = conversation["messages"]
    is_closed = messages[-1]["role"] == "assistant" and not conversation.get("continue_final_message")
    return not is_closed and all(isinstance(one.get("content"), str | None) for one in messages)


def _has_server() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


def _load(library: Library, path: Path, vocab_only: int) -> Any:
    parameters: Opaque = library.llama_model_default_params()
    (c.c_uint8 * c.sizeof(parameters)).from_buffer(parameters)[vocab_only] = 1
    return library.llama_model_load_from_file(str(path).encode(), parameters)


def _vocab_only(library: Library) -> int:
    """Return the byte of `vocab_only` in the parameters: the only one with which a file of metadata alone loads."""
    with tempfile.TemporaryDirectory(prefix="glassengine-vocab-") as folder:
        path = _write_tiny(Path(folder) / "vocabulary.gguf")
        default = bytes(library.llama_model_default_params())
        zeros = [at for at in range(40, 128) if default[at] == 0]
        for at in sorted(zeros, key=lambda one: abs(one - _VOCAB_ONLY)):
            model = _load(library, path, at)
            if model:
                LOGGED.clear()
                return at
    raise UsageError("vocab_only is not found in llama_model_params", got="this build of llama.cpp")


def _write_tiny(path: Path, template: str | None = None, special: Mapping[str, str] = _NOTHING) -> Path:
    """Write a file of a vocabulary without tensors, or of a template with the smallest model of llama-server."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(path), "llama")
    for name, size in (("context_length", 8), ("embedding_length", 32), ("block_count", 1), ("head_count", 1)):
        getattr(writer, f"add_{name}")(size)
    writer.add_feed_forward_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = ["a", "b", "ab", *dict.fromkeys(special.values())]
    writer.add_token_list(tokens)
    writer.add_token_types([1, 1, 1, *[3] * (len(tokens) - 3)])
    writer.add_token_merges(["a b"])
    for name, text in special.items():
        getattr(writer, f"add_{name}_token_id")(tokens.index(text))
    if template is not None:
        writer.add_chat_template(template)
        shapes = {f"blk.0.{name}": (32, 32) for name in _MATRICES} | {f"blk.0.{name}": (32,) for name in _NORMS}
        for name, shape in (shapes | {"token_embd": (len(tokens), 32), "output_norm": (32,)}).items():
            writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
