"""What an answer begins with: the results end to end, the inputs that were used, how finely was judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.text import Text

from glassengine.results import MOST_OPS, VERDICTS, Comparison, Fineness, ResultComparison
from glassengine.results.inputs_used import InputUsed

_MAX_RESULTS = 3
_MAX_INPUTS = 3


def answer(result: Comparison) -> Iterator[Text]:
    """Yield the lines."""
    yield from _results(result)
    yield from _inputs(result)
    if result.fineness:
        yield Text(f"judged   {_judged(result.fineness[0])}{_exempt(result)}")


def _results(result: Comparison) -> Iterator[Text]:
    # Of several rungs the last one is what the user runs.
    rungs = list(dict.fromkeys(found.rung for found in result.results))
    last = [found for found in result.results if found.rung == (rungs or [""])[-1]]
    order = sorted(last, key=lambda found: -VERDICTS.index(found.verdict))
    for number, found in enumerate(order[:_MAX_RESULTS]):
        yield Text(f"{'results' if number == 0 else '':8} {_result(found)}{_tokens(result, found)}")
    if len(order) > _MAX_RESULTS:
        rest = order[_MAX_RESULTS:]
        yield Text(f"         and {len(rest)} more: {sum(found.agrees for found in rest)} agree")
    if not result.results and result.fineness:
        yield Text("results  not compared: the candidate has none that is the baseline's")


def _result(found: ResultComparison) -> str:
    text = found.in_words()
    if not found.agrees:
        text += f" in {found.case}, step {found.step}"
    if found.method == "position":
        text += f"; the candidate calls it {found.candidate_name}"
    if found.exempt:
        text += f"; {found.exempt:.1%} of it exempt: it depends on a tie"
    return text


def _tokens(result: Comparison, found: ResultComparison) -> str:
    """Say whether a token changes, where the result is logits of a language model."""
    severity = result.severity.get(found.rung)
    if found.name != "logits" or severity is None or severity["token_agreement"] is None:
        return ""
    number = severity["num_tokens"]
    changed = number - round(severity["token_agreement"] * number)
    text = f"{changed} of {number} next tokens change" if changed else "no next token changes"
    return f"; {text}, mean KL {severity['mean_kl']:.2g} nats"


def _inputs(result: Comparison) -> Iterator[Text]:
    cases = result.inputs
    if not cases or not cases[0].inputs:
        return
    first = [used for used in cases[0].inputs if used.step == 0]
    origins = Counter(used.origin for case in cases for used in case.inputs)
    parts = [_input(used) for used in first[:_MAX_INPUTS]]
    if len(first) > _MAX_INPUTS:
        parts.append(f"and {len(first) - _MAX_INPUTS} more")
    steps = sum(case.num_steps for case in cases)
    more = f"; {len(cases)} cases, {steps} steps" if steps > 1 else ""
    yield Text(f"inputs   {' and '.join(origins)}: {', '.join(parts)}{more}")


def _input(used: InputUsed) -> str:
    if used.shape is None:
        return f"{used.name} {used.value}"
    text = f"{used.name} {used.dtype}[{', '.join(map(str, used.shape))}]"
    if used.minimum is None or used.maximum is None:
        return text
    if used.minimum == used.maximum:
        return f"{text} all {used.minimum:.4g}"
    return f"{text} {used.minimum:.4g}..{used.maximum:.4g}"


def _judged(found: Fineness) -> str:
    parts = [
        (found.op_by_op, "op by op"),
        (found.in_regions, f"in regions of at most {MOST_OPS} ops"),
        (found.in_large_regions, "in larger regions"),
        (found.results_only, "by the results only"),
    ]
    text = ", ".join(f"{share:.0%} {how}" if share >= 0.005 else f"<1% {how}" for share, how in parts if share > 0)
    if found.largest_region > MOST_OPS:
        text += f" (the largest: {found.largest_region} ops, ending in {found.largest_region_end})"
    return f"{text} of {found.num_sites} float-valued sites" if found.num_sites else "no float-valued op"


def _exempt(result: Comparison) -> str:
    """Say which share of the elements did not count, and why."""
    parts = [f"{_share(one.share)} {one.reason} (most in {one.largest_site})" for one in result.exemptions]
    return f"; exempt: {', '.join(parts)}" if parts else ""


def _share(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 else "<0.1%"
