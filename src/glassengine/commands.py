"""The commands of `glass` as functions, as far as the package itself has no name for them.

`glass record MODEL` is `record_target`, `glass record gguf:FILE` is `record_served` (`is_served` tells them apart),
`glass record -- SCRIPT` is `record_script`, and `--noise-floor` is `measure_noise_floor`, of a script
`measure_script_floor`. `glass compare` of more than two records is `compare_many`, of
watched runs `compare_series`, of engines `side_by_side`, of the artifacts of two builds `compare_artifacts`. `glass
upload` is `upload`, `glass doctor --calibrate` is `calibrate`, and `glass doctor --batch` is `batch_table`. `glass
build --batch-invariant` is proven by `prove_batch_invariant`, and `glass check --invariant run -- SCRIPT` is
`check_invariant_script`. `glass watch` is `watch_scripts`; of two modules in
one process it is `watch_modules`.
"""

from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine.backends.calibration import calibrate as calibrate
    from glassengine.capture.run_script import record_script as record_script
    from glassengine.capture.target import record_target as record_target
    from glassengine.compare.compare import compare_many as compare_many
    from glassengine.compare.series import compare_series as compare_series
    from glassengine.diagnose.invariance.recorded import check_invariant_script as check_invariant_script
    from glassengine.diagnose.invariance.subjects import prove_batch_invariant as prove_batch_invariant
    from glassengine.diagnose.invariance.ways import batch_table as batch_table
    from glassengine.diagnose.noise_floor import measure_noise_floor as measure_noise_floor
    from glassengine.diagnose.paired_run import PairedScript as PairedScript
    from glassengine.diagnose.paired_run import watch_scripts as watch_scripts
    from glassengine.diagnose.paired_steps import watch_modules as watch_modules
    from glassengine.diagnose.script_floor import measure_script_floor as measure_script_floor
    from glassengine.diagnose.side_by_side import side_by_side as side_by_side
    from glassengine.program.representation.artifacts import compare_artifacts as compare_artifacts
    from glassengine.recording.export import upload as upload
    from glassengine.recording.series import SeriesReader as SeriesReader
    from glassengine.recording.series import find_series as find_series
    from glassengine.serving.protocol import is_served as is_served
    from glassengine.serving.record import record_served as record_served

_PUBLIC = {
    "PairedScript": "glassengine.diagnose.paired_run",
    "SeriesReader": "glassengine.recording.series",
    "batch_table": "glassengine.diagnose.invariance.ways",
    "calibrate": "glassengine.backends.calibration",
    "check_invariant_script": "glassengine.diagnose.invariance.recorded",
    "compare_artifacts": "glassengine.program.representation.artifacts",
    "compare_many": "glassengine.compare.compare",
    "compare_series": "glassengine.compare.series",
    "find_series": "glassengine.recording.series",
    "is_served": "glassengine.serving.protocol",
    "measure_noise_floor": "glassengine.diagnose.noise_floor",
    "measure_script_floor": "glassengine.diagnose.script_floor",
    "prove_batch_invariant": "glassengine.diagnose.invariance.subjects",
    "record_script": "glassengine.capture.run_script",
    "record_served": "glassengine.serving.record",
    "record_target": "glassengine.capture.target",
    "side_by_side": "glassengine.diagnose.side_by_side",
    "upload": "glassengine.recording.export",
    "watch_modules": "glassengine.diagnose.paired_steps",
    "watch_scripts": "glassengine.diagnose.paired_run",
}
__all__ = list(_PUBLIC)
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
