"""What kind of mistake hints say, over a corpus of planted ones: right, of three, wrong, and what it costs.

python -m benchmarks kinds                             all of it, an hour of one core
python -m benchmarks kinds --share 8                   an eighth of the mistakes of each program, by turns
python -m benchmarks kinds --families llama --dtypes float32 --mistakes rope_sign --show
python -m benchmarks kinds --sources ports             models of transformers written again by hand
python -m benchmarks kinds --sources training          losses, gradients and updates of a small language model
python -m benchmarks kinds --sources packages          packages of others (in .venv-foreign: make test-foreign)
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import keep, surroundings
from glassengine.diagnose import check
from glassengine.diagnose.training_check import check_training
from glassengine.judge.hypotheses.hints import Hints
from glassengine.results import Comparison, Hint
from tests.corpus import corpus, training
from tests.corpus.families import CAUSAL_LMS, MODULES, make_bench
from tests.corpus.kinds import KINDS, OF_PORTS
from tests.corpus.mistakes.catalog import MISTAKES
from tests.corpus.mistakes.source import SOURCE_MISTAKES, plant_in_source

DTYPES = ("float32", "bfloat16", "float16")
FAMILIES = tuple(name for name in (*CAUSAL_LMS, *MODULES) if name != "llama-1024")
SOURCES = ("planted", "ports", "packages", "training")
_CHUNK = 24
_TESTS = Path(__file__).parent.parent / "tests"
_WRITTEN, _FOREIGN = _TESTS / "diagnose" / "end_to_end", _TESTS / "foreign"


@dataclass
class Row:
    """One mistake and what was said of it.

    Attributes:
        where: "family/dtype", or the port.
        mistake: Its name.
        group: Of the mistake.
        expected: Kinds that are right.
        hints: (kind, proven, score, sentence) of the first three.
        seconds: Of processor for each divergence that was asked about.
        is_named: Whether the op that is wrong was named.
    """

    where: str
    mistake: str
    group: str
    expected: tuple[str, ...]
    hints: tuple[tuple[str, bool, float, str], ...]
    seconds: float
    is_named: bool = True

    @property
    def is_first(self) -> bool:
        """Whether the first hint has a right kind."""
        return bool(self.hints) and self.hints[0][0] in self.expected

    @property
    def is_among(self) -> bool:
        """Whether one of the first three has."""
        return any(hint[0] in self.expected for hint in self.hints)

    @property
    def is_proven(self) -> bool:
        """Whether the first hint is said as certain."""
        return bool(self.hints) and self.hints[0][1]

    @property
    def is_wrong(self) -> bool:
        """Whether the first hint says a wrong kind: "other" that is not proven says none."""
        return bool(self.hints) and not self.is_first and (self.hints[0][0] != "other" or self.is_proven)


class Cost:
    """Seconds of processor spent on hints, by side."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = defaultdict(list)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count what hints cost while this is open."""
        own, seconds = Hints.of, self.seconds

        def of(hints: Hints, *args: Any) -> list[Hint]:
            started = time.process_time()
            try:
                return own(hints, *args)
            finally:
                seconds[id(hints._side)].append(time.process_time() - started)

        Hints.of = of  # type: ignore[method-assign]
        try:
            yield
        finally:
            Hints.of = own  # type: ignore[method-assign]

    def largest(self, side: Any = None) -> float:
        """Return the largest, of one side or of all."""
        found = self.seconds.values() if side is None else [self.seconds.get(id(side), [])]
        return max((one for each in found for one in each), default=0.0)


def hints_of(result: Comparison) -> tuple[tuple[str, bool, float, str], ...]:
    """Return what is said of the first divergence."""
    first = result.first_divergence
    return tuple((h.kind, h.proven, h.score, h.text) for h in first.hints[:3]) if first is not None else ()


def planted(family: str, dtype: str, options: argparse.Namespace, turn: int) -> list[Row]:
    """Return the rows of mistakes in the graph, the weights and the modules of one model of transformers."""
    torch.set_num_threads(1)
    bench = make_bench(family, dtype)
    names = [mistake.name for mistake in (*MISTAKES, *SOURCE_MISTAKES) if mistake.name in KINDS]
    wanted = set(options.mistakes or names[turn % options.share :: options.share])
    graph, _ = corpus.plant_all(bench, [m for m in MISTAKES if m.name in wanted and m.name in KINDS])
    source, _ = corpus.plant_all(bench, [m for m in SOURCE_MISTAKES if m.name in wanted], 0, plant_in_source)
    rows = []
    every = [*graph, *source]
    for start in range(0, len(every), _CHUNK):
        part = every[start : start + _CHUNK]
        sides = [corpus.interpreted(bench, item.mutant.program) for item in part]
        cost = Cost()
        with cost.measured():
            results = corpus.judge(bench, sides)[1:]
        for item, side, result in zip(part, sides, results, strict=True):
            first, mistake = result.first_divergence, item.mutant.mistake
            if first is None:
                continue  # not found: another table counts these
            is_named = corpus.is_near(bench.program, item, first.node or "", corpus.own_nodes(side))
            said = KINDS[mistake.name], hints_of(result), cost.largest(side)
            rows.append(Row(bench.name, mistake.name, mistake.group, *said, is_named))
    return rows


def ports(options: argparse.Namespace) -> list[Row]:
    """Return the rows of models that are written again by hand."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(_WRITTEN))
    written_ports = importlib.import_module("hand_written").PORTS
    rows = []
    for port, mistake in list(OF_PORTS)[:: options.share]:
        if options.mistakes and mistake not in options.mistakes:
            continue
        written = written_ports[port]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "inputs.pt"
            torch.save(written.inputs, path)
            baseline = written.baseline()
            cost = Cost()
            with cost.measured():
                made = written.port(copy.deepcopy(baseline), mistake).eval()
                result = check(baseline, candidate=made, inputs=str(path))
        said = OF_PORTS[port, mistake], hints_of(result), cost.largest()
        rows.append(Row(f"port of {port}", mistake, "port", *said))
        print(f"{port}: {mistake}", file=sys.stderr, flush=True)
    return rows


def trained(options: argparse.Namespace) -> list[Row]:
    """Return the rows of training runs: mistakes in the loss, the backward and the update."""
    torch.set_num_threads(1)
    rows = []
    for name in list(training.MISTAKES)[:: options.share]:
        if options.mistakes and name not in options.mistakes:
            continue
        mistake, cost = training.MISTAKES[name], Cost()
        made = {"optimizer": mistake.baseline, "candidate_optimizer": mistake.candidate}
        with cost.measured():
            result = check_training(*training.sides(name), inputs=training.batches(), **made)
        rows.append(Row("training", name, "training", mistake.kinds, hints_of(result), cost.largest()))
        print(f"training: {name}", file=sys.stderr, flush=True)
    return rows


def packages(options: argparse.Namespace) -> list[Row]:
    """Return the rows of models of other packages, as far as these are installed."""
    sys.path.insert(0, str(_FOREIGN))
    known = importlib.import_module("kinds").KINDS
    rows = []
    for file in sorted(_FOREIGN.glob("*.py")):
        if "PAIRS" not in file.read_text() or file.stem.startswith("test_"):
            continue
        for pair in _pairs(file.stem):
            if options.pairs and not any(fnmatch(pair.name, pattern) for pattern in options.pairs):
                continue
            missing = [name for name in pair.packages if importlib.util.find_spec(name) is None]
            if missing:
                print(f"{pair.name}: not installed: {', '.join(missing)}", file=sys.stderr, flush=True)
                continue
            for mistake in list(pair.mistakes)[:: options.share]:
                kinds = pair.mistakes[mistake].kinds or known.get(pair.name, {}).get(mistake, "").split(", ")
                if not kinds[0] or (options.mistakes and mistake not in options.mistakes):
                    continue
                rows.append(_row_of(pair, mistake, tuple(kinds)))
                _keep(rows, options)
                print(f"{pair.name}: {mistake}", file=sys.stderr, flush=True)
    return rows


def _pairs(name: str) -> Sequence[Any]:
    try:
        return importlib.import_module(name).PAIRS
    except ImportError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        return ()


def _row_of(pair: Any, mistake: str, kinds: tuple[str, ...]) -> Row:
    torch.set_num_threads(1)
    baseline, candidate = pair.make(mistake)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "inputs.pt"
        pair.keep_inputs(path)
        cost = Cost()
        with cost.measured():
            result = check(baseline, candidate=candidate, inputs=str(path))
    site = "" if result.first_divergence is None else result.first_divergence.site
    is_named = any(fnmatch(site, pattern) for pattern in pair.mistakes[mistake].sites)
    return Row(pair.name, mistake, "package", kinds, hints_of(result), cost.largest(), is_named)


def _keep(rows: Sequence[Row], options: argparse.Namespace) -> None:
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def _as_row(found: dict[str, Any]) -> Row:
    hints = tuple(tuple(hint) for hint in found.pop("hints"))
    return Row(**{**found, "expected": tuple(found["expected"])}, hints=hints)


def table(rows: Sequence[Row]) -> str:
    """Return a line for each group and kind, and the totals."""
    head = f"{'':28s} {'number':>6s} {'right':>7s} {'of three':>8s} {'proven':>7s} {'certain, wrong':>14s} "
    lines = [f"{head}{'wrong':>7s} {'nothing':>7s} {'s':>6s}"]
    for name, key in (("by source", lambda row: row.where.split("/")[0]), ("by group", lambda row: row.group)):
        lines += ["", name]
        lines += [_line(one, [row for row in rows if key(row) == one]) for one in dict.fromkeys(map(key, rows))]
    lines += ["", "by dtype"]
    dtypes = dict.fromkeys(row.where.partition("/")[2] or "port, float32" for row in rows)
    lines += [_line(one, [r for r in rows if (r.where.partition("/")[2] or "port, float32") == one]) for one in dtypes]
    lines += ["", "by kind"]
    kinds = dict.fromkeys(row.expected[0] for row in rows)
    lines += [_line(one, [row for row in rows if row.expected[0] == one]) for one in kinds]
    named = [row for row in rows if row.is_named]
    lines += ["", _line("where the op was named", named), _line("all", rows)]
    return "\n".join(lines)


def _line(name: str, rows: Sequence[Row]) -> str:
    number = max(1, len(rows))
    figures = [
        sum(found) / number
        for found in (
            [row.is_first for row in rows],
            [row.is_among for row in rows],
            [row.is_proven for row in rows],
            [row.is_wrong and row.is_proven for row in rows],
            [row.is_wrong for row in rows],
            [not row.hints for row in rows],
        )
    ]
    right, among, proven, certain, wrong, nothing = figures
    cost = max((row.seconds for row in rows), default=0.0)
    return (
        f"{name:28s} {len(rows):6d} {right:7.1%} {among:8.1%} {proven:7.1%} {certain:14.1%} {wrong:7.1%} "
        f"{nothing:7.1%} {cost:6.2f}"
    )


def said(rows: Sequence[Row]) -> str:
    """Return a line for each mistake whose first hint is not right."""
    lines = []
    for row in rows:
        hint = row.hints[0] if row.hints else ("nothing", False, 0.0, "")
        what = "CERTAIN" if row.is_wrong and row.is_proven else "WRONG" if row.is_wrong else "UNSAID"
        what = "right" if row.is_first else what
        named = "" if row.is_named else " (another op is named)"
        lines.append(f"{what:8s} {row.where} {row.mistake}{named}: {hint[0]} for {row.expected[0]}: {hint[3][:110]}")
    return "\n".join(sorted(lines))


def main(arguments: Sequence[str] = ()) -> None:
    """Run the corpus and print the table."""
    parser = argparse.ArgumentParser("benchmarks kinds")
    parser.add_argument("--sources", type=lambda text: text.split(","), default=list(SOURCES))
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(FAMILIES))
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(DTYPES))
    parser.add_argument("--mistakes", type=lambda text: text.split(","), default=None)
    parser.add_argument("--pairs", nargs="+", help="of packages, as patterns of their names: 'diffusers*'")
    parser.add_argument("--share", type=int, default=1, help="every n-th mistake in each program; default all")
    parser.add_argument("--show", action="store_true", help="also what is right, and keep nothing")
    parser.add_argument("--json", type=Path, help="keeps every row")
    parser.add_argument(
        "--rows", type=Path, nargs="+", default=[], help="that --json kept: count these, with no sources"
    )
    options = parser.parse_args(arguments)
    rows = [_as_row(found) for path in options.rows for found in json.loads(path.read_text())]
    options.sources = [] if options.rows else options.sources
    if "ports" in options.sources:
        rows += ports(options)
    if "training" in options.sources:
        rows += trained(options)
        _keep(rows, options)
    if "packages" in options.sources:
        rows += packages(options)
    for number, family in enumerate(options.families if "planted" in options.sources else ()):
        for turn, dtype in enumerate(options.dtypes):
            started = time.perf_counter()
            rows += planted(family, dtype, options, number + turn)
            print(f"{family}/{dtype} {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            _keep(rows, options)
    shown = rows if options.show else [row for row in rows if not row.is_first]
    text = [f"$ python -m benchmarks kinds {' '.join(arguments)}", surroundings(), "", table(rows), "", said(shown)]
    if options.show or options.mistakes:
        print("\n".join(text))
    else:
        keep("kinds", "\n".join(text), on_top=True)
