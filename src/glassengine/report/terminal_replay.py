"""What came of a replay, on one screen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from glassengine.report.terminal_check import check
from glassengine.report.words import replay_sentence

if TYPE_CHECKING:
    from glassengine.results.replay import Bisection, Replayed, ReplayedOutput

_MAX_OUTPUTS = 20
_MAX_OPS = 8


def replayed(result: Replayed) -> RenderableType:
    """Return the one screen."""
    parts: list[RenderableType] = [_headline(result)]
    if result.error is not None:
        parts.append(Text(f"it raised: {result.error.strip().splitlines()[0]}", style="bold red"))
    if result.outputs:
        parts.append(_outputs(result.outputs))
    if result.comparison is not None:
        parts += [Text(), check(result.comparison)]
    if result.first_nonfinite is not None:
        parts += _nonfinite(result)
    if result.bisection is not None:
        parts += _bisection(result.bisection)
    parts += [Text(f"note: {note}", style="yellow") for note in result.notes]
    return Group(*parts)


def _headline(result: Replayed) -> Text:
    text = Text()
    text.append("ok" if result.ok else "NOT OK", style="bold green" if result.ok else "bold red")
    text.append(f": {replay_sentence(result)}\n")
    then = f", recorded with {result.recorded_backend}" if result.recorded_backend else ""
    text.append(f"execution {result.execution} of {result.executable} on {result.backend}{then}")
    return text


def _outputs(outputs: tuple[ReplayedOutput, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("output", overflow="fold")
    for name in ("dtype", "shape", "as recorded", "largest difference", "not finite"):
        table.add_column(name, no_wrap=True)
    worst = sorted(outputs, key=lambda output: output.same_bits is not False)
    for output in worst[:_MAX_OUTPUTS]:
        bits = {None: "not recorded", True: "same bits", False: f"{output.num_different} differ"}[output.same_bits]
        largest = "" if not output.max_abs_diff else f"{output.max_abs_diff:.3g}"
        style = "red" if output.same_bits is False else ""
        shape = ",".join(map(str, output.shape))
        table.add_row(output.name, output.dtype, shape, Text(bits, style=style), largest, output.nonfinite)
    if len(outputs) > _MAX_OUTPUTS:
        table.add_row(f"and {len(outputs) - _MAX_OUTPUTS} more (--json lists all)")
    return table


def _nonfinite(result: Replayed) -> Iterator[Text]:
    found = result.first_nonfinite
    assert found is not None
    yield Text(f"first {found['kinds']}: {found['op']} ({found['node']})", style="bold")
    if found["module"]:
        yield Text(f"  module   {found['module']}")
    if found["source"]:
        yield Text(f"  source   {found['source']}")
    yield Text(f"  there    {found['num_elements']} of {found['total_elements']} elements")


def _bisection(found: Bisection) -> Iterator[Text]:
    if found.failure is None:
        return
    yield Text(f"what is wrong: {found.message}", style="bold")
    for op in found.ops[:_MAX_OPS]:
        module = "" if op.module == "." else f" in {op.module}"
        yield Text(f"  op       {op.op}{module}" + (f"  {op.source}" if op.source else ""))
    if len(found.ops) > _MAX_OPS:
        yield Text(f"  op       {len(found.ops) - _MAX_OPS} more")
    if found.part is not None:
        yield Text(f"  part     {found.part} (torch's CompilerBisector)")
    if found.reproduction is not None:
        yield Text(f"  test     python {found.reproduction}/test_repro.py")
    else:
        yield Text("  test     --reproduction DIR writes one of this piece alone")
    yield Text(f"  {found.num_trials} pieces of the graph were compiled")
