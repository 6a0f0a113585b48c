"""Executions that were recorded as snapshots, replayed and judged."""
