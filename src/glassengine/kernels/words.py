"""The message of a failed assertion: element, values, which elements, kind of mistake."""

from __future__ import annotations

from glassengine.kernels.leaves import passes
from glassengine.results.kernels import Match, TensorMatch


def explained(match: Match) -> str:
    """Return the screen of a match."""
    if match.ok:
        return f"{match.verdict}: rounding explains every difference"
    lines = [f"{match.verdict}: rounding does not explain the difference"]
    for one in match.tensors:
        if not passes(one):
            lines += _of_tensor(one)
    for number, mistake in enumerate(match.mistakes[:3]):
        how = " (proven: the reference with this mistake gives the same)" if mistake.proven else ""
        lines.append(f"  {'looks like' if not number else 'or        '}  {mistake.text}{how}")
    if match.not_traced:
        lines.append(f"  note        the reference could not be traced ({match.not_traced}): its floor is coarser")
    lines += [f"  note        {note}" for note in match.notes]
    return "\n".join(lines)


def _of_tensor(one: TensorMatch) -> list[str]:
    name = one.path or "result"
    lines = [f"  {name}: {one.dtype}{list(one.shape)}" + (f", {one.reason}" if one.reason else "")]
    if one.index is not None:
        ulp = "" if one.ulp is None else f", {one.ulp:.3g} ulp apart"
        lines.append(f"  element     {list(one.index)}: {one.actual:.9g}, expected {one.expected:.9g}{ulp}")
    if one.where:
        lines.append(f"  where       {one.where} ({one.num_beyond} beyond rounding)")
    if one.noise_ratio is not None:
        bound = "" if one.bound_ratio is None else f", {one.bound_ratio:.3g} times the bound"
        lines.append(f"  error       {one.noise_ratio:.3g} times rounding{bound}")
    return lines
