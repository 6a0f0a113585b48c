"""What `--add-output` and TRTLLM_ADD_OUTPUT ask for, resolved to sites before anything is built.

`SITE|NODE|GLOB[=ALIAS][:DTYPE]`: an alias of a pattern that matches several tensors gets an index, `ALIAS_0`,
`ALIAS_1`, ... in graph order. Without an alias an output is called by its site, or, where another name was given
(an FX node, or a name of the reference documents such as `mm_default`), by that name. An output keeps the dtype that it
is computed in; a DTYPE asks for a cast when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from glassengine.engine.store.manifest import AddedOutput
from glassengine.engine.store.requests import Request, find_sites
from glassengine.errors import UsageError
from glassengine.program.representation.outputs import OutputPlan, plan_outputs
from glassengine.program.representation.program import Program
from glassengine.sites import Site


@dataclass(frozen=True)
class Requested:
    """One output asked for: the name to give it, its site, and the dtype to cast it to on reading."""

    name: str
    site: Site
    cast: str | None = None


def resolve_requests(program: Program, requests: Iterable[Request]) -> list[Requested]:
    """Return the outputs that `requests` name, in the order asked for.

    Raises:
        UnknownNameError: A pattern matches nothing; carries the nearest names.
        UsageError: Two different tensors would have one name, or a name is taken by an input or result.
    """
    inputs = {port.name for port in program.inputs}
    taken = inputs | set(program.output_nodes)
    found: dict[str, Requested] = {}
    for pattern, alias, cast in requests:
        sites = find_sites(program.sites, pattern)
        for index, site in enumerate(sites):
            if alias is not None:
                name = alias if len(sites) == 1 else f"{alias}_{index}"
            else:
                is_free = program.output_nodes.get(pattern, site.node) == site.node and pattern not in inputs
                name = pattern if len(sites) == 1 and pattern in site.aliases and is_free else site.name
            if name in found and (found[name].site.node, found[name].cast) != (site.node, cast):
                raise UsageError(
                    f"two outputs would be called {name!r}",
                    got=f"{found[name].site.name} and {site.name}",
                    hint="give each its own name: --add-output SITE=ALIAS",
                )
            if name in taken and program.output_nodes.get(name) != site.node:
                raise UsageError(
                    f"an output cannot be called {name!r}: an input or result has this name",
                    hint=f"give it another name: --add-output {site.name}=ALIAS",
                )
            found[name] = Requested(name, site, cast)
    return list(found.values())


def plan(
    program: Program, requested: Sequence[Requested], *, sizes: Mapping[str, int], byte_budget: int | None
) -> tuple[OutputPlan, tuple[AddedOutput, ...], dict[str, str]]:
    """Decide how each requested output is observed.

    Args:
        program: The program.
        requested: What was asked for.
        sizes: "batch" and "cache" at their largest.
        byte_budget: Most bytes of added outputs in one decode step of these sizes.

    Returns:
        The plan on nodes, the entries of the manifest, and name -> reason for what does not fit the budget.
    """
    nodes = [request.site.node for request in requested]
    decided = plan_outputs(program, nodes, sizes={**sizes, "sequence": 1}, byte_budget=byte_budget)
    added, left_out = [], {}
    for request in requested:
        site = request.site
        if site.node in decided.left_out:
            left_out[request.name] = decided.left_out[site.node]
            continue
        derived = decided.derived.get(site.node)
        shape = tuple(site.shape)
        dtype, axes = request.cast or site.dtype, dict(site.axes)
        cast_from = site.dtype if request.cast else None
        text = None if derived is None else str(derived)
        added.append(AddedOutput(request.name, site.name, site.node, text, dtype, shape, axes, site.source, cast_from))
    return decided, tuple(added), left_out


def output_bytes(program: Program, nodes: Sequence[str], **sizes: int) -> int:
    """Return the bytes of `nodes` as outputs of one step of these sizes (batch, sequence, cache)."""
    return plan_outputs(program, nodes, sizes=sizes).num_bytes if nodes else 0


def tap_requests(program: Program) -> list[Request]:
    """Return a request for every tap of the program."""
    return [Request(site.name) for site in program.sites if site.kind == "tap"]
