"""The table of the verdict: false alarms, mistakes found, ops named.

python -m benchmarks verdict                         the whole corpus, hours of one core
python -m benchmarks verdict --sample 10             ten mistakes of each program
python -m benchmarks verdict --families llama --dtypes float32 --kinds rope_sign --executions interpreted
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from glassengine.diagnose.cases import module_cases
from glassengine.program import export_program, load_model
from glassengine.testing import corpus, models
from glassengine.testing.mistakes import GRAPH_MISTAKES
from glassengine.testing.random_mistakes import RANDOM_MISTAKES
from glassengine.testing.variations import VARIATIONS
from glassengine.testing.weight_mistakes import PRECISION_LOSSES, WEIGHT_MISTAKES

MISTAKES = (*GRAPH_MISTAKES, *WEIGHT_MISTAKES, *PRECISION_LOSSES, *RANDOM_MISTAKES)
FAMILIES = tuple(models.CAUSAL_LMS)
DTYPES = ("float32", "bfloat16", "float16")
EXECUTIONS = ("interpreted", "same kernels", "everything")
"""What mutants run in; legitimate runs take every variation."""

CHUNK = 48
"""Mutants that run in lockstep: more share one reference, and memory."""


def make_bench(family: str, dtype: str, seed: int = 0) -> corpus.Bench:
    """Return the program of a family in a dtype."""
    model = load_model(models.CAUSAL_LMS[family](), dtype=dtype)
    case = corpus.padded_case(models.VOCAB_SIZE, seed=seed)
    return corpus.Bench(f"{family}/{dtype}", model, export_program(model), case)


def run_bench(family: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one program."""
    torch.set_num_threads(1)
    bench = make_bench(family, dtype, options.seed)
    rows: list[corpus.Row] = []
    if options.kinds is None:
        sides = [corpus.varied(bench, bench.program, variation) for variation in VARIATIONS]
        rows += corpus.rows_of_legitimate(bench, [variation.name for variation in VARIATIONS], sides)
    wanted = [m for m in MISTAKES if options.kinds is None or m.name in options.kinds]
    if options.sample:
        wanted = wanted[:: max(1, len(wanted) // options.sample)][: options.sample]
    planted, left_out = corpus.plant_all(bench, wanted, options.seed)
    rows += left_out
    by_name = {variation.name: variation for variation in VARIATIONS}
    for start in range(0, len(planted), CHUNK):
        part = planted[start : start + CHUNK]
        for execution in options.executions:
            if execution == "interpreted":
                sides = [corpus.interpreted(bench, item.mutant) for item in part]
            else:
                variation = by_name[execution]
                sides = [corpus.varied(bench, item.mutant.program, variation) for item in part]
            rows += corpus.rows_of_mistakes(bench, part, execution, sides)
    return [row.to_dict() for row in rows]


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the table: one line per program and execution, then what was missed."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    excluded: dict[str, int] = defaultdict(int)
    for row in rows:
        if row["note"]:
            excluded[row["note"].split(":")[0]] += 1
        else:
            kind = "legitimate" if row["group"] == "legitimate" else row["execution"]
            groups[row["bench"], kind].append(row)
    head = f"{'program':22s} {'execution':20s} {'runs':>5s} {'alarms':>6s} {'largest':>7s} {'found':>6s} {'exact':>6s} {'extra':>5s}"
    lines = [head]
    totals = {"legitimate": [0, 0, 0.0], "mistakes": [0, 0, 0, 0], "precision": [0, 0, 0, 0]}
    for (bench, kind), found in groups.items():
        if kind == "legitimate":
            alarms = sum(row["is_found"] for row in found)
            largest = max(row["largest"] for row in found)
            totals[kind] = [totals[kind][0] + len(found), totals[kind][1] + alarms, max(totals[kind][2], largest)]
            lines.append(f"{bench:22s} {kind:20s} {len(found):5d} {alarms:6d} {largest:7.2f}")
            continue
        for name, part in (
            ("mistakes", [r for r in found if r["group"] != "precision"]),
            ("precision", [r for r in found if r["group"] == "precision"]),
        ):
            figures = [len(part), *(sum(int(r[key]) for r in part) for key in ("is_found", "is_exact", "num_extra"))]
            totals[name] = [a + b for a, b in zip(totals[name], figures, strict=True)]
            label = kind if name == "mistakes" else f"{kind} (precision)"
            lines.append(f"{bench:22s} {label:34s} {figures[0]:5d} {figures[1]:6d} {figures[2]:6d} {figures[3]:5d}")
    lines.append("")
    runs, alarms, largest = totals["legitimate"]
    lines.append(f"legitimate runs {runs}, false alarms {alarms}, largest min(rho/2, beta) {largest:.3f}")
    for name in ("mistakes", "precision"):
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
            what = "MISS"
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
                f"named {row['named']}, extra {row['num_extra']}, largest {row['largest']:.3g} {row['largest_at']}; {again}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] = ()) -> None:
    """Run the corpus and print the table."""
    parser = argparse.ArgumentParser("benchmarks verdict")
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(FAMILIES))
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(DTYPES))
    parser.add_argument("--executions", type=lambda text: text.split(","), default=list(EXECUTIONS))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=None)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    work = [(family, dtype) for family in options.families for dtype in options.dtypes]
    rows: list[dict[str, Any]] = []
    started = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for (family, dtype), future in [(w, pool.submit(run_bench, *w, options)) for w in work]:
            rows += future.result()
            print(f"{family}/{dtype} after {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))
    print(failures(rows))
