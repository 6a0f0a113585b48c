"""Metrics: the grammar of PyTorch/XLA, with torch's own lazy core as the judge; floors, percentiles, rates, merging."""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import glassengine as glass
from glassengine.errors import CorruptError, UsageError
from glassengine.executable.counters import (
    PERCENTILES,
    RING,
    Registry,
    merge_metrics,
    parse_metrics,
    read_metrics,
    summarize,
)
from glassengine.executable.run.executable import Executable
from glassengine.results.metrics import MetricsReport, format_value
from tests import children

S = 1_000_000_000
durations = st.integers(0, 400 * 86400 * S)

GUIDE = """
Metric: CompileTime
  TotalSamples: 1
  Accumulator: 09s969ms486.408us
  Percentiles: 1%=09s969ms486.408us; 5%=09s969ms486.408us; 50%=09s969ms486.408us; 99%=09s969ms486.408us
.....
Metric: TensorsGraphSize
  TotalSamples: 1
  Accumulator: 9.00
  Percentiles: 1%=9.00; 99%=9.00
Metric: TransferFromServerTime
  TotalSamples: 2
  Accumulator: 010ms130.597us
  ValueRate: 549ms937.108us / second
  Rate: 108.372 / second
  Percentiles: 1%=004ms948.602us; 50%=006ms181.995us; 99%=006ms181.995us
....
Counter: xla::_copy_from
  Value: 7
....
Metric: XrtReadLiteral
  TotalSamples: 2
  Accumulator: 608.578us
  Mean: 304.289us
  StdDev: 067.464us
  Rate: 106.899 / second
  Percentiles: 25%=236.825us; 50%=371.753us; 99%=371.753us
"""


def test_the_guides_report_is_read() -> None:
    report = parse_metrics(GUIDE)
    compile_time = report.metric("CompileTime")
    assert compile_time is not None
    assert (compile_time.accumulator, compile_time.unit, compile_time.rate) == (9_969_486_408, "ns", None)
    assert report.metric("TransferFromServerTime") is None
    transfer = report.metric("TransferFromDeviceTime")
    assert transfer is not None
    assert (transfer.value_rate, transfer.rate, transfer.percentiles[50]) == (549_937_108, 108.372, 6_181_995)
    xrt = report.metric("XrtReadLiteral")
    assert xrt is not None
    assert (xrt.mean, xrt.std_dev, xrt.percentiles[25]) == (304_289, 67_464, 236_825)
    size = report.metric("TensorsGraphSize")
    assert size is not None and (size.accumulator, size.unit) == (9.0, "count")
    assert report.counters == {"xla::_copy_from": 7}
    # What was read prints as it was, in the new names.
    blocks = {block for block in re.split(r"\n(?=\S)", GUIDE.strip()) if not block.startswith(".")}
    assert {block.replace("Server", "Device") for block in blocks} == set(re.split(r"\n(?=\S)", str(report).strip()))


@given(durations)
def test_a_printed_duration_is_read_back(value: int) -> None:
    report = parse_metrics(f"Metric: T\n  TotalSamples: 1\n  Accumulator: {format_value(value, 'ns')}\n")
    assert report.metrics[0].accumulator == value


def spelled(text: str) -> list[float]:
    """Read a duration part by part, as a person compares two of them."""
    parts = dict(zip(["d", "h", "m", "s", "ms", "us"], [0.0] * 6, strict=True))
    for number, unit in re.findall(r"([\d.]+)(us|ms|d|h|m|s)", text):
        parts[unit] = float(number)
    return list(parts.values())


@given(durations, durations)
def test_larger_durations_never_print_smaller(one: int, other: int) -> None:
    low, high = sorted((one, other))
    assert spelled(format_value(low, "ns")) <= spelled(format_value(high, "ns"))


def test_durations_are_floored_where_the_original_rounds() -> None:
    # PyTorch/XLA prints these as 09s969ms486.408us and 60s999ms...
    assert format_value(8_969_486_408, "ns") == "08s969ms486.408us"
    assert format_value(59_999_000_000, "ns") == "59s999ms000.000us"
    assert format_value(1_342, "ns") == "001.342us"
    assert format_value(90_061_000_000_001, "ns") == "01d01h01m01s000ms000.001us"
    assert (format_value(17, "count"), format_value(1536, "bytes")) == ("17.00", "1.50KB")


@given(st.lists(st.floats(0, 1e15), min_size=1, max_size=50))
def test_percentiles_are_samples_and_rise(values: list[float]) -> None:
    metric = summarize("M", "count", len(values), sum(values), tuple(enumerate(values)))
    found = list(metric.percentiles.values())
    assert tuple(metric.percentiles) == PERCENTILES
    assert found == sorted(found) and set(found) <= set(values)
    assert metric.percentiles[50] == sorted(values)[len(values) // 2]


def test_no_rate_over_a_short_window() -> None:
    burst = tuple((1_000 * index, 500.0) for index in range(1, 1000))
    assert summarize("M", "count", 999, 1, burst).rate is None
    assert "Rate" not in str(summarize("M", "count", 999, 1, burst))


def test_time_per_second_of_one_thing_after_another_is_at_most_a_second() -> None:
    # Two runs of 2 s, back to back: the original counts from the end of the first and says 4 s per 2 s.
    metric = summarize("ExecuteTime", "ns", 2, 4 * S, ((10 * S, 2 * S), (12 * S, 2 * S)))
    assert (metric.value_rate, metric.rate) == (S, 0.5)
    assert "  ValueRate: 01s000ms000.000us / second\n  Rate: 0.5 / second\n" in str(metric)


def test_rate_of_values_counts_what_came_within_the_window() -> None:
    metric = summarize("InboundData", "bytes", 3, 30, ((0, 10), (S, 10), (2 * S, 10)))
    assert (metric.value_rate, metric.rate) == (10, 1)


def test_totals_are_of_all_samples_and_percentiles_of_the_latest() -> None:
    registry = Registry()
    for value in (*[1_000_000] * 10, *range(RING)):
        registry.sample("M", value, "count")
    metric = registry.report().metric("M")
    assert metric is not None
    assert metric.total_samples == RING + 10
    assert metric.accumulator == 10_000_000 + sum(range(RING))
    assert len(metric.samples) == RING and metric.percentiles[99] < RING


def test_an_empty_registry_reports_nothing() -> None:
    assert str(Registry().report()) == ""


def test_counting_from_threads_loses_nothing() -> None:
    registry = Registry()

    def work() -> None:
        for _ in range(5000):
            registry.count("N")
            registry.sample("M", 1, "count")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = registry.report()
    assert report.counters == {"N": 40000}
    assert report.metric("M").accumulator == 40000


def test_counters_of_others_count_from_when_they_were_added_or_reset() -> None:
    registry, theirs = Registry(), {"GraphBreak": 5}
    registry.add_source(lambda: theirs)
    assert registry.report().counters == {}
    theirs["GraphBreak"] = 7
    assert registry.report().counters == {"GraphBreak": 2}
    registry.reset()
    assert registry.report().counters == {}


def test_turned_off_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLASS_METRICS", "0")
    registry = Registry()
    registry.count("N")
    registry.sample("M", 1, "count")
    assert str(registry.report()) == ""


def test_merging_ranks() -> None:
    def rank(number: int, values: list[tuple[int, float]], **counters: int) -> MetricsReport:
        total = sum(value for _, value in values)
        return MetricsReport((summarize("M", "count", len(values), total, tuple(values)),), counters, (number,))

    first = rank(0, [(0, 1), (S, 3), (2 * S, 5)], MarkStep=3)
    second = rank(1, [(0, 10), (S, 20)], MarkStep=3, GraphBreak=1)
    merged = merge_metrics([first, second])
    metric = merged.metric("M")
    assert (metric.total_samples, metric.accumulator, merged.ranks) == (5, 39, (0, 1))
    assert (metric.percentiles[50], metric.percentiles[99]) == (5, 20)
    assert metric.rate == first.metric("M").rate + second.metric("M").rate == 2.0
    assert merged.counters == {"GraphBreak": 1, "MarkStep": 6}
    with pytest.raises(UsageError, match="different ranks"):
        merge_metrics([first, first])
    with pytest.raises(UsageError, match="'M' cannot be merged"):
        merge_metrics([first, MetricsReport(parse_metrics(str(first)).metrics, {}, (1,))])


def test_json_twin_is_the_same_report(tmp_path: Path) -> None:
    registry = Registry()
    registry.sample("ExecuteTime", 12_345, "ns")
    registry.count("MarkStep")
    report = registry.report()
    text = json.dumps(report.to_dict())
    assert MetricsReport.from_dict(json.loads(text)) == report
    for name, content in {
        "plain.json": text,
        "command.json": json.dumps({"ok": True, "metrics": report.to_dict()}),
    }.items():
        (tmp_path / name).write_text(content)
        assert read_metrics(tmp_path / name) == report
    (tmp_path / "log.txt").write_text(f"epoch 1\n{report}done\n")
    assert str(read_metrics(tmp_path / "log.txt")) == str(report)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a metrics report"),
        ("Metric: M\n  TotalSamples: 1\n", "'Accumulator'"),
        ("Metric: M\n  TotalSamples: 1\n  Accumulator: 3 parsecs\n", "3 parsecs"),
        ("Counter: N\n  Value: many\n", "many"),
        ("{", "report is damaged"),
        ("{}", "a report of metrics is damaged"),
        ('{"schema_version": 99}', "newer version"),
        ('{"schema_version": 1, "metrics": [{"unit": "ns"}], "counters": {}, "ranks": [0]}', "required field `name`"),
        ('{"schema_version": 1, "metrics": {"a": 1}, "counters": {}, "ranks": [0]}', "a report of metrics is damaged"),
    ],
)
def test_damaged_reports_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "m").write_text(content)
    with pytest.raises(CorruptError, match=message):
        read_metrics(tmp_path / "m")


ORACLE = """
import torch, torch._lazy, torch._lazy.metrics, torch._lazy.ts_backend
torch._lazy.ts_backend.init()
x = torch.randn(2, 10).to("lazy")
first, second = torch.nn.Linear(10, 30).to("lazy"), torch.nn.Linear(30, 20).to("lazy")
one = first(x)
two = second(one)
torch._lazy.mark_step()
str(two), str(one)
print(torch._lazy.metrics.metrics_report())
torch._lazy.metrics.reset()
two = second(first(x))
str(two), str(first(x))
print("without mark_step")
print(torch._lazy.metrics.metrics_report())
"""
GRAMMAR = re.compile(
    r"(?:Metric: \S+\n  TotalSamples: \d+\n  Accumulator: (?P<v>\S+)\n"
    r"(?:  ValueRate: \S+ / second\n  Rate: \S+ / second\n)?"
    r"  Percentiles: 1%=\S+; 5%=\S+; 10%=\S+; 20%=\S+; 50%=\S+; 80%=\S+; 90%=\S+; 95%=\S+; 99%=\S+\n"
    r"|Counter: \S+\n  Value: \d+\n)+"
)


def test_our_grammar_is_that_of_torchs_own_lazy_core() -> None:
    done = children.run([sys.executable, "-c", ORACLE])
    if "No module named 'torch._lazy" in done.stderr:
        pytest.skip("this torch has no lazy core")
    assert done.returncode == 0, done.stderr
    marked, _, printed = done.stdout.partition("without mark_step\n")
    theirs = marked.replace("TSBackendImpl: N/A\n", "").rstrip("\n") + "\n"
    assert GRAMMAR.fullmatch(theirs)
    report = parse_metrics(marked)
    # The guide's lesson: what is printed after a step was evaluated in one graph, what is printed alone in its own.
    assert report.counters["UncachedCompile"] == report.counters["MarkStep"] == 1
    assert parse_metrics(printed).counters["UncachedCompile"] == 2
    assert report.metric("TensorsGraphSize").total_samples == 1
    assert GRAMMAR.fullmatch(str(report))
    # All but rates, which a double cannot always hold, prints as it came.
    without_rates = re.compile(r"  (?:Value)?Rate: .*\n")
    assert sorted(without_rates.sub("", theirs).splitlines()) == sorted(without_rates.sub("", str(report)).splitlines())


def test_executions_are_measured() -> None:
    glass.metrics.reset()
    executable = Executable("tiny/main", lambda inputs: {"y": inputs["x"] * 2})
    for _ in range(3):
        executable.run({"x": torch.ones(2)})
    report = glass.metrics.current()
    execute = report.metric("ExecuteTime")
    assert execute is not None and execute.unit == "ns"
    assert execute.total_samples == 3 and execute.accumulator == pytest.approx(executable.execute_s * 1e9, rel=1e-6)
    assert report.counters["CachedCompile"] == 2
    assert GRAMMAR.fullmatch(glass.metrics.report())
