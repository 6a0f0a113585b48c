"""The table of the verdict: false alarms, mistakes found, ops named.

python -m benchmarks verdict                         the whole corpus, hours of one core
python -m benchmarks verdict --share 3               a third of the mistakes in each program, by turns
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
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import keep, surroundings
from glassengine.backends.registry import find_backend
from glassengine.errors import GlassError, UsageError
from glassengine.testing import models
from tests.corpus import corpus, engines
from tests.corpus.edits import DoesNotApply, plant
from tests.corpus.families import FAMILIES, make_bench
from tests.corpus.mistakes.catalog import MISTAKES
from tests.corpus.mistakes.compiler_bugs import COMPILER_BUGS, built_with_bug
from tests.corpus.mistakes.source import SOURCE_MISTAKES, plant_in_source
from tests.corpus.right import implementations
from tests.corpus.right.rewrites import REWRITES
from tests.corpus.right.variations import VARIATIONS

DTYPES = ("float32", "bfloat16", "float16")
EXECUTIONS = ("interpreted", "everything", "same kernels")
"""What mutants run in, one after the other; legitimate runs take every variation."""

BACKENDS = ("eager", "onnxruntime", "inductor")
COMPILED = "torch.compile"
REAL = (*BACKENDS, COMPILED, "rows apart", "eager attention")
"""Implementations that users run, as against variations computed by the interpreter."""

BUNDLED = Path(__file__).parent.parent / "examples" / "tiny-llama"
ONLY = {"bundled": "float32", "llama-1024": "bfloat16"}
"""Large models run in one dtype unless others are asked for."""

CHUNK = 48
"""Mutants that run in lockstep: more share one reference, and memory."""


def real_ones(family: str, dtype: str) -> tuple[str, ...]:
    """Return the compilers that a program goes through: over its dtypes, every family meets all of them."""
    if FAMILIES.index(family) % 2:
        return {"float32": ("eager", "inductor"), "bfloat16": (COMPILED,), "float16": ("onnxruntime",)}[dtype]
    return {"float32": ("eager", "onnxruntime"), "bfloat16": ("inductor",), "float16": (COMPILED,)}[dtype]


def run_bench(family: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of one program."""
    torch.set_num_threads(1)
    bench = make_bench(family, dtype, seed=options.seed, bundled=BUNDLED)
    rows: list[corpus.Row] = []
    if options.kinds is None:
        rows += legitimate(bench)
        wanted = real_ones(family, dtype) if options.backends is None else options.backends
        rows += [row for backend in wanted for row in engines_of(bench, backend, options)]
    rows += mistakes(bench, options, FAMILIES.index(family) + DTYPES.index(dtype))
    return [row.to_dict() for row in rows]


def legitimate(bench: corpus.Bench) -> list[corpus.Row]:
    """Return the rows of all variations, rewrites, and implementations that need no compiler."""
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
        sides += [corpus.interpreted(bench, mutant.program), corpus.varied(bench, mutant.program, VARIATIONS[-1])]
        names += [f"{rewrite.name}, interpreted", f"{rewrite.name}, everything"]
    with suppress(DoesNotApply):
        sides.append(implementations.RowsApart(bench))
        names.append("rows apart")
    with suppress(DoesNotApply):
        sides += implementations.other_attention(bench)
        names += ["eager attention", "eager attention, untouched"]
    return corpus.rows_of_legitimate(bench, names, sides) + left_out


def engines_of(bench: corpus.Bench, backend: str, options: argparse.Namespace) -> list[corpus.Row]:
    """Return the rows of one compiler: legitimate ones, its own bugs, and some of programs with a mistake."""
    if backend == COMPILED:
        try:
            side = implementations.TorchCompiled(bench)
            return corpus.rows_of_legitimate(bench, [COMPILED], [side])[1:]
        except RuntimeError as error:
            return [corpus.Row(bench.name, COMPILED, "", "legitimate", note=f"invalid: {_first_line(error)}")]
    if bench.model.dtype not in find_backend(backend).capabilities.dtypes:
        return [corpus.Row(bench.name, backend, "", "legitimate", note="does not apply")]
    cases = [bench.case]
    if bench.case.input_ids is not None:
        vocabulary = int(bench.model.metadata.get("vocab_size", models.VOCAB_SIZE))
        cases.append(corpus.padded_case(vocabulary, size=1, steps=3, batch=1, seed=1))
        cases.append(corpus.padded_case(vocabulary, size=18, steps=1, batch=3, seed=2))
    rows: list[corpus.Row] = []
    with ExitStack() as stack:
        try:
            sides = engines.built(bench, backend, cases, stack)
            for number, case in enumerate(cases):
                names = [f"{backend}, case {number}", f"{backend} release, case {number}"]
                rows += corpus.rows_of_legitimate(bench, names, sides, case)[1:]
            torch.set_num_threads(2)
            rows += corpus.rows_of_legitimate(bench, [f"{backend}, 2 threads"], sides[:1])[1:]
        except (GlassError, RuntimeError) as error:
            return [*rows, corpus.Row(bench.name, backend, "", "legitimate", note=f"invalid: {_first_line(error)}")]
        finally:
            torch.set_num_threads(1)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        makers: list[tuple[str, Callable[[Path], tuple[corpus.Planted, Any]]]] = []
        if backend == "inductor":
            for bug in COMPILER_BUGS:
                makers.append((bug.name, partial(built_with_bug, bench, bug, cases[:1], stack=stack)))
        chooser = random.Random(f"{bench.name}/{backend}")
        wanted = chooser.sample(MISTAKES, options.mistakes_on_engines)
        for item in corpus.plant_all(bench, wanted, options.seed)[0]:
            build = partial(engines.built_from, bench, item.mutant.program, backend, cases[:1], stack=stack)
            makers.append((item.mutant.mistake.name, partial(_with_truth, item, build)))
        for number, (kind, make) in enumerate(makers):
            try:
                item, side = make(folder / str(number))
                rows += corpus.rows_of_mistakes(bench, [item], backend, [side])
            except DoesNotApply:
                continue
            except (GlassError, RuntimeError) as error:
                # It cannot be built, or breaks off: somebody has noticed without us.
                rows.append(corpus.Row(bench.name, backend, kind, "graph", note=f"invalid: {_first_line(error)}"))
    return rows


def _with_truth(item: corpus.Planted, build: Callable[[Path], Any], folder: Path) -> tuple[corpus.Planted, Any]:
    return item, build(folder)


def _first_line(error: Exception) -> str:
    return (str(getattr(error, "got", None) or error).splitlines() or [type(error).__name__])[0][:100]


def mistakes(bench: corpus.Bench, options: argparse.Namespace, turn: int) -> list[corpus.Row]:
    """Return the rows of the mistakes that are the program's turn, each in one execution."""
    everything = [*((m, False) for m in MISTAKES), *((m, True) for m in SOURCE_MISTAKES)]
    if options.kinds is not None:
        wanted = [pair for pair in everything if pair[0].name in options.kinds]
    else:
        wanted = everything[turn % options.share :: options.share]
    planted, rows = corpus.plant_all(bench, [m for m, of_source in wanted if not of_source], options.seed)
    sources = [m for m, of_source in wanted if of_source]
    more, left_out = corpus.plant_all(bench, sources, options.seed, plant_in_source)
    planted, rows = planted + more, rows + left_out
    by_name = {variation.name: variation for variation in VARIATIONS}
    for number, execution in enumerate(options.executions):
        own = (
            planted if options.kinds else planted[(number + turn) % len(options.executions) :: len(options.executions)]
        )
        for start in range(0, len(own), CHUNK):
            part = own[start : start + CHUNK]
            if execution == "interpreted":
                sides: list[Any] = [corpus.interpreted(bench, item.mutant.program) for item in part]
            else:
                sides = [corpus.varied(bench, item.mutant.program, by_name[execution]) for item in part]
            rows += corpus.rows_of_mistakes(bench, part, execution, sides)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return what was run, one line per kind of implementation, and the totals."""
    counted = [row for row in rows if not row["note"]]
    legitimate = [row for row in counted if row["group"] == "legitimate"]
    planted = [row for row in counted if row["group"] != "legitimate"]
    lines = [f"{'legitimate runs':34s} {'runs':>6s} {'alarms':>6s} {'min(noise/2, bound) ratio':>25s} {'noise/4':>7s}"]
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in legitimate:
        engine = row["execution"].split(",")[0].split(" release")[0]
        groups[engine if engine in REAL else "untouched model" if "untouched" in engine else "variations"].append(row)
    groups["all on real implementations"] = [row for name in REAL for row in groups.get(name, ())]
    groups["all"] = legitimate
    for name, found in groups.items():
        largest, accumulated = (max((row[key] for row in found), default=0.0) for key in ("largest", "accumulated"))
        alarms = sum(row["is_found"] for row in found)
        lines.append(f"{name:34s} {len(found):6d} {alarms:6d} {largest:25.2f} {accumulated:6.2f}")
    lines += ["", f"{'mistakes':34s} {'runs':>6s} {'found':>8s} {'exact op':>8s} {'others named':>12s}"]
    above = [row for row in planted if not row["is_beneath"]]
    beneath = [row for row in planted if row["is_beneath"]]
    by_program: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in above:
        by_program[row["bench"]].append(row)
    for name, found in by_program.items():
        lines.append(_line(name, found))
    lines.append("")
    for name in dict.fromkeys(row["execution"] for row in above):
        lines.append(_line(name, [row for row in above if row["execution"] == name]))
    lines.append("")
    for name in dict.fromkeys(row["group"] for row in above):
        lines.append(_line(f"{name}", [row for row in above if row["group"] == name]))
    lines += ["", _line("all that values can show", above), _line("all that was planted", planted)]
    listed = sum(row["is_listed"] for row in planted)
    if listed:
        shown = listed + sum(row["is_found"] for row in planted)
        lines.append(f"{'found, or listed as written otherwise':34s} {len(planted):6d} {shown / len(planted):8.2%}")
    if beneath:
        effect = [row["effect"] for row in beneath if row["effect"] <= 1]
        lines.append(_line("beneath what values can show", beneath))
        largest = max(effect, default=0.0)
        lines.append(
            f"  {len(effect)} of these have no error beyond {largest:.2f} of what rounding may make, the others"
        )
        lines.append("  are in a float32 island and below half a unit of the program's dtype")
    kinds = {row["kind"] for row in planted}
    programs = {row["bench"].split("/")[0] for row in planted}
    dtypes = {row["bench"].split("/")[1] for row in planted}
    num_random = sum(kind.startswith("random_") for kind in kinds)
    lines += [
        "",
        f"{len(kinds)} kinds of mistake ({num_random} of them random), {len(programs)} models, {len(dtypes)} dtypes",
    ]
    excluded: dict[str, int] = defaultdict(int)
    for row in rows:
        if row["note"]:
            excluded[row["note"].split(":")[0]] += 1
    lines.append("not counted: " + (", ".join(f"{name} {count}" for name, count in excluded.items()) or "nothing"))
    return "\n".join(lines)


def _line(name: str, rows: Sequence[dict[str, Any]]) -> str:
    number = max(1, len(rows))
    found, exact = (sum(row[key] for row in rows) / number for key in ("is_found", "is_exact"))
    return f"{name:34s} {len(rows):6d} {found:8.2%} {exact:8.2%} {sum(row['num_extra'] for row in rows):12d}"


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
            what = "MISS" if not row["is_beneath"] else None
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
                f"named {row['named']}, extra {row['num_extra']}, largest {row['largest']:.3g} {row['largest_at']}, "
                f"effect {row['effect']:.3g} of the bound; "
                f"{again}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] = ()) -> None:
    """Run the corpus and print the table."""
    parser = argparse.ArgumentParser("benchmarks verdict")
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(FAMILIES))
    parser.add_argument("--dtypes", type=lambda text: text.split(","))
    parser.add_argument("--executions", type=lambda text: text.split(","), default=list(EXECUTIONS))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=None)
    parser.add_argument("--share", type=int, default=1, help="every n-th mistake in each program; default all")
    parser.add_argument("--backends", type=lambda text: text.split(",") if text else [], help="default: in turns")
    parser.add_argument("--mistakes-on-engines", type=int, default=1, help="of each program and back-end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="keeps every row; programs that it has already are not run again")
    options = parser.parse_args(arguments)
    for name in options.backends or ():
        find_backend(name)  # an unknown one is an error before anything runs
    rows: list[dict[str, Any]] = []
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text())
    done = {row["bench"] for row in rows}
    dtypes = options.dtypes or DTYPES
    # Every model once before any twice, in all dtypes by turns: what is there after an hour is a sample of everything.
    work = [
        (family, dtype)
        for turn in range(len(dtypes))
        for number, family in enumerate(options.families)
        for dtype in dtypes[(turn + number) % len(dtypes) :][:1]
        if (options.dtypes or ONLY.get(family, dtype) == dtype) and f"{family}/{dtype}" not in done
    ]
    started = time.perf_counter()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for (family, dtype), future in [(w, pool.submit(run_bench, *w, options)) for w in work]:
            try:
                rows += future.result()
            except Exception as error:  # one program that cannot be judged must not lose the others
                note = f"invalid: {type(error).__name__}: {str(error)[:200]}"
                rows.append(corpus.Row(f"{family}/{dtype}", "", "", "legitimate", note=note).to_dict())
            print(f"{family}/{dtype} after {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
    text = "\n".join(
        [f"$ python -m benchmarks verdict {' '.join(arguments)}", surroundings(), "", table(rows), failures(rows)]
    )
    if not set(options.families) ^ set(FAMILIES) and options.kinds is None:
        keep("verdict", text)
    else:
        print(text)
