"""Site names: the stable name of every tensor of a model.

    site := path ["@" call] [port] ["/" op "." n]   |   path ["@" call] "." tap

A `Site` describes one name, a `SiteTable` all names of one program. Several sites may name the same tensor (the output
of a module is also the output of its last op); they then share `node`.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from glassengine.errors import UnknownNameError, UsageError

ROOT = "."
"""The path of the model itself."""

KINDS = ("op", "module", "tap", "kv")

RETURNED = "returned/"
"""In a recording: what comes before the name of a result that another run than the observed one has returned."""

_LINE = re.compile(r"(.+?):(\d{1,9}): ?(.*)", re.DOTALL)


def parts_of_line(source: str | None) -> tuple[str, int, str] | None:
    """Return (file, line, code) of the source of a site, "file:line: code"; None where it names no line."""
    found = _LINE.fullmatch(source or "")
    return None if found is None else (found[1], int(found[2]), found[3])


def code_of_line(source: str | None) -> str:
    """Return the code of the source of a site; "" where it names no line."""
    return (parts_of_line(source) or ("", 0, ""))[2]


@dataclass(frozen=True)
class Site:
    """One named tensor of a program.

    Attributes:
        name: The site name.
        kind: "op", "module" (input or output of a module), "tap" or "kv" (cache after the step).
        node: Name of the FX node that produces the tensor.
        op: ATen base name of that node, e.g. "linear"; "input" for an input of the program.
        dtype: torch dtype name, e.g. "float32".
        shape: One entry per dimension: an int, or the expression of a dynamic one ("batch", "sequence", "cache", ...).
        axes: Position of the "batch", "sequence" and "cache" dimensions, where the tensor has them.
        source: "file:line: code" of the line that made it, innermost user frame.
        fingerprint: Hash of op, literal arguments, input fingerprints and parameter names; equal in two programs when
            the tensor is computed the same way.
        aliases: Other names accepted for it: the FX node name and the names of the reference documents.
    """

    name: str
    kind: str
    node: str
    op: str
    dtype: str
    shape: tuple[int | str, ...]
    axes: dict[str, int]
    source: str | None
    fingerprint: str
    aliases: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Site:
        """Inverse of `to_dict`."""
        return cls(**{**data, "shape": tuple(data["shape"]), "aliases": tuple(data["aliases"])})


class SiteTable(Sequence[Site]):
    """The sites of one program in graph order; names are unique."""

    def __init__(self, sites: Iterable[Site]) -> None:
        self._sites = tuple(sites)
        self._by_name = {site.name: site for site in self._sites}
        if len(self._by_name) != len(self._sites):
            raise UsageError(
                "a site name is used twice",
                got=next(name for name, count in Counter(site.name for site in self._sites).items() if count > 1),
                hint="give each tap of one module its own name: glass.tap(NAME, x)",
            )

    def __len__(self) -> int:
        return len(self._sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def __getitem__(self, index: Any) -> Any:
        return self._sites[index]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def get(self, name: str) -> Site | None:
        """Return the site called `name`, or None."""
        return self._by_name.get(name)

    @functools.cached_property
    def by_node(self) -> dict[str, tuple[Site, ...]]:
        """Sites of each FX node, op site first."""
        table: dict[str, list[Site]] = {}
        for site in self._sites:
            table.setdefault(site.node, []).append(site)
        return {node: tuple(sorted(sites, key=lambda s: s.kind != "op")) for node, sites in table.items()}

    def op_of(self, node: str | None) -> Site | None:
        """Return the op site of an FX node; None where it has none."""
        return next((site for site in self.by_node.get(node or "", ()) if site.kind == "op"), None)

    def match(self, pattern: str) -> list[Site]:
        """Return the sites that `pattern` names: exactly (site or alias), else as glob or `re:` of either."""
        exact = self._by_name.get(pattern)
        if exact is not None:
            return [exact]
        aliased = [site for site in self._sites if pattern in site.aliases]
        if aliased:
            return aliased
        named = [site for site in self._sites if matches(pattern, site.name)]
        return named or [site for site in self._sites if any(matches(pattern, alias) for alias in site.aliases)]

    def resolve(self, patterns: Iterable[str]) -> list[Site]:
        """Return the sites that any of `patterns` names, in graph order.

        Raises:
            UnknownNameError: A pattern matches nothing; carries the nearest names.
        """
        wanted: set[str] = set()
        for pattern in patterns:
            found = self.match(pattern)
            if not found:
                names = [s.name for s in self._sites] + [a for s in self._sites for a in s.aliases]
                raise UnknownNameError("site", pattern, names, hint="list the names with: glass sites MODEL [PATTERN]")
            wanted.update(site.name for site in found)
        return [site for site in self._sites if site.name in wanted]


class HasSites:
    """What has a table of sites: a program, an engine."""

    sites: SiteTable

    def named_network_outputs(self) -> Iterator[tuple[str, Site]]:
        """Iterate over (`<module path>.<name>`, site) of every tap."""
        return iter([(site.name, site) for site in self.sites if site.kind == "tap"])


def patterns_of(given: str | Iterable[str], what: str = "patterns") -> tuple[str, ...]:
    """Return the patterns of an argument that takes several: a string is one of them.

    Raises:
        UsageError: It is neither a string nor holds strings alone.
    """
    if isinstance(given, str):
        return (given,)
    found = tuple(given) if isinstance(given, Iterable) else ()
    if not isinstance(given, Iterable) or not all(isinstance(pattern, str) for pattern in found):
        raise UsageError(f"{what} is not a list of patterns", got=repr(given), hint=f'{what}=["layers.*.mlp"]')
    return found


def other_spellings(name: str) -> tuple[str, ...]:
    """Return what the same tensor is called where it comes in another container, or in the other reference document.

    The first result of a module that returns several is `X:out[0]`, that of one that returns a tensor is `X`. An
    attention is `gpt_attention_plugin` in the document's network and `fake_gpt_attention_plugin` in its graph.
    """
    where, port, rest = name.partition(":out[0]")
    found = [] if rest else [where if port else f"{name}:out[0]"] if port or ":" not in name else []
    plugin = _PLUGIN.fullmatch(name)
    if plugin is not None:
        found.append(f"{plugin[1]}{'' if plugin[2] else 'fake_'}{plugin[3]}")
    return tuple(found)


_PLUGIN = re.compile(r"((?:.*[./])?)(fake_)?(gpt_attention_plugin(?:_\d+)?(?:[:.\[].*)?)")


def matches(pattern: str, name: str) -> bool:
    """Return whether `pattern` names `name`.

    A pattern is a glob (`*`, `?`, `[seq]`; "." and "/" are not special; the brackets of `[0]`, `[?]` and `[*]` are
    those of a port) that matches the whole name or any suffix of it that starts after a dot of the path; or `re:` and a
    regular expression to search for.

    Raises:
        UsageError: The regular expression is not valid.
    """
    return bool(_compiled(pattern)(name))


@functools.lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    if pattern.startswith("re:"):
        try:
            regex = re.compile(pattern[3:])
        except re.error as error:
            raise UsageError("the pattern is not a valid regular expression", got=f"{pattern!r}: {error}") from error
        return lambda name: regex.search(name) is not None
    glob = re.compile(fnmatch.translate(re.sub(r"\[(\d+|[*?])\]", r"[[]\1]", pattern)))

    def match(name: str) -> bool:
        if glob.match(name):
            return True
        path = name.split("/", 1)[0]
        starts = [i + 1 for i, char in enumerate(path) if char == "."]
        return any(glob.match(name[start:]) for start in starts)

    return match


def with_call(path: str, call: int) -> str:
    """Return `path` for the `call`-th extra call (0 = first call, not written)."""
    return f"{path}@{call}" if call else path


def op_site(path: str, op: str, occurrence: int) -> str:
    """Return the site of the `occurrence`-th `op` inside `path` (with its call)."""
    return f"{path}/{op}.{occurrence}"


def tap_site(path: str, name: str) -> str:
    """Return the site of tap `name` inside `path`; a tap of the root module is just `name` (rows A2, A4)."""
    return name if path == ROOT else f"{path}.{name}"


def port_site(path: str, port: str) -> str:
    """Return the site of a module input or output; ":out" without a key is the plain path."""
    return path if port == ":out" else f"{path}{port}"


def port_leaves(port: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield (port with keys, tensor) for every tensor in `tree`: containers, results of transformers, dataclasses.

    List and tuple entries get `[index]`, dict keys and attributes `.name`.
    """
    import torch
    from torch.utils import _pytree as pytree

    for path, leaf in pytree.tree_flatten_with_path(plain_containers(tree))[0]:
        if isinstance(leaf, torch.Tensor):
            yield port + "".join(port_key(key) for key in path), leaf


def plain_containers(tree: Any) -> Any:
    """Return `tree` with dicts and lists instead of containers whose entries torch has no names for.

    These are unregistered dataclasses and mappings, and those registered without names of entries.
    """
    import torch
    from torch.utils import _pytree as pytree

    if isinstance(tree, torch.Tensor):
        return tree
    entries = unnamed_entries(tree)
    if entries is not None:
        tree = entries
    if pytree.tree_is_leaf(tree):
        return tree
    return pytree.tree_map(plain_containers, tree, is_leaf=lambda item: item is not tree)


def unnamed_entries(tree: Any) -> dict[Any, Any] | list[Any] | None:
    """Return the entries of a container that torch has no names for; None if it has, or if it is not a container."""
    from torch.utils import _pytree as pytree

    kind = type(tree)
    known = pytree.SUPPORTED_NODES.get(kind)
    if pytree.tree_is_leaf(tree) or (known is not None and known.flatten_with_keys_fn is None):
        if isinstance(tree, Mapping):
            return dict(tree.items())
        if is_dataclass(tree) and not isinstance(tree, type):
            return {field.name: getattr(tree, field.name) for field in fields(tree)}
        if known is not None:
            return list(known.flatten_fn(tree)[0])
    return None


def port_key(key: Any) -> str:
    """Return what an entry of a container, a key of torch's pytrees, adds to a port."""
    if hasattr(key, "idx"):
        return f"[{key.idx}]"
    return f".{key.key if hasattr(key, 'key') else key.name}"
