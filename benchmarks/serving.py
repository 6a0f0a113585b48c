"""Planted mistakes of serving engines, and how many are named: those of tests/plugins/serving/check.

    python -m benchmarks serving [--right]      with --right also right files, which must raise no alarm

Each test plants mistakes, one at a time, and passes where each is named at its tensor or op, in the right step. A table
counts them by engine and kind; what is not named is listed by the name of its test.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
LLAMA, ORT = "llama.cpp", "onnxruntime"
PLANTS: dict[str, tuple[str, str, int]] = {
    "test_weights::test_a_planted_conversion_is_named": (LLAMA, "conversion", 1),
    "test_weights::test_two_weights_are_exchanged": (LLAMA, "conversion", 2),
    "test_weights::test_one_wrong_scale_of_a_block_is_found": (LLAMA, "conversion", 1),
    "test_weights::test_a_type_that_is_called_another": (LLAMA, "conversion", 1),
    "test_weights::test_a_head_that_is_not_tied_and_a_bias_that_is_missing": (LLAMA, "conversion", 2),
    "test_gguf::test_another_base_is_named_with_the_number": (LLAMA, "setting", 1),
    "test_gguf::test_settings": (LLAMA, "setting", 1),
    "test_gguf::test_gemma2": (LLAMA, "setting", 1),
    "test_gguf::test_settings_of_other_configurations": (LLAMA, "setting", 1),
    "test_gguf::test_factors_of_llama_3_are_named": (LLAMA, "setting", 1),
    "test_gguf::test_heads_of_another_size_are_named": (LLAMA, "setting", 1),
    "test_gguf::test_a_bias_is_part_of_its_product": (LLAMA, "conversion", 1),
    "test_runtime::test_of_llama_cpp": (LLAMA, "runtime", 1),
    "test_genai::test_weights": (ORT, "conversion", 1),
    "test_genai::test_one_wrong_scale_of_a_block_is_named": (ORT, "conversion", 1),
    "test_genai::test_a_missing_bias_is_named": (ORT, "conversion", 1),
    "test_genai::test_exports_of_torch_are_judged_as_they_are": (ORT, "conversion", 1),
    "test_genai::test_a_norm_of_another_kind_is_named": (ORT, "conversion", 1),
    "test_genai::test_another_scale_of_the_scores_is_named": (ORT, "setting", 1),
    "test_genai::test_settings_and_runtimes": (ORT, "setting", 1),
    "test_genai::test_a_window_that_the_builder_leaves_out_is_named": (ORT, "setting", 1),
    "test_experts::test_mistakes_are_named": (ORT, "experts", 1),
    "test_runtime::test_of_a_loop_around_onnx_runtime": (ORT, "runtime", 1),
}
"""Test -> engine, kind of mistake, how many one case of it plants."""
RIGHT = {
    "test_weights::test_a_healthy_file": LLAMA,
    "test_gguf::test_a_quantized_file_is_judged_op_by_op": LLAMA,
    "test_gguf::test_healthy_files": LLAMA,
    "test_gguf::test_healthy_files_of_other_families": LLAMA,
    "test_gguf::test_healthy_files_of_other_configurations": LLAMA,
    "test_genai::test_a_folder_of_the_builder_is_healthy": ORT,
    "test_genai::test_an_int4_folder_is_judged_op_by_op": ORT,
    "test_genai::test_healthy_families": ORT,
    "test_genai::test_healthy_families_with_scores_of_their_own": ORT,
    "test_genai::test_caches_with_a_window_are_buffers": ORT,
    "test_experts::test_a_right_one_raises_no_alarm": ORT,
}
"""Tests of right files."""


def main(arguments: list[str]) -> int:
    """Run the tests and print the table."""
    wanted = {**PLANTS, **(RIGHT if "--right" in arguments else {})}
    names = " or ".join(sorted({test.partition("::")[2] for test in wanted}))
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-k", names, f"--junitxml={report}"]
        subprocess.run([*command, "tests/plugins/serving/check"], cwd=ROOT, check=False, stdout=sys.stderr)
        cases = list(ET.parse(report).iter("testcase"))  # noqa: S314 (written above)
    seconds = sum(float(case.get("time") or 0) for case in cases)
    planted: Counter[tuple[str, str]] = Counter()
    named: Counter[tuple[str, str]] = Counter()
    right: Counter[str] = Counter()
    alarms: Counter[str] = Counter()
    missed = []
    for case in cases:
        test = f"{case.get('classname', '').rpartition('.')[2]}::{(case.get('name') or '').partition('[')[0]}"
        failed = case.find("failure") is not None or case.find("error") is not None
        if test in RIGHT or "healthy]" in (case.get("name") or ""):
            engine = RIGHT.get(test, LLAMA)
            right[engine] += 1
            alarms[engine] += failed
        elif test in PLANTS:
            engine, kind, number = PLANTS[test]
            planted[engine, kind] += number
            named[engine, kind] += 0 if failed else number
        if failed:
            missed.append(f"{test} {case.get('name')}")
    print("engine       mistakes    planted  named")
    for (engine, kind), number in planted.items():
        print(f"{engine:12s} {kind:10s} {number:8d} {named[engine, kind]:6d}")
    total, found = sum(planted.values()), sum(named.values())
    print(f"{'both':12s} {'':10s} {total:8d} {found:6d}  {found / max(total, 1):.1%}")
    for engine, number in right.items():
        print(f"{engine:12s} right files {number:7d}   alarms {alarms[engine]}")
    print(f"{seconds:.0f} s in tests, {time.process_time() - begun:.0f} s beside them")
    for one in missed:
        print(f"not named: {one}")
    return 1 if missed else 0
