"""Writes the listings of build artifacts: `<backend>_network_def.py`, `plugin.txt`, and `index.html`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from glassengine.reading.files import is_regular, open_regular
from glassengine.report.head import Cell, Chip, Head, PageTable, filled, table
from glassengine.report.page.write import page_text

if TYPE_CHECKING:
    from glassengine.backends.protocol.backend import Layer, Network, NetworkTensor

_HEAD = '''"""Network of the back-end {backend}: {note}

Above each tensor stands the layer that produces it and the site of its node. `--add-output` and TRTLLM_ADD_OUTPUT take
the names of layers that are called like a node; a layer called NODE/... is a part of that node. Not meant to be run.
"""
'''

_LONGEST = 200
"""Most characters of one attribute; tables of a quantized layer would fill the screen."""
_MAX_DIFF_BYTES = 200_000
"""Most bytes of one difference on the page; the rest is in its file."""
_MOST_OPEN = 60
_DIFFERENCE = "diff-from-previous.txt"


def network_text(network: Network, backend: str, sites: Mapping[str, Sequence[str]]) -> str:
    """Return the listing: one statement per layer, in a comment above it the names of layer, nodes and sites."""
    lines = [_HEAD.format(backend=backend, note=network.note), ""]
    for tensor in network.inputs:
        lines += [
            f"# input  {tensor.dtype}{tensor.shape}",
            f"{_identifier(tensor.name)} = network.input({tensor.name!r})",
        ]
    for layer in network.layers:
        lines.append("")
        lines.append(f"# layer {layer.name}" + _place(layer.nodes, layer.name, sites))
        lines += [f"#   {_described(tensor)}" for tensor in layer.outputs if tensor.dtype or tensor.shape]
        results = ", ".join(_identifier(tensor.name) for tensor in layer.outputs) or "_"
        arguments = [_identifier(name) if name else "None" for name in layer.inputs]
        arguments += [f"{_identifier(key)}={_short(value)}" for key, value in layer.attributes.items()]
        lines.append(f"{results} = network.{_identifier(layer.operation)}({', '.join(arguments)})")
    lines.append("")
    lines += [f"network.output({_identifier(name)}, name={name!r})" for name in network.outputs]
    return "".join(f"{line}\n" for line in lines)


def plugin_text(custom: Sequence[Layer], network: Network, sites: Mapping[str, Sequence[str]]) -> str:
    """Return the content of `plugin.txt`: inputs, outputs and attributes of each fused or custom op, or "none".

    Args:
        custom: Fused and custom ops of the program, as layers.
        network: What the back-end made of it.
        sites: FX node -> its sites.
    """
    blocks = []
    for layer in custom:
        parts = [other.name for other in network.layers if layer.name in other.nodes]
        done_by = parts if parts != [layer.name] else []
        blocks.append([*_plugin_lines(layer, sites), *([f"  carried out by {', '.join(done_by)}"] if done_by else [])])
    known = {layer.name for layer in custom}
    for layer in (network.optimized or network).layers:
        if layer.is_plugin and layer.name not in known:
            blocks.append(list(_plugin_lines(layer, sites)))
    return "\n".join("".join(f"{line}\n" for line in block) for block in blocks) or "none\n"


def _plugin_lines(layer: Layer, sites: Mapping[str, Sequence[str]]) -> Iterator[str]:
    yield f"{layer.name}: {layer.operation}{_place(layer.nodes, layer.name, sites)}"
    for name in layer.inputs:
        yield f"  input   {name or '(none)'}"
    for tensor in layer.outputs:
        yield f"  output  {_described(tensor)}"
    for key, value in layer.attributes.items():
        yield f"  {key} = {_short(value)}"


def _place(nodes: Iterable[str], name: str, sites: Mapping[str, Sequence[str]]) -> str:
    """Return the nodes of a layer, where they are not its name, with their sites."""
    parts = []
    for node in nodes:
        site = " = ".join(name for name in sites.get(node, ())[:1])
        parts.append(site if node == name else f"{node} ({site})" if site else node)
    return f"  # {', '.join(filter(None, parts))}" if any(parts) else ""


def _described(tensor: NetworkTensor) -> str:
    return f"{tensor.name}: {tensor.dtype}{tensor.shape}" if tensor.dtype or tensor.shape else tensor.name


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"


def _identifier(name: str) -> str:
    """Return `name` as a Python name; the real one is in the comment above."""
    text = re.sub(r"\W", "_", name)
    return f"_{text}" if not text or text[0].isdigit() else text


def index_page(directory: Path, manifest: Mapping[str, Any]) -> str:
    """Return the page for the artifacts in `directory`."""
    files: list[list[Cell]] = [
        [_link(name)] for name in ["manifest.json", *(name for name in manifest["files"] if "/" not in name)]
    ]
    for path in sorted(directory.glob("earlier-*")):
        # A build that was killed has no page.
        page = next((name for name in ("index.html", "manifest.json") if (path / name).is_file()), "")
        files += [[_link(f"{path.name}/{page}", f"{path.name}, artifacts of an earlier build")]] * path.is_dir()
    stages: list[list[Cell]] = []
    changes: list[PageTable] = []
    for entry in manifest["stages"]:
        name = entry["directory"]
        counts = [str(entry[key]) for key in ("num_nodes", "added", "removed", "changed")]
        stages.append([name, *counts, _link(f"{name}/graph_module.py"), _link(f"{name}/graph.txt")])
        path = directory / name / _DIFFERENCE
        if is_regular(path, inside=directory):
            stages[-1].append(_link(f"{name}/{_DIFFERENCE}"))
            with open_regular(path, inside=directory) as file:
                lines = file.read(_MAX_DIFF_BYTES).decode("utf-8", "replace").splitlines()
            about = f"{counts[1]} added, {counts[2]} removed, {counts[3]} changed; the file has all of it."
            rows = [(line,) for line in lines]
            changes.append(table(f"To {name}", about, ("change",), rows, is_open=len(rows) <= _MOST_OPEN))
        else:
            stages[-1].append("")
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items() if version)
    about = "What each did to the graph: nodes are matched by structure, whatever their numbers."
    columns = ("stage", "nodes", "added", "removed", "changed", "module", "graph", "difference")
    failure = manifest["failure"] or "the build was interrupted"
    return page_text(
        Head(
            f"Build artifacts of {manifest['model']}" if manifest["complete"] else f"Incomplete: {failure}",
            manifest["complete"],
            lines=(
                ("back-end", f"{manifest['backend']}, {manifest['dtype']}"),
                ("command", " ".join(manifest["command_line"])),
                ("versions", versions),
                ("git", str(manifest["git"] or "not in a repository")),
            ),
            tables=(
                table("Files", "What the build made, beside the stages.", ("file",), files, is_open=True),
                table("Stages", about, columns, stages, is_open=True),
                *filled(*changes),
            ),
        )
    )


def _link(path: str, text: str = "") -> Chip:
    return Chip("", text or path.rpartition("/")[2], quote(path))
