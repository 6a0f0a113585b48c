"""The order of execution of a run, and the phases, parameters and modules that names of sites tell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from glassengine.recording.layout.layout import Entry
from glassengine.sites import ROOT

PHASES = ("forward", "backward", "update")


def phase_of(site: str) -> str:
    """Return in which part of a training step a site of a recording is made."""
    port = site.rpartition(":")[2]
    if port == "param" or port.startswith("state."):
        return "update"
    return "backward" if port.startswith("grad") else "forward"


def is_of_parameter(site: str) -> bool:
    """Whether a site is that of a parameter: its gradient, what an update made of it, or the optimizer's state."""
    port = site.partition(":")[2]
    return port in ("grad", "param") or port.startswith("state.")


def is_of_activation(site: str) -> bool:
    """Whether a site is the gradient of an activation."""
    return site.partition(":")[2].startswith(("grad_in", "grad_out"))


def paths_above(path: str) -> set[str]:
    """Return the paths of the modules around one."""
    names = path.split(".") if path != ROOT else []
    return {".".join(names[:i]) for i in range(1, len(names))} | ({ROOT} if names else set())


class ExecutionOrder:
    """The order in which the processes of one run made their tensors.

    All have the same clock, the order of sites within a step. Processes that have modules of their own are stages: in a
    forward the later ones come after all of the earlier ones, in a backward ahead of them.

    Args:
        entries: Of some steps, of one rank or of several.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._by_step: dict[int, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
        for entry in entries:
            self._by_step[entry.step][entry.rank].append(entry)
        self._place: dict[tuple[int, int, str], tuple[int, ...]] = {}
        self._placed: set[int] = set()

    def key(self, entry: Entry) -> tuple[int, ...]:
        """Return what sorts these entries: by step, by position in it, by rank."""
        if entry.step not in self._placed:
            self._placed.add(entry.step)
            self._place_step(entry.step, self._by_step[entry.step])
        return entry.step, *self._place[entry.step, entry.rank, entry.site], entry.rank

    def _place_step(self, step: int, by_rank: Mapping[int, Sequence[Entry]]) -> None:
        stages = _stages(by_rank)
        for stage, ranks in enumerate(stages):
            merged = _merged([[entry.site for entry in by_rank[rank]] for rank in ranks])
            last = _last_results(merged)
            for rank in ranks:
                for entry in by_rank[rank]:
                    phase = PHASES.index(phase_of(entry.site))
                    number = -stage if phase == 1 else stage
                    # What a module sums up in one number, a loss, is made of its other results.
                    is_sum = not entry.shape and entry.site in last
                    at = last[entry.site] if is_sum else merged[entry.site]
                    self._place[step, rank, entry.site] = (phase, number, at, is_sum)


def _stages(by_rank: Mapping[int, Sequence[Entry]]) -> list[list[int]]:
    """Return the ranks of each stage, in the order of their first one; all in one if there are no stages."""
    if len(by_rank) == 1:
        return [list(by_rank)]
    paths = {rank: {path_of(entry.site) for entry in entries} for rank, entries in by_rank.items()}
    everywhere = set.intersection(*paths.values())
    stages: list[tuple[set[str], list[int]]] = []
    for rank, found in sorted(paths.items()):
        own = found - everywhere
        for known, ranks in stages:
            if 2 * len(known & own) >= min(len(known), len(own)):
                known |= own
                ranks.append(rank)
                break
        else:
            stages.append((own, [rank]))
    # If all continue with the same modules, modules of only some ranks (experts, say) are not a stage.
    holders = {above for found in paths.values() for path in found for above in paths_above(path)}
    if len(stages) > 1 and all(_goes_on(entries, everywhere - holders, everywhere) for entries in by_rank.values()):
        return [sorted(paths)]
    return [ranks for _, ranks in stages]


def _goes_on(entries: Sequence[Entry], common: set[str], everywhere: set[str]) -> bool:
    """Whether one of the `common` modules is called after the last one that not all processes have."""
    forward = [path_of(entry.site) for entry in entries if phase_of(entry.site) == "forward"]
    last = max((i for i, path in enumerate(forward) if path not in everywhere), default=-1)
    return any(path in common for path in forward[last + 1 :])


def _last_results(positions: Mapping[str, int]) -> dict[str, int]:
    """Return for each result of a module the position of the last one of the same call."""
    calls: dict[str, int] = {}
    for site, at in positions.items():
        call, _, port = site.partition(":")
        if port.startswith("out"):
            calls[call] = max(at, calls.get(call, at))
    return {site: calls[site.partition(":")[0]] for site in positions if site.partition(":")[2].startswith("out")}


def path_of(site: str) -> str:
    """Return the module path of a site."""
    return site.partition(":")[0].partition("@")[0]


def _merged(sequences: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the position of each site in one sequence of all of them; what one has alone is after what it follows."""
    merged = list(sequences[0])
    known = set(merged)
    for sequence in sequences[1:]:
        if known.issuperset(sequence):
            continue
        at = 0
        positions = {site: i for i, site in enumerate(merged)}
        inserts: list[tuple[int, str]] = []
        for site in sequence:
            if site in known:
                at = positions[site] + 1
            else:
                inserts.append((at, site))
                known.add(site)
        for offset, (position, site) in enumerate(inserts):
            merged.insert(position + offset, site)
    return {site: i for i, site in enumerate(merged)}
