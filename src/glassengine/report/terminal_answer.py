"""What an answer begins with: the results end to end, the inputs that were used, how finely was judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.text import Text

from glassengine.report.words import cost_line, exempt, input_line, judged, result_line
from glassengine.results import VERDICTS, Comparison

_MAX_RESULTS = 3
_MAX_INPUTS = 3
_MAX_NOTES = 3


def answer(result: Comparison) -> Iterator[Text]:
    """Yield the lines."""
    yield from _results(result)
    yield from _inputs(result)
    yield from (Text(f"note     {note}", style="yellow") for note in result.notes[:_MAX_NOTES])
    if result.fineness:
        left_out = exempt(result.exemptions)
        yield Text(f"judged   {judged(result.fineness[0])}{f'; exempt: {left_out}' if left_out else ''}")


def _results(result: Comparison) -> Iterator[Text]:
    # Of several rungs the last one is what the user runs.
    rungs = list(dict.fromkeys(found.rung for found in result.results))
    last = [found for found in result.results if found.rung == (rungs or [""])[-1]]
    order = sorted(last, key=lambda found: -VERDICTS.index(found.verdict))
    told = []
    if result.quantization is not None:  # of a file whose engine is judged on the weights that it has
        told.append(cost_line(result.quantization, result.results))
        order = [found for found in order if found.judged_by != "signal"]
    own = "the engine on the file's weights: " if told else ""
    told += [own + result_line(found) for found in order[:_MAX_RESULTS]]
    yield from (Text(f"{'results' if number == 0 else '':8} {line}") for number, line in enumerate(told))
    if len(order) > _MAX_RESULTS:
        rest = order[_MAX_RESULTS:]
        yield Text(f"         and {len(rest)} more: {sum(found.agrees for found in rest)} agree")
    if not result.results and result.fineness:
        yield Text("results  not compared: the candidate has none that is the baseline's")


def _inputs(result: Comparison) -> Iterator[Text]:
    cases = result.inputs
    if not cases or not cases[0].inputs:
        return
    first = [used for used in cases[0].inputs if used.step == 0]
    origins = Counter(used.origin for case in cases for used in case.inputs)
    parts = [input_line(used) for used in first[:_MAX_INPUTS]]
    if len(first) > _MAX_INPUTS:
        parts.append(f"and {len(first) - _MAX_INPUTS} more")
    steps = sum(case.num_steps for case in cases)
    more = f"; {len(cases)} cases, {steps} steps" if steps > 1 else ""
    yield Text(f"inputs   {' and '.join(origins)}: {', '.join(parts)}{more}")
