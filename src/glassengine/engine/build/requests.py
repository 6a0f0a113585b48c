"""Requests of a build: parses outputs that are asked for, and checks dtypes, sizes and steps before compiling.

An alias file is a JSON object, {"pattern": "alias"}: `--add-output @FILE`, the same text in TRTLLM_ADD_OUTPUT, and
`glass compare --map FILE` read it alike.

The model's own code runs in the program with a cache that is longer than the text. Code that takes the length of the
cache for the number of tokens so far (GPT-Neo's local attention does) is traced without a complaint, and is wrong.
`glass check` names the operation; this only keeps such an engine from being built.

Shape legend: B batch (1), S new tokens, T cache length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from transformers import DynamicCache

from glassengine import environment
from glassengine.backends.protocol.backend import Backend, TakingModels
from glassengine.backends.registry import backends_that
from glassengine.capture.observers import run_program
from glassengine.errors import BackendError, CorruptError, GlassError, UnknownNameError, UsageError
from glassengine.ops.row import Rounding
from glassengine.ops.traits import named
from glassengine.program import LoadedModel, Program
from glassengine.program.kinds.causal_lm import accepted, cache_argument
from glassengine.reading.documents import parsed
from glassengine.reading.files import read_text
from glassengine.sites import Site, SiteTable

CASTS = ("float32", "float16", "bfloat16", "float64")
"""What an output can be cast to; no port of a site has such a name."""

MAX_BYTES = 16 << 20

Alias = Annotated[str, msgspec.Meta(min_length=1)]

# The alias part cannot be mistaken for the rest of a regular expression such as "re:(?=x)".
_REQUEST = re.compile(rf"(?P<pattern>.+?)(=(?P<alias>[\w.-]+))?(:(?P<dtype>{'|'.join(CASTS)}))?", re.DOTALL)
_PART = re.compile(r"(?P<node>\w+)/[A-Z]\w*_\d+")
_KERNEL = re.compile(r"((cpp|triton)_\w*fused|aoti_torch_)\w*(:\d+)?")


class OutputRequest(NamedTuple):
    """One thing asked for: a pattern of sites, what to call it, and the dtype to read it as."""

    pattern: str
    alias: str | None = None
    dtype: str | None = None


def parse_request(text: str) -> OutputRequest:
    """Split `PATTERN[=ALIAS][:DTYPE]`."""
    found = _REQUEST.fullmatch(text)
    return OutputRequest(found["pattern"], found["alias"], found["dtype"]) if found else OutputRequest(text)


def read_requests(texts: Iterable[str]) -> list[OutputRequest]:
    """Return what `--add-output` asks for; `@FILE` stands for the entries of an alias file.

    Raises:
        UsageError: An alias file cannot be read, or is not a JSON object of strings.
    """
    requests: list[OutputRequest] = []
    for text in texts:
        if not text.startswith("@"):
            requests.append(parse_request(text))
            continue
        path = Path(text[1:])
        try:
            content = read_text(path, most=MAX_BYTES)
        except GlassError as error:
            raise UsageError(
                f"the alias file {path} cannot be read", got=error.got, hint="--add-output @FILE.json"
            ) from error
        requests += _aliases(content, str(path))
    return requests


def requests_from_environment() -> list[OutputRequest]:
    """Return what TRTLLM_ADD_OUTPUT asks for.

    Raises:
        UsageError: It is not a JSON object of strings.
    """
    text = environment.add_output_json()
    return [] if text is None else _aliases(text, "TRTLLM_ADD_OUTPUT")


def _aliases(text: str, origin: str) -> list[OutputRequest]:
    hint = """{"SITE": "ALIAS", ...}"""
    try:
        aliases = parsed(text, dict[str, Alias], origin, unique=True)
    except CorruptError as error:
        raise UsageError(f"{origin} is not a JSON object of strings", got=error.got, hint=hint) from error
    return [OutputRequest(name, alias) for name, alias in aliases.items()]


def find_sites(sites: SiteTable, pattern: str) -> list[Site]:
    """Return the sites that `pattern` names.

    Raises:
        UnknownNameError: It names nothing. Where it looks like a layer of a network listing or of TensorRT-LLM, the
            message says which names to ask for instead.
    """
    try:
        return sites.resolve([pattern])
    except UnknownNameError as error:
        advice = _advice(sites, pattern)
        if advice is not None:
            error.expected, error.hint = advice
        raise


def _advice(sites: SiteTable, pattern: str) -> tuple[str, str] | None:
    """Return (expected, hint) for a name that another listing uses."""
    part = _PART.fullmatch(pattern)
    if part and part["node"] in sites.by_node:
        node = part["node"]
        return (
            f"a whole node: the layer is a part of {node} ({sites.by_node[node][0].name}), and has no value of its own",
            f"--add-output {node}",
        )
    if part and part["node"] == "shared":
        return "a layer of one node: this one serves several", "ask for the layer that uses it"
    if _KERNEL.fullmatch(pattern):
        return (
            "one of the nodes that the kernel computes: a fused kernel keeps only what leaves it",
            "they stand above it in <backend>_network_def.py: --add-output NODE",
        )
    numbers = [piece for piece in pattern.split("/") if piece.isdecimal()]
    if pattern.count("/") > 1:
        return _of_layer(sites, pattern.lower(), numbers[0] if numbers else None)
    return None


def _of_layer(sites: SiteTable, path: str, number: str | None) -> tuple[str, str] | None:
    """Return advice for a path of TensorRT-LLM: the products and attentions of the layer that it names."""
    wants_attention = "attention_l" in path or "plugin" in path
    layer = [s for s in sites if s.kind == "op" and (number is None or number in s.name.split("/")[0].split("."))]
    attentions = [site for site in layer if named(site.op).rounding is Rounding.ATTENTION]
    products = [site for site in layer if named(site.op).kind == "matrix product"]
    found = attentions if wants_attention else products
    found = found or layer
    if not found:
        return None

    def likeness(site: Site) -> int:
        words = [word for word in re.split(r"[./_]", site.name.lower()) if len(word) > 2]
        return -sum(word in path for word in words)

    names = [f"{site.name} ({site.node})" for site in sorted(found, key=likeness)[:5]]
    where = f" of layer {number}" if number is not None else ""
    return (
        f"a site, node or layer of this engine; those{where}, nearest first: {', '.join(names)}",
        "names of TensorRT-LLM's layers are not those of this engine: list its own with glass sites MODEL [PATTERN]",
    )


DEFAULT_MAX_SEQ_LEN = 2048
"""For models whose configuration states no limit."""

_MAX_BATCH, _MAX_LENGTH = 1 << 20, 1 << 24
"""Beyond them the number of bytes of a cache is beyond 64 bits."""
PROMPT_LENGTH = 3
LONGEST_CACHE = 2048
"""Most slots of the cache: more than windows of attention usually have, little memory beside the weights."""
_PROMPTS = 2
"""Tokens by chance of so many seeds: of all of them a wrong program is wrong, rounding never changes an expert."""


def check_dtype(backend: Backend, dtype: str) -> None:
    """Refuse a dtype that the back-end cannot run.

    Raises:
        BackendError: Names those that it can.
    """
    if dtype not in backend.capabilities.dtypes:
        raise BackendError(
            f"back-end {backend.name!r} cannot run {dtype} models",
            expected=backend.capabilities.dtypes,
            hint=f"--dtype {backend.capabilities.dtypes[0]}",
        )


def check_written(
    backend: Backend, model: LoadedModel, quantize: str | None, length: int | None, asked: Mapping[str, object]
) -> None:
    """Refuse what a back-end cannot do that writes models rather than graphs, and types where none are written.

    `asked` maps flags of what needs a graph to what was asked for.

    Raises:
        UsageError: It cannot be written, or not so.
    """
    if not isinstance(backend, TakingModels):
        if quantize is not None:
            able = backends_that(lambda backend: isinstance(backend, TakingModels))
            raise UsageError(
                f"back-end {backend.name!r} rounds no matrices", got=f"--quantize {quantize}", expected=able or None
            )
        return
    if given := [flag for flag, value in asked.items() if value]:
        raise UsageError(
            f"back-end {backend.name!r} runs a model that it writes itself, not its graph",
            got=given[0],
            hint="leave it out; glass record shows every tensor of such an engine's file",
        )
    if not model.generation.generates or model.generation.has_encoder or model.stored is not None:
        raise UsageError(
            f"back-end {backend.name!r} writes language models that generate",
            got=model.spec,
            expected="a Hugging Face directory or id",
        )
    backend.require(model.module, quantize, length)


def check_sizes(model: LoadedModel, batch: int, length: int | None) -> int | None:
    """Return the most tokens of a sequence; None for a model that does not generate.

    Raises:
        UsageError: The model does not allow these sizes.
    """
    if not model.generation.generates:
        return None
    limit = model.metadata.get("max_position_embeddings")
    if batch < 1:
        raise UsageError("invalid --max-batch-size", got=str(batch), expected="at least 1")
    if batch > _MAX_BATCH or (length or 0) > _MAX_LENGTH:
        raise UsageError(
            "no cache can be so large",
            got=f"--max-batch-size {_shown(batch)}, --max-seq-len {_shown(length or limit or 0)}",
            expected=f"at most {_MAX_BATCH:,} and {_MAX_LENGTH:,}",
        )
    if length is None:
        return limit or DEFAULT_MAX_SEQ_LEN
    if length < 2 or (limit is not None and length > limit):
        raise UsageError(
            "the model does not allow this sequence length",
            got=f"--max-seq-len {length}",
            expected=f"2 to {limit}, max_position_embeddings of its configuration",
        )
    return length


def _shown(number: int) -> str:
    return f"{number:,}" if number < 1 << 64 else f"about 2^{number.bit_length()}"


def require_agreement(model: LoadedModel, program: Program, max_seq_len: int | None) -> None:
    """Run a prompt and one more token through both.

    The program is that before any pass, and the model needs nothing but tokens.

    Raises:
        UsageError: The logits differ by more than rounding.
    """
    length = min(max_seq_len or LONGEST_CACHE, LONGEST_CACHE)
    worst = [_worst(model, program, seed, length) for seed in range(_PROMPTS)]
    if min(worst) > math.sqrt(torch.finfo(getattr(torch, model.dtype)).eps):
        raise UsageError(
            f"an engine of {model.spec} would not generate what the model does",
            got=f"logits that are off by {min(worst):.2g} of the largest in a cache of {length} slots",
            expected="code that tells the number of tokens from the length of the cache",
            hint=f"glass check {model.spec} names the operation; --inputs FILE builds one forward, without a cache",
        )


def _worst(model: LoadedModel, program: Program, seed: int, length: int) -> float:
    """Return the largest difference of last logits, as a share of the largest one."""
    vocabulary = int(model.metadata.get("vocab_size", 2))
    tokens = torch.randint(0, vocabulary, (1, PROMPT_LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    tokens = tokens.to(next(model.module.parameters()).device)
    expected = _of_model(model.module, tokens)
    actual = _of_program(program, tokens, length, getattr(torch, model.dtype))
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def _of_model(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the last logits [2, V] of a prefill and of a decode step, with the cache of transformers."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    logits = []
    for slots in torch.split(torch.arange(PROMPT_LENGTH + 1).to(tokens), [PROMPT_LENGTH, 1]):
        given: dict[str, Any] = {"input_ids": tokens[:, slots]}
        given["attention_mask"] = torch.ones_like(tokens[:, : slots[-1] + 1])
        # Some models (Bamba) count from 0 in every step where they are not told.
        given |= {"position_ids": slots[None], cache_argument(model): cache, "use_cache": True}
        with torch.no_grad():
            logits.append(model(**accepted(model, given)).logits[0, -1].double())
    return torch.stack(logits)


def _of_program(program: Program, tokens: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the same, with the cache of an engine: of a recurrent model after each token of the prompt."""
    assert program.layout is not None
    caches = program.layout.allocate(1, length, dtype, str(tokens.device))
    logits = []
    sizes = [1] * (PROMPT_LENGTH + 1) if program.layout.states else [PROMPT_LENGTH, 1]
    for slots in torch.split(torch.arange(PROMPT_LENGTH + 1).to(tokens), sizes):
        mask = (torch.arange(length).to(tokens) <= slots[-1])[None].long()
        given = {
            "input_ids": tokens[:, slots],
            "attention_mask": mask,
            "position_ids": slots[None],
            "cache_position": slots,
        }
        results = run_program(program, {**given, **caches})
        caches = {past: results[present] for past, present in program.caches.items()}
        logits.append(results["logits"][0, -1].double())
    return torch.stack(logits[-2:])
