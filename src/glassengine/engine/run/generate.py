"""Generate on an engine: tokenize, prefill, choose tokens, decode, stop; stream, observe and record on the way.

Nothing of a setting is interpreted here: its meaning (defaults, order of the processors, stopping) is that of the
installed transformers, whose `GenerationMixin` builds the objects. What it would do in another loop than that of greedy
decoding and sampling (beams, assistants) is refused by name.

Shape legend: B batch, S tokens so far, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PretrainedConfig

from glassengine.engine.prompts import Request, pad_left
from glassengine.engine.run.forward import Encode, encoded, image_constants, read_request
from glassengine.engine.session.checks import check_prompts, require_generating
from glassengine.engine.session.debug_buffers import automatic_chunk
from glassengine.engine.session.loaded import LoadedEngine
from glassengine.engine.session.session import Session
from glassengine.engine.tokenizing import TextCallback, TextStream, decode
from glassengine.errors import CorruptError, GlassError, UnknownNameError, UsageError, logger
from glassengine.reading.documents import read_document
from glassengine.results.engines import Generation

FILE = "generation_config.json"
MAX_BYTES = 16 << 20
"""Of a file of settings."""

# Settings that make transformers choose tokens in another loop than ours, with the values that mean "off".
_OTHER_LOOPS: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "is_assistant": (None, False),
    "use_mtp": (None, False),
    "speculation_type": (None,),
    "guidance_scale": (None, 1, 1.0),
    "token_healing": (None, False),
}
# Settings of how transformers runs the model or what it returns. In a file they change no token and are ignored.
_NOT_OURS = {
    "use_cache": "a session always has a cache",
    "cache_implementation": "the engine has its own static cache",
    "cache_config": "the engine has its own static cache",
    "max_cache_len": "the engine has its own static cache",
    "output_attentions": "look at tensors with debug=PATTERNS",
    "output_hidden_states": "look at tensors with debug=PATTERNS",
    "output_scores": "look at tensors with debug=['logits']",
    "output_logits": "look at tensors with debug=['logits']",
    "return_dict_in_generate": "the result is always a Generation",
    "compile_config": "the engine is compiled already",
    "disable_compile": "the engine is compiled already",
    "continuous_batching_config": "one batch is run at a time",
    "prefill_chunk_size": "prefill in pieces with prefill_chunk=N",
}
_BOOKKEEPING = {"transformers_version"}
# Settings of sampling, with the values that change nothing.
_SAMPLING = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "min_p": None,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}

Choose = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Ended = Callable[[torch.Tensor], torch.Tensor]
_MOST_STOPS = 20_000
"""Characters of all stop strings: transformers tries each token of the vocabulary at each of them."""


@functools.cache
def _host_class() -> Any:
    # Half a second to import, and needed only where something is generated.
    from transformers import GenerationMixin

    class Host(GenerationMixin):  # type: ignore[misc]
        """Stands in for a model where transformers builds processors and criteria: they ask for no more than this."""

        def __init__(self, generation_config: GenerationConfig, max_length: int, vocab_size: int | None) -> None:
            self.generation_config = generation_config
            self.config = PretrainedConfig()
            self.config.max_position_embeddings = max_length
            self.config.vocab_size = vocab_size
            self.device = torch.device("cpu")

    return Host


@dataclass(frozen=True)
class Sampler:
    """The choices of one generation.

    Attributes:
        max_new_tokens: Most tokens to generate.
        pad_token_id: What a finished sequence is fed.
        seed: Of the random numbers; None where decoding is greedy.
        choose: (token ids [B, S], logits [B, V]) -> next tokens [B] int64.
        ended: token ids [B, S] -> whether each sequence ends with its last token, bool [B].
    """

    max_new_tokens: int
    pad_token_id: int
    seed: int | None
    choose: Choose
    ended: Ended


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of transformers, read and checked.

    Attributes:
        config: All of them.
        length_is_default: Nothing said how much to generate.
    """

    config: Any
    length_is_default: bool
    _host: Any

    @property
    def pad_token_id(self) -> int:
        """What fills shorter prompts and finished sequences: the pad token, else the first end token, else 0."""
        ends = self.config.eos_token_id
        first = ends[0] if isinstance(ends, (list, tuple)) and ends else ends
        chosen = self.config.pad_token_id if self.config.pad_token_id is not None else first
        return chosen if isinstance(chosen, int) else 0

    def sampler(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, *, seed: int | None, tokenizer: Any
    ) -> Sampler:
        """Return what chooses tokens for these prompts.

        Args:
            input_ids: [B, S] int64, left-padded.
            attention_mask: [B, S] int64.
            seed: Of sampling; None draws one.
            tokenizer: For stop strings; None where there is none.

        Raises:
            UsageError: A setting has a value that transformers refuses, or nothing would be generated.
        """
        from transformers import StoppingCriteriaList

        config, host, prompt = self.config, self._host, input_ids.shape[1]
        stops = config.stop_strings or ()
        if sum(map(len, [stops] if isinstance(stops, str) else stops)) > _MOST_STOPS:
            raise UsageError("the stop strings are too long", expected=f"{_MOST_STOPS:,} characters in all")
        with _refusals():
            host._prepare_special_tokens(config, True, device="cpu", batch_size=input_ids.shape[0])
            host._prepare_generated_length(config, self.length_is_default, True, "input_ids", prompt, input_ids)
            # transformers drops a mask without padding before it gets here.
            mask = None if bool(attention_mask.all()) else attention_mask
            processors = host._get_logits_processor(
                config, prompt, encoder_input_ids=input_ids, device="cpu", model_kwargs={"attention_mask": mask}
            )
            criteria = host._get_stopping_criteria(config, StoppingCriteriaList(), tokenizer)
        generator = None
        if seed is not None and not -(2**63) <= seed < 2**64:
            raise UsageError("invalid seed", got=str(seed), expected="a whole number of 64 bits", hint="--seed N")
        if config.do_sample:
            generator = torch.Generator()
            seed = generator.seed() if seed is None else seed
            generator.manual_seed(seed)

        def choose(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            # As transformers does: scores in float32, a copy because some processors write into it.
            if processors:
                logits = processors(token_ids, logits.to(torch.float32, copy=True))
            if generator is None:
                return logits.argmax(-1)
            return torch.multinomial(logits.float().softmax(-1), 1, generator=generator).squeeze(1)

        return Sampler(
            max_new_tokens=config.max_length - prompt,
            pad_token_id=self.pad_token_id,
            seed=seed if config.do_sample else None,
            choose=choose,
            ended=lambda token_ids: criteria(token_ids, None),
        )


def read_settings(
    directory: Path, given: Any, settings: Mapping[str, Any], *, max_length: int, vocab_size: int | None
) -> GenerationSettings:
    """Lay settings over one another as transformers' `generate` does: those given by name win, then `given`, then
    generation_config.json of the engine, then transformers' defaults.

    Args:
        directory: Of the engine.
        given: A `GenerationConfig`, a mapping, a file or directory with one, or None.
        settings: Fields of `GenerationConfig` by name.
        max_length: Most tokens of a sequence that the engine was built for.
        vocab_size: Of the model.

    Raises:
        UnknownNameError: No setting has this name.
        UsageError: A setting cannot be carried out here, or has a value that transformers refuses.
        CorruptError: generation_config.json of the engine is damaged.
    """
    path = directory / FILE
    try:
        own = _from_file(path) if path.exists() else GenerationConfig()
    except UsageError as error:
        raise CorruptError(error.what, got=error.got, hint="build the engine again with --overwrite") from error
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - _BOOKKEEPING
    base = _given(given, names)
    for name in settings:
        _require_known(name, names)
    given_there = {name: value for name in names if (value := getattr(base, name, None)) is not None}
    asked = {**given_there, **settings}
    for name in sorted(asked.keys() & _NOT_OURS.keys()):
        raise UsageError(
            f"{name!r} is a setting of how transformers runs a model", got=f"{name}={asked[name]!r}",
            hint=f"leave it out: {_NOT_OURS[name]}",
        )  # fmt: skip
    host = _host_class()(own, max_length, vocab_size)
    with _refusals():
        config, _ = host._prepare_generation_config(base, **settings)
    for name, off in _OTHER_LOOPS.items():
        value = getattr(config, name, None)
        if not any(value is each or (each is not None and value == each) for each in off):
            where = "" if name in asked else f" in {FILE} of the engine"
            raise UsageError(
                f"the setting {name!r} needs another loop than greedy decoding or sampling",
                got=f"{name}={value!r}{where}",
                expected=f"{name}={off[-1]!r}",
                hint=f"generate with {name}={off[-1]!r}" if off[-1] is not None else f"leave {name} out",
            )
    idle = [name for name, off in _SAMPLING.items() if name in asked and asked[name] not in (off, None)]
    if idle and not config.do_sample:
        logger.warning("%s: without effect while decoding is greedy; do_sample=True samples", ", ".join(idle))
    default = (
        all(source is None or source.max_length is None for source in (base, own)) and "max_length" not in settings
    )
    return GenerationSettings(config, default, host)


def _given(given: Any, names: set[str]) -> Any:
    if given is None or isinstance(given, GenerationConfig):
        return given
    if isinstance(given, Mapping):
        for name in given:
            _require_known(name, names)
        with _refusals():
            return GenerationConfig(**given)
    path = Path(given)
    return _from_file(path / FILE if path.is_dir() else path)


def _from_file(path: Path) -> Any:
    """Read a file of settings; names that this version of transformers does not know are left to it, as it does."""
    try:
        # Others write Infinity, too.
        data = read_document(path, dict[str, Any], most=MAX_BYTES, what=path.name, nonfinite=True)
        for name in ("eos_token_id", "pad_token_id", "max_new_tokens", "max_length"):
            values = data.get(name)
            for value in values if isinstance(values, list) and name == "eos_token_id" else [values]:
                if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                    raise TypeError(f"{name} is {value!r}")
        return GenerationConfig.from_dict(data)
    except GlassError as error:
        raise UsageError(f"{path.name} cannot be read", got=error.got) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{path.name} cannot be read", got=f"{type(error).__name__}: {error}") from error


def _require_known(name: str, names: set[str]) -> None:
    if name not in names:
        raise UnknownNameError(
            "generation setting", name, sorted(names), hint="a field of transformers.GenerationConfig"
        )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Turn what transformers raises about a value into a message without a traceback."""
    try:
        yield
    except (ValueError, TypeError, AttributeError) as error:
        greedy = "temperature" in str(error)
        raise UsageError(
            "a generation setting is refused by transformers",
            got=str(error),
            hint="the likeliest token, always: --no-do-sample, do_sample=False" if greedy else None,
        ) from error


StepCallback = Callable[[Session], None]


Record = Callable[..., contextlib.AbstractContextManager[StepCallback]]
"""`Engine.recorder`."""


def generate(
    engine: LoadedEngine,
    request: Request,
    *,
    encoder: LoadedEngine | None,
    encode: Encode,
    recorder: Record,
    generation_config: Any,
    settings: Mapping[str, Any],
    seed: int | None,
    prefill_chunk: int | None,
    debug: bool | Sequence[str],
    keep_steps: int,
    on_step: StepCallback | None,
    on_text: TextCallback | None,
    record: str | Path | None,
    overwrite: bool,
) -> Generation:
    """Generate; `Engine.generate` describes the arguments.

    `encoder` and `encode` are those of the engine, if it has one; `recorder` makes what records each step.

    Raises:
        UsageError: Something does not fit the engine.
        UnknownNameError: No setting has this name.
    """
    manifest = engine.manifest
    require_generating(manifest)
    budget = settings.get("max_new_tokens")
    if isinstance(budget, int) and budget < 1:
        raise _nothing(f"--max-new-tokens {budget}")
    chosen = read_settings(
        engine.directory,
        generation_config,
        settings,
        max_length=manifest.max_seq_len or 1,
        vocab_size=manifest.vocab_size,
    )
    num_each = chosen.config.num_return_sequences or 1
    read = read_request(engine, request).repeated(num_each)
    rows, constants = read.rows, None
    if encoder is not None:
        rows, constants = encoded(manifest, encoder.manifest, encode, read, request.inputs, chosen.config)
    if on_text is not None and len(rows) != 1:
        raise UsageError(
            "text is streamed for a single sequence", got=f"{len(rows)} sequences", hint="leave on_text out"
        )
    ids, mask = pad_left(rows, chosen.pad_token_id)
    sampler = chosen.sampler(ids, mask, seed=seed, tokenizer=read.tokenizer)
    length = ids.shape[1] + max(sampler.max_new_tokens, 1)
    check_prompts(manifest, ids, mask, length=length)
    if sampler.max_new_tokens < 1:
        raise _nothing(f"a prompt of {ids.shape[1]} tokens and max_length={chosen.config.max_length}")
    if engine.takes_images:
        constants = image_constants(manifest, encode, ids, mask, read.pixel_values, num_each)
    session = Session(engine, len(rows), length, debug=debug, keep_steps=keep_steps, constants=constants)
    with contextlib.nullcontext() if record is None else recorder(record, session, rows, overwrite=overwrite) as own:
        stream = TextStream(read.tokenizer, on_text) if on_text is not None and read.tokenizer is not None else None
        observers = [observer for observer in (own, on_step) if observer is not None]
        made, prefill_s, decode_s = _loop(session, ids, mask, sampler, prefill_chunk, stream, observers)
    texts = None
    if read.tokenizer is not None:
        texts = tuple(decode(read.tokenizer, row) for row in made)
    return Generation(
        prompts=read.texts,
        prompt_token_ids=tuple(tuple(row) for row in read.rows),
        token_ids=made,
        texts=texts,
        num_steps=session.step + 1,
        prefill_s=prefill_s,
        decode_s=decode_s,
        recording=None if record is None else str(record),
        seed=sampler.seed,
    )


def _nothing(got: str) -> UsageError:
    return UsageError("nothing would be generated", got=got, expected="at least 1 new token", hint="--max-new-tokens N")


def _loop(
    session: Session,
    ids: torch.Tensor,
    mask: torch.Tensor,
    sampler: Sampler,
    chunk: int | None,
    stream: TextStream | None,
    observers: Sequence[Callable[[Session], None]],
) -> tuple[tuple[tuple[int, ...], ...], float, float]:
    """Return (generated tokens per sequence, seconds of the prefill, seconds of the decode steps)."""
    batch, prompt = ids.shape
    history = torch.cat([ids, torch.zeros((batch, sampler.max_new_tokens), dtype=torch.int64)], dim=1)
    stops = torch.full((batch,), prompt)
    open_rows = torch.ones(batch, dtype=torch.bool)
    itemsize = getattr(torch, session.engine.manifest.dtype).itemsize
    if chunk is None and not session.in_one_piece:
        chunk = automatic_chunk(batch, session.engine.manifest.vocab_size, itemsize)

    def observe() -> None:
        for observer in observers:
            observer(session)

    start = time.perf_counter()
    logits = session.prefill(ids, mask, chunk=chunk, keep=bool(observers), on_step=observe)
    prefilled = time.perf_counter()
    for stop in range(prompt + 1, history.shape[1] + 1):
        observe()
        with torch.inference_mode():
            tokens = sampler.choose(history[:, : stop - 1], logits[:, -1])
            history[:, stop - 1] = torch.where(open_rows, tokens, sampler.pad_token_id)
            stops += open_rows
            open_rows &= ~sampler.ended(history[:, :stop])
            going_on = bool(open_rows.any()) and stop < history.shape[1]
        if stream is not None:
            stream.put(history[0, prompt : stops[0]].tolist())
        if not going_on:
            break
        logits = session.advance(history[:, stop - 1 : stop])
    if stream is not None:
        stream.end(history[0, prompt : stops[0]].tolist())
    made = tuple(tuple(history[row, prompt:stop].tolist()) for row, stop in enumerate(stops.tolist()))
    return made, prefilled - start, time.perf_counter() - prefilled
