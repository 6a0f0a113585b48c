"""A record of another run as a level: of one process, or of several that share the model."""

from __future__ import annotations

import torch
from torch import nn

from glassengine.backends.calibration import of_any_runtime
from glassengine.compare.matching.maps import TensorMap
from glassengine.diagnose.ladder.climb import Climb
from glassengine.diagnose.ladder.judging import judge, severity_counter
from glassengine.judge.replay.replay import Cut, Replay
from glassengine.judge.sides.protocol import Place
from glassengine.judge.sides.recorded import RecordedModules, RecordedOps, RecordedTensors, dtype_of
from glassengine.judge.sides.recorded_ranks import RecordedRanks, TensorsOfRanks
from glassengine.progress import Progress
from glassengine.recording.source import TensorSource
from glassengine.results import Skipped


def tensors_of(climb: Climb, record: TensorSource, rules: TensorMap | None) -> RecordedTensors:
    """Return the tensors of a record by the names of the baseline's program."""
    if len({entry.rank for entry in record.entries}) > 1:
        return TensorsOfRanks(record, climb.program, climb.model, climb.cases[0])
    return RecordedTensors(record, climb.program, rules)


def add_record(climb: Climb, tensors: RecordedTensors) -> torch.dtype | None:
    """A record of another run; returns its dtype: what it says, else that of most of its floating tensors."""
    dtype = dtype_of(tensors.source, by_values=not isinstance(tensors, TensorsOfRanks))
    accumulation = climb.of_runtime(of_any_runtime())
    if "op" in tensors.kinds and not isinstance(tensors, TensorsOfRanks):
        replay = Replay(climb.program, compiled=True, dtype=dtype, accumulation=accumulation)
        climb.add(RecordedOps(tensors, climb.program, replay=replay))
    else:
        segments = Replay(climb.program, cut=Cut.SEGMENT, dtype=dtype, accumulation=accumulation)
        if isinstance(tensors, TensorsOfRanks):
            climb.add(RecordedRanks(nn.Identity(), climb.program, tensors=tensors, replay=segments))
        else:
            climb.add(RecordedModules(nn.Identity(), climb.program, tensors=tensors, replay=segments))
    for item in tensors.source.skipped:
        climb.skipped.append(Skipped(item.site, "candidate", item.reason, step=item.step, level=Place.RECORD))
    return dtype


def judge_sums_again(climb: Climb, tensors: RecordedTensors, progress: Progress) -> None:
    """Judge once more where parts of ranks were taken for shares of a sum that no rank ever made."""
    if not isinstance(tensors, TensorsOfRanks) or not tensors.reject_unmade():
        return
    climb.severity.clear()
    climb.scores[:] = [score.fresh() for score in climb.scores]
    judge(climb, climb.scores, on_step=severity_counter(climb, progress))
