"""The table of the verdict: false alarms, mistakes found, ops named.

python -m benchmarks verdict                         the whole corpus, hours of one core
python -m benchmarks verdict --sample 10             ten mistakes of each program
python -m benchmarks verdict --families llama --dtypes float32 --kinds rope_sign --executions interpreted
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from glassengine.backends.registry import find_backend
from glassengine.errors import GlassError, UsageError
from glassengine.testing import corpus, engines, models
from glassengine.testing.edits import DoesNotApply, plant
from glassengine.testing.families import FAMILIES, make_bench
from glassengine.testing.mistakes import MISTAKES
from glassengine.testing.rewrites import REWRITES
from glassengine.testing.source_mistakes import SOURCE_MISTAKES, plant_in_source
from glassengine.testing.variations import VARIATIONS

DTYPES = ("float32", "bfloat16", "float16")
EXECUTIONS = ("interpreted", "same kernels", "everything")
"""What mutants run in; legitimate runs take every variation."""

BACKENDS = ("eager", "onnxruntime", "inductor")
BUNDLED = Path(__file__).parent.parent / "examples" / "tiny-llama"
CHUNK = 48
"""Mutants that run in lockstep: more share one reference, and memory."""


def run_bench(family: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one program."""
    torch.set_num_threads(1)
    bench = make_bench(family, dtype, seed=options.seed, bundled=BUNDLED)
    rows: list[corpus.Row] = []
    if options.kinds is None:
        rows += legitimate(bench)
        rows += [row for backend in options.backends for row in engines_of(bench, backend, options)]
    rows += mistakes(bench, options)
    return [row.to_dict() for row in rows]


def legitimate(bench: corpus.Bench) -> list[corpus.Row]:
    """Return the rows of all variations and rewrites."""
    sides: list[Any] = [corpus.varied(bench, bench.program, variation) for variation in VARIATIONS]
    names = [variation.name for variation in VARIATIONS]
    left_out = []
    for rewrite in REWRITES:
        try:
            mutant = plant(bench.program, rewrite, "")
        except DoesNotApply:
            continue
        except UsageError as error:
            left_out.append(corpus.Row(bench.name, rewrite.name, "", "legitimate", note=f"invalid: {error.got}"))
            continue
        sides += [corpus.interpreted(bench, mutant), corpus.varied(bench, mutant.program, VARIATIONS[-1])]
        names += [f"{rewrite.name}, interpreted", f"{rewrite.name}, everything"]
    return corpus.rows_of_legitimate(bench, names, sides) + left_out


def engines_of(bench: corpus.Bench, backend: str, options: argparse.Namespace) -> list[corpus.Row]:
    """Return the rows of the engines of one back-end: legitimate ones, and some of programs with a mistake."""
    if bench.model.dtype not in find_backend(backend).capabilities.dtypes:
        return [corpus.Row(bench.name, backend, "", "legitimate", note="does not apply")]
    cases = [bench.case]
    if bench.case.input_ids is not None:
        vocabulary = int(bench.model.metadata.get("vocab_size", models.VOCAB_SIZE))
        cases.append(corpus.padded_case(vocabulary, size=7, steps=3, batch=1, seed=1))
        cases.append(corpus.padded_case(vocabulary, size=18, steps=1, batch=3, seed=2))
    rows: list[corpus.Row] = []
    with ExitStack() as stack:
        try:
            sides = engines.built(bench, backend, cases, stack)
        except (GlassError, RuntimeError) as error:
            note = f"invalid: {str(getattr(error, 'got', error)).splitlines()[0][:100]}"
            return [corpus.Row(bench.name, backend, "", "legitimate", note=note)]
        for number, case in enumerate(cases):
            names = [f"{backend}, case {number}", f"{backend} release, case {number}"]
            rows += corpus.rows_of_legitimate(bench, names, sides, case)[1 if number else 0 :]
        torch.set_num_threads(2)
        rows += corpus.rows_of_legitimate(bench, [f"{backend}, 2 threads"], sides[:1])[1:]
        torch.set_num_threads(1)
        if options.mistakes_on_engines:
            chooser = random.Random(f"{bench.name}/{backend}")
            planted, _ = corpus.plant_all(bench, chooser.sample(MISTAKES, options.mistakes_on_engines), options.seed)
            for number, item in enumerate(planted):
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / f"mutant{number}"
                try:
                    side = engines.built_from(bench, item.mutant.program, backend, [bench.case], folder, stack)
                except (GlassError, RuntimeError) as error:
                    note = f"invalid: {str(getattr(error, 'got', error)).splitlines()[0][:100]}"
                    rows.append(corpus.Row(bench.name, backend, item.mutant.mistake.name, "graph", note=note))
                    continue
                rows += corpus.rows_of_mistakes(bench, [item], backend, [side])
    return rows


def mistakes(bench: corpus.Bench, options: argparse.Namespace) -> list[corpus.Row]:
    """Return the rows of all mistakes in all executions."""
    wanted = [m for m in MISTAKES if options.kinds is None or m.name in options.kinds]
    if options.sample is not None:
        wanted = wanted[:: max(1, len(wanted) // max(1, options.sample))][: options.sample]
    planted, rows = corpus.plant_all(bench, wanted, options.seed)
    sources = [m for m in SOURCE_MISTAKES if options.kinds is None or m.name in options.kinds]
    if options.sample is None or options.kinds:
        more, left_out = corpus.plant_all(bench, sources, options.seed, plant_in_source)
        planted, rows = planted + more, rows + left_out
    by_name = {variation.name: variation for variation in VARIATIONS}
    for start in range(0, len(planted), CHUNK):
        part = planted[start : start + CHUNK]
        for execution in options.executions:
            if execution in BACKENDS:
                continue
            if execution == "interpreted":
                sides: list[Any] = [corpus.interpreted(bench, item.mutant) for item in part]
            else:
                sides = [corpus.varied(bench, item.mutant.program, by_name[execution]) for item in part]
            rows += corpus.rows_of_mistakes(bench, part, execution, sides)
    return rows


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the table: one line per program and execution, then what was missed."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    excluded: dict[str, int] = defaultdict(int)
    for row in rows:
        if row["note"]:
            excluded[row["note"].split(":")[0]] += 1
        else:
            engine = row["execution"].split(",")[0].split(" release")[0]
            kind = "legitimate" if row["group"] == "legitimate" else row["execution"]
            if kind == "legitimate" and engine in BACKENDS:
                kind = f"legitimate {engine}"
            groups[row["bench"], kind].append(row)
    lines = [
        f"{'program':22s} {'legitimate':34s} {'runs':>5s} {'alarms':>6s} {'largest':>7s}",
        f"{'program':22s} {'execution of mistakes':34s} {'runs':>5s} {'found':>6s} {'exact':>6s} {'extra':>5s}",
    ]
    totals: dict[str, list[Any]] = {"mistakes": [0, 0, 0, 0], "precision": [0, 0, 0, 0], "beneath": [0] * 4}
    for (bench, kind), found in groups.items():
        if kind.startswith("legitimate"):
            alarms = sum(row["is_found"] for row in found)
            largest = max(row["largest"] for row in found)
            for name in {"legitimate", kind}:
                number, flagged, figure = totals.setdefault(name, [0, 0, 0.0])
                totals[name] = [number + len(found), flagged + alarms, max(figure, largest)]
            lines.append(f"{bench:22s} {kind:34s} {len(found):5d} {alarms:6d} {largest:7.2f}")
            continue
        # Losses of precision, and mistakes within float32 that the program's own dtype would swallow, apart.
        for name, part in (
            ("mistakes", [r for r in found if r["group"] != "precision" and not r["is_beneath"]]),
            ("precision", [r for r in found if r["group"] == "precision" and not r["is_beneath"]]),
            ("beneath", [r for r in found if r["is_beneath"]]),
        ):
            if not part:
                continue
            figures = [len(part), *(sum(int(r[key]) for r in part) for key in ("is_found", "is_exact", "num_extra"))]
            totals[name] = [a + b for a, b in zip(totals[name], figures, strict=True)]
            label = kind if name == "mistakes" else f"{kind} ({name})"
            lines.append(f"{bench:22s} {label:34s} {figures[0]:5d} {figures[1]:6d} {figures[2]:6d} {figures[3]:5d}")
    lines.append("")
    for name in sorted(totals):
        if name.startswith("legitimate"):
            runs, alarms, largest = totals[name]
            lines.append(f"{name}: {runs} runs, false alarms {alarms}, largest min(rho/2, beta) {largest:.3f}")
    for name in ("mistakes", "precision", "beneath"):
        number, seen, exact, extra = totals[name]
        if number:
            lines.append(
                f"{name} {number}: found {seen / number:.2%}, exact op {exact / number:.2%}, other ops named {extra}"
            )
    lines.append("not counted: " + (", ".join(f"{name} {count}" for name, count in excluded.items()) or "nothing"))
    return "\n".join(lines)


def failures(rows: Iterable[dict[str, Any]]) -> str:
    """Return one line per false alarm, miss and wrongly named op, with how to run it again."""
    lines = []
    for row in rows:
        what = None
        if row["note"]:
            what = "INVALID" if row["note"].startswith("invalid") else None
        elif row["group"] == "legitimate":
            what = "ALARM" if row["is_found"] else None
        elif not row["is_found"]:
            what = "MISS" if not row["is_beneath"] else "BENEATH"
        elif not row["is_exact"]:
            what = "ELSEWHERE"
        elif row["num_extra"]:
            what = "EXTRA"
        if what:
            family, dtype = row["bench"].split("/")
            again = f"--families {family} --dtypes {dtype}"
            again += f" --kinds {row['kind']} --executions '{row['execution']}'" if row["kind"] else ""
            lines.append(
                f"{what:9s} {row['bench']} {row['execution']} {row['kind']} {row['note']}: guilty {row['guilty']}, "
                f"named {row['named']}, extra {row['num_extra']}, largest {row['largest']:.3g} {row['largest_at']}; "
                f"{again}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] = ()) -> None:
    """Run the corpus and print the table."""
    parser = argparse.ArgumentParser("benchmarks verdict")
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(FAMILIES))
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(DTYPES))
    parser.add_argument("--executions", type=lambda text: text.split(","), default=list(EXECUTIONS))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=None)
    parser.add_argument("--sample", type=int, help="mistakes of each program; default all")
    parser.add_argument("--backends", type=lambda text: text.split(",") if text else [], default=list(BACKENDS))
    parser.add_argument("--mistakes-on-engines", type=int, default=4, help="of each program and back-end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    work = [(family, dtype) for family in options.families for dtype in options.dtypes]
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for (family, dtype), future in [(w, pool.submit(run_bench, *w, options)) for w in work]:
            try:
                rows += future.result()
            except Exception as error:  # one program that cannot be judged must not lose the others
                note = f"invalid: {type(error).__name__}: {error}"
                rows.append(corpus.Row(f"{family}/{dtype}", "", "", "legitimate", note=note).to_dict())
            print(f"{family}/{dtype} after {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    print(failures(rows))
