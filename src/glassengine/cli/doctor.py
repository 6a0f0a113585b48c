"""`glass doctor`: what this machine offers, and what is missing."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

import glassengine as glass
from glassengine import commands, environment
from glassengine.cli.documents import answer
from glassengine.cli.options import out, print_answer
from glassengine.report.terminal_without_tensors import cache_lines

# Instruction sets that decide which kernels run, and so which engines load here.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "bf16", "sve")


# What the reference documents advise when an execution fails, and what becomes of it here.
_ADVICE = (
    "Inputs must have the names, dtypes and sizes an engine was built for and lie on its device; each run checks them "
    "first and shows those that do not fit in one table, with the flag to build with.",
    "An accelerator reports an error when it is next waited for, perhaps in a later execution. With "
    "GLASS_SYNCHRONOUS=1, CUDA_LAUNCH_BLOCKING=1 or glass run --synchronous each execution waits, and the error names "
    "the executable and the execution that failed. On the CPU there is nothing to wait for.",
)


def command(
    cache: Annotated[
        bool, typer.Option("--cache", help="Show the compilation cache instead: entries, hits and every miss.")
    ] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure the accuracy of the runtimes' elementwise kernels instead."),
    ] = False,
    batch: Annotated[
        bool,
        typer.Option("--batch", help="Show instead which operations give a row of a batch other bits than alone."),
    ] = False,
) -> int:
    """Show versions, processor, compiler and back-ends of this machine."""
    if batch:
        rows = commands.batch_table()
        answer(lambda: {"rows": rows}, lambda: _print_batch(rows))
        return 0
    if cache:
        report = glass.metrics.cache()
        answer(report.to_dict, lambda: out.print("\n".join(cache_lines(report))))
        return 0 if report.ok else 1
    if calibrate:
        entries = commands.calibrate()
        answer(lambda: {"entries": entries}, lambda: _print_kernels(entries))
        return 0
    found = examine()
    answer(lambda: found, lambda: _print(found))
    return 0


def _print_batch(rows: list[dict[str, Any]]) -> None:
    """Print what a row of a batch depends on."""
    from glassengine.report.terminal_without_tensors import kernels

    print_answer(kernels(rows))


def _print_kernels(entries: list[dict[str, Any]]) -> None:
    """Print which kernels are less accurate than rounding."""
    for entry in entries:
        out.print(f"{entry['backend']} {entry['version']} on {entry['instruction_set']}")
        for dtype, ops in entry["errors"].items():
            coarse = {op: numbers for op, numbers in ops.items() if any(numbers[:2])}
            out.print(f"  {dtype}: {len(ops)} kernels measured, {len(ops) - len(coarse)} as accurate as rounding")
            for op, (absolute, relative, *_) in coarse.items():
                out.print(f"    {op:<14} {absolute:.2g} + {relative:.2g} |result| beyond its rounding bound")
    if not entries:
        out.print("no back-end here has elementwise kernels of its own")


def examine() -> dict[str, Any]:
    """Return everything the command shows, as JSON-ready values; sizes in bytes."""
    total, available = environment.memory_bytes()
    flags = environment.cpu_flags()
    return {
        "platform": platform.platform(),
        "cpu": environment.cpu_name(),
        "cpu_flags": [flag for flag in _FLAGS if flag in flags],
        "num_cpus": environment.num_cpus(),
        "memory_bytes": total,
        "memory_available_bytes": available,
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
        "cxx_compiler": environment.cxx_compiler(),
        "versions": environment.versions(),
        "backends": [
            {"name": info.name, "available": info.available, "reason": info.reason, "install": info.install}
            for info in glass.list_backends()
        ],
        "caches": {name: str(path) for name, path in environment.cache_dirs().items()},
        "variables": environment.variables(),
        "synchronous": environment.synchronous(),
        "advice": list(_ADVICE),
    }


def _print(report: dict[str, Any]) -> None:
    memory = f"{_gib(report['memory_available_bytes'])} free of {_gib(report['memory_bytes'])}"
    compiler = report["cxx_compiler"] or "none: Inductor needs g++, or CXX set to another compiler"
    rows = [
        ("platform", report["platform"]),
        ("cpu", f"{report['cpu']}, {report['num_cpus']} usable"),
        ("cpu flags", " ".join(report["cpu_flags"]) or "unknown"),
        ("memory", memory),
        ("disk", f"{_gib(report['disk_free_bytes'])} free here"),
        ("c++", compiler),
        *((name, version or "not installed") for name, version in report["versions"].items()),
        *((f"{name} cache", path) for name, path in report["caches"].items()),
        *report["variables"].items(),
        (
            "executions",
            f"{'wait for the device' if report['synchronous'] else 'return before the device has finished'}",
        ),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        out.print(f"{name:<{width}}  {value}")
    out.print("\nback-ends")
    for backend in report["backends"]:
        state = "available" if backend["available"] else f"missing: {backend['reason']}"
        out.print(f"  {backend['name']:<14} {state}")
        if not backend["available"] and backend["install"]:
            out.print(f"  {'':<14} {backend['install']}")
    out.print("\nwhen an execution fails")
    for advice in report["advice"]:
        out.print(f"  - {advice}")


def _gib(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"
