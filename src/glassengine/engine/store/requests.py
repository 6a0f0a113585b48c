"""Parses requests for outputs: `PATTERN[=ALIAS][:DTYPE]`, alias files, and names of another tool's layers.

An alias file is a JSON object, {"pattern": "alias"}: `--add-output @FILE`, the same text in TRTLLM_ADD_OUTPUT, and
`glass compare --map FILE` read it alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from glassengine import environment
from glassengine.errors import CorruptError, GlassError, UnknownNameError, UsageError
from glassengine.ops.row import Rounding
from glassengine.ops.traits import named
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
