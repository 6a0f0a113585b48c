"""Run benchmark suites: all of them, or those named."""

from __future__ import annotations

import os
import sys

# Read when torch and its thread pools are first loaded.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

SUITES = {
    "decode": "prefill and decode of every back-end, transformers, torch.compile and other runtimes (--help)",
    "debug": "decode time against the number of tensors looked at",
    "measure": "bytes per second of measuring two tensors against each other",
    "executable": "microseconds that running a graph through an executable costs, beside torch.compile",
    "lazy": "microseconds that recording an operation on lazy tensors costs, beside eager code",
    "judge": "time of judging a forward, against the forward",
    "recording": "what glass.record costs: burst, sustained, small models, light statistics",
    "reading": "a million steps opened, a hundred thousand tensors shown, thousands of steps compared",
    "uploading": "what recording into an object store costs, that keeps up and that does not",
    "snapshots": "what snapshots cost: armed and never firing, and writing beside the disk's own speed",
}
LONG = {
    "golden": "answers of every corpus beside the answer book tests/answers.json; half an hour (--help)",
    "size": "memory and time of build, run and check against the size of the model, foreseen and measured (--help)",
    "verdict": "false alarms, mistakes found and ops named over a corpus; takes options of its own (--help)",
    "kinds": "what kind of mistake hints say, over a corpus: right, wrong, proven, and the cost (--help)",
    "hint_costs": "processor seconds of naming the kind of a mistake, for each divergence at hidden 512",
    "families": "what glass check says of every family, back-end and dtype, written into docs/families.md (--help)",
    "distributed": "one, two and four workers over gigabytes in a store and on the disk; many ranks (--help)",
    "html": "a report of 100 000 tensors x 4 steps: made, painted and scrolled in a browser (numbers: arguments)",
    "watch": "what a watch costs a training step of hidden 512 (the numbers of threads, 1 2, are arguments)",
    "serving": "mistakes planted in files and runtimes of serving engines, by engine and kind, and how many are named",
    "growth": "exponents of the time of hot paths over three decades of tensors, steps, ranks and elements",
    "check": "ratios of time beside those kept in results/check.json; fails where one is beyond (--keep)",
    "memory": "memory of judging and reading large recordings; takes their size in gigabytes",
}
"""Run only when named, each alone."""


def main(arguments: list[str]) -> int:
    if arguments and (arguments[0] in LONG or arguments[0] == "decode"):
        module = __import__(f"benchmarks.{arguments[0]}", fromlist=["main"])
        return module.main(arguments[1:]) or 0
    unknown = [name for name in arguments if name not in SUITES]
    if unknown:
        print(f"unknown suite {unknown[0]!r}; there are:", file=sys.stderr)
        for name, description in (SUITES | LONG).items():
            print(f"  {name:12s} {description}", file=sys.stderr)
        return 2
    for name in arguments or SUITES:
        module = __import__(f"benchmarks.{name}", fromlist=["main"])
        module.main()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
