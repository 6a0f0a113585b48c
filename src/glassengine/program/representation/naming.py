"""From a functional graph and its marks to the table of sites.

Op sites come from the module stack that the exporter leaves on every node, module and tap sites from the erased marks.
`_assert_*` nodes, symbolic integers and nodes without a tensor are not sites.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from glassengine.errors import UsageError
from glassengine.ops.row import Rounding
from glassengine.ops.traits import base_name, named
from glassengine.program.user_code.tracing import Mark, is_users
from glassengine.sites import ROOT, Site, SiteTable, op_site, port_site, tap_site, with_call

_PLACEMENT = frozenset({"device", "pin_memory", "layout"})  # where, not what: the same on every device
_SLICE = re.compile(r"slice\(([^,]+), ([^,]+), ([^)]+)\)")
_FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>[^\n]*)\n(?!\s*File ")\s*(?P<code>[^\n]*)'
)


_STRICT_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default})


def of_any_layout(target: Any) -> Any:
    """Return what to call for an op on tensors whose layout in memory is not the one that the graph was traced with.

    Kernels, other dtypes and what another side has made have strides of their own, which a strict view may not allow.
    """
    return torch.ops.aten.reshape.default if target in _STRICT_VIEWS else target


def op_name(node: Node) -> str:
    """Return the ATen base name of a node: no overload, no trailing underscore."""
    return base_name(node.target) if node.op == "call_function" else "input"


def is_tensor_node(node: Node) -> bool:
    """Whether `node` yields one tensor and computes something (not an assertion, not a symbolic size)."""
    return (
        node.op == "call_function"
        and isinstance(node.meta.get("val"), torch.Tensor)
        and not op_name(node).startswith("_assert")
    )


class Paths:
    """Turns module stacks into user paths: wrapper prefix removed, slices of module lists resolved to real indices.

    Every call of a module has a key of its own in the stacks; the calls of one path are numbered in graph order (the
    exporter's own numbers restart for every slice of a list).

    Args:
        root: What was exported.
        prefix: Attribute of `root` that holds the user's module, or "".
        graph: The exported graph, marks included: a module without ops is seen by its marks only.

    Attributes:
        called_as: Name by which hooks on modules know a call -> path and call in the graph, where the two differ:
            a module with several aliases has one name for hooks, here it has that under which it was called.
    """

    def __init__(self, root: nn.Module, prefix: str, graph: torch.fx.Graph) -> None:
        self._root = root
        self._prefix = prefix
        self._modules = dict(root.named_modules(remove_duplicate=False))
        self._calls: dict[str, tuple[str, int]] = {}
        self.called_as: dict[str, str] = {}
        first_alias = {id(module): name or ROOT for name, module in root.get_submodule(prefix).named_modules()}
        num_calls: Counter[str] = Counter()
        num_hooked: Counter[str] = Counter()
        real_paths: dict[str, str] = {}
        for node in graph.nodes:
            for key, (traced, _) in (node.meta.get("nn_module_stack") or {}).items():
                if key in self._calls:
                    continue
                if traced not in real_paths:
                    real_paths[traced] = self._without_slices(traced) if "slice(" in traced else traced
                if real_paths[traced] not in self._modules:
                    # A slice that was called, or the exporter's own entry on nodes that functionalisation made outside
                    # of every module.
                    self._calls[key] = (ROOT, 0)
                    continue
                path = self._user_path(real_paths[traced])
                if prefix and not traced:
                    self._calls[key] = (ROOT, 0)  # the wrapper: not the user's, so not a call of the user's root
                    continue
                hooked = first_alias.get(id(self._modules[real_paths[traced]]), path)
                self._calls[key] = (path, num_calls[path])
                names = with_call(hooked, num_hooked[hooked]), with_call(path, num_calls[path])
                if names[0] != names[1]:
                    self.called_as[names[0]] = names[1]
                num_calls[path] += 1
                num_hooked[hooked] += 1

    def of(self, stack: Mapping[str, tuple[str, Any]] | None) -> tuple[str, int]:
        """Return (path, call) of the innermost module of `stack`."""
        return self._calls[list(stack)[-1]] if stack else (ROOT, 0)

    def has_submodule(self, path: str, name: str) -> bool:
        """Whether the module at user path `path` has a child called `name`."""
        return ".".join(part for part in (self._prefix, "" if path == ROOT else path, name) if part) in self._modules

    def _user_path(self, real: str) -> str:
        if self._prefix and (real == self._prefix or real.startswith(f"{self._prefix}.")):
            real = real[len(self._prefix) + 1 :]
        return real or ROOT

    def _without_slices(self, path: str) -> str:
        """Return the real path of a module reached through slices; a slice that is itself called has none."""
        parts: list[str] = []
        in_slice: dict[str, str] | None = None  # name in the slice -> name in the container
        module: Any = self._root
        for part in re.split(r"\.(?![^(]*\))", path):
            found = _SLICE.fullmatch(part)
            if found:
                bounds = (None if text == "None" else int(text) for text in found.groups())
                names = list(module._modules if in_slice is None else in_slice.values())[slice(*bounds)]
                # A slice of a Sequential keeps the names, one of a list renumbers.
                keeps = isinstance(module, nn.Sequential)
                in_slice = {name if keeps else str(index): name for index, name in enumerate(names)}
                continue
            name = part if in_slice is None else in_slice[part]
            in_slice = None
            module = getattr(module, name)
            parts.append(name)
        return path if in_slice is not None else ".".join(parts)


def source_line(node: Node, depth: int = 0) -> str | None:
    """Return "file:line: code" of a user frame that made `node`, file relative to its package.

    Args:
        node: Of an export.
        depth: Of the frame, the outermost is 1; 0 is the innermost. None is returned where it has fewer.
    """
    own = user_frames(node)
    if len(own) < max(depth, 1):
        return None
    frame = own[depth - 1]
    return f"{frame['file'].split('/site-packages/')[-1]}:{frame['line']}: {frame['code'].strip()}"


def depth_of(node: Node) -> int:
    """Return how many user frames made `node`."""
    return len(user_frames(node))


def line_beside(node: Node, other: Node) -> str | None:
    """Return the line that leads to `node` in the innermost function that runs both ops."""
    frames = [[frame.group("file", "function", "line") for frame in user_frames(one)] for one in (node, other)]
    both = list(zip(*frames, strict=False))
    outer = next((depth for depth, (one, beside) in enumerate(both) if one != beside), len(both))
    is_one_function = outer < len(both) and both[outer][0][:2] == both[outer][1][:2]
    return source_line(node, outer + is_one_function)


def user_frames(node: Node) -> list[re.Match[str]]:
    """Return the user's frames that made `node`, with "file", "line", "function" and "code", the outermost first."""
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    return [frame for frame in frames if is_users(frame["file"])]


def fingerprints(graph: torch.fx.Graph, names: Mapping[str, str]) -> dict[Node, str]:
    """Return a structural hash per node; `names` gives the parameter or input name of each placeholder."""
    table: dict[Node, str] = {}

    def literal(value: Any) -> str:
        if isinstance(value, Node):
            return table[value]
        if isinstance(value, (list, tuple)):
            return f"[{','.join(literal(item) for item in value)}]"
        return str(value)

    for node in graph.nodes:
        if node.op == "placeholder":
            text = names.get(node.name, node.name)
        else:
            kept = sorted((k, v) for k, v in node.kwargs.items() if k not in _PLACEMENT)
            args = [literal(a) for a in node.args] + [f"{k}={literal(v)}" for k, v in kept]
            text = f"{node.target}({','.join(args)})"
        table[node] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return table


def describe_shape(value: torch.Tensor, symbols: Mapping[str, str]) -> tuple[tuple[int | str, ...], dict[str, int]]:
    """Return (shape with readable symbols, axes) of a fake tensor; `symbols` maps "s27" to "batch" and so on."""
    shape: list[int | str] = []
    axes: dict[str, int] = {}
    for index, size in enumerate(value.shape):
        if isinstance(size, int):
            shape.append(size)
            continue
        text = re.sub(r"\b[su]\d+\b", lambda found: symbols.get(found[0], found[0]), str(size))
        shape.append(text)
        if text in ("batch", "sequence", "cache"):
            axes.setdefault(text, index)
    return tuple(shape), axes


def build_sites(
    graph: torch.fx.Graph,
    marks: Iterable[Mark],
    paths: Paths,
    *,
    names: Mapping[str, str],
    symbols: Mapping[str, str],
    caches: Mapping[str, str],
) -> SiteTable:
    """Return the sites of a functional, mark-free graph.

    Args:
        graph: The graph, in topological order.
        marks: What the erased marks named.
        paths: Resolver of module stacks.
        names: Placeholder -> parameter or input name (the leaves of fingerprints).
        symbols: Symbol -> "batch", "sequence", "cache".
        caches: Node name of an updated cache tensor -> "key" or "value", or "conv" or "recurrent" of a state.

    Raises:
        UsageError: A tap has the name of a submodule, or a tap name is used twice in one call of one module.
    """
    prints = fingerprints(graph, names)
    occurrences: Counter[tuple[str, str]] = Counter()
    numbered: Counter[str] = Counter()
    own_sites: dict[Node, Site] = {}
    extra: dict[Node, list[Site]] = {}

    for node in graph.nodes:
        if not is_tensor_node(node):
            continue
        path, call = paths.of(node.meta.get("nn_module_stack"))
        where, op = with_call(path, call), op_name(node)
        shape, axes = describe_shape(node.meta["val"], symbols)
        site = Site(
            name=op_site(where, op, occurrences[where, op]),
            kind="op",
            node=node.name,
            op=op,
            dtype=str(node.meta["val"].dtype).removeprefix("torch."),
            shape=shape,
            axes=axes,
            source=source_line(node),
            fingerprint=prints[node],
            aliases=(node.name, *_document_names(op, numbered)),
        )
        occurrences[where, op] += 1
        own_sites[node] = site
        if node.name in caches:
            extra.setdefault(node, []).append(
                replace(site, name=f"{where}:kv.{caches[node.name]}", kind="kv", aliases=())
            )

    for mark in marks:
        path, call = paths.of(mark.stack)
        where = with_call(path, call)
        tap = mark.port.startswith(".")
        if tap and paths.has_submodule(path, mark.port[1:]):
            raise UsageError(
                f"tap {mark.port[1:]!r} has the name of a submodule of {path!r}", hint="give the tap another name"
            )
        name = tap_site(where, mark.port[1:]) if tap else port_site(where, mark.port)
        base = own_sites.get(mark.node) or _input_site(mark.node, symbols, prints)
        if base is not None:
            named = replace(base, name=name, kind="tap" if tap else "module", aliases=())
            extra.setdefault(mark.node, []).append(named)

    ordered = []
    for node in graph.nodes:
        ordered += [own_sites[node]] if node in own_sites else []
        ordered += extra.get(node, [])
    return SiteTable(ordered)


def _input_site(node: Node, symbols: Mapping[str, str], prints: Mapping[Node, str]) -> Site | None:
    """The site of a module input that is an input of the whole program."""
    value = node.meta.get("val")
    if node.op != "placeholder" or not isinstance(value, torch.Tensor):
        return None
    shape, axes = describe_shape(value, symbols)
    dtype = str(value.dtype).removeprefix("torch.")
    return Site(node.name, "module", node.name, "input", dtype, shape, axes, None, prints[node])


def _document_names(op: str, numbered: Counter[str]) -> list[str]:
    """Names of the reference documents: `mm_default_N`, `gpt_attention_plugin_N`, `fake_gpt_attention_plugin_N`."""
    if named(op).kind == "matrix product":
        kind, stems = "product", ["mm_default"]
    elif named(op).rounding is Rounding.ATTENTION:
        kind, stems = "attention", ["gpt_attention_plugin", "fake_gpt_attention_plugin"]
    else:
        return []
    number = numbered[kind]
    numbered[kind] += 1
    return [f"{stem}_{number}" if number else stem for stem in stems]
