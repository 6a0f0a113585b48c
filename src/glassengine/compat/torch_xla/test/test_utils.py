"""`torch_xla.test.test_utils`: lines and summaries by which the examples of PyTorch/XLA show their progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from glassengine.compat.torch_xla.runtime import global_ordinal
from glassengine.executable.counters import metrics


def now(format: str = "%H:%M:%S") -> str:
    """Return the time of day."""
    return time.strftime(format)


def print_training_update(
    device: Any,
    step: int,
    loss: float,
    rate: float,
    global_rate: float,
    epoch: int | None = None,
    summary_writer: Any = None,
) -> None:
    """Print the loss of a step and the examples per second; write the latter where there is a writer."""
    _print(
        "Training",
        device,
        Epoch=epoch,
        Step=step,
        Loss=f"{loss:.5f}",
        Rate=f"{rate:.2f}",
        GlobalRate=f"{global_rate:.2f}",
    )
    write_to_summary(summary_writer, step, {"examples/sec": rate, "average_examples/sec": global_rate})


def print_test_update(device: Any, accuracy: float | None, epoch: int | None = None, step: int | None = None) -> None:
    """Print an accuracy."""
    _print("Test", device, Step=step, Epoch=epoch, Accuracy=None if accuracy is None else f"{accuracy:.2f}")


def _print(what: str, device: Any, **parts: object) -> None:
    stated = [f"{name}={value}" for name, value in parts.items() if value is not None]
    line = " ".join(["|", what, f"Device={device}/{global_ordinal()}", *stated, f"Time={now()}"])
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def get_summary_writer(logdir: str | None) -> Any:
    """Return a writer of TensorBoard for a directory; None for none.

    Raises:
        ImportError: TensorBoard is not installed: `glassengine[tensorboard]`.
    """
    if not logdir:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=logdir)


def write_to_summary(
    summary_writer: Any,
    global_step: int | None = None,
    dict_to_write: Mapping[str, float] | None = None,
    write_xla_metrics: bool = False,
) -> None:
    """Write numbers for TensorBoard; nothing where there is no writer.

    Args:
        summary_writer: What `get_summary_writer` returned.
        global_step: To which they belong.
        dict_to_write: By name.
        write_xla_metrics: Write all counters, and the sums of all metrics, as well.
    """
    if summary_writer is None:
        return
    values: dict[str, float] = dict(dict_to_write or {})
    if write_xla_metrics:
        report = metrics()
        values |= report.counters
        values |= {metric.name: metric.accumulator for metric in report.metrics}
        values["aten_ops_sum"] = sum(value for name, value in report.counters.items() if name.startswith("aten::"))
    for name, value in values.items():
        summary_writer.add_scalar(name, value, global_step)


def close_summary_writer(summary_writer: Any) -> None:
    """Close a writer; nothing where there is none."""
    if summary_writer is not None:
        summary_writer.flush()
        summary_writer.close()
