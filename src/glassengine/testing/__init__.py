"""Tools for the tests of other projects: sweeps of kernels, tiny models, and the conformance tests of back-ends."""

from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine.kernels.match import assert_gradients_match, assert_samples_match
    from glassengine.kernels.sweep import assert_sweep, kernel_inputs, sweep

__all__ = ["assert_gradients_match", "assert_samples_match", "assert_sweep", "kernel_inputs", "sweep"]

_PUBLIC = {
    "assert_gradients_match": "glassengine.kernels.match",
    "assert_samples_match": "glassengine.kernels.match",
    "assert_sweep": "glassengine.kernels.sweep",
    "kernel_inputs": "glassengine.kernels.sweep",
    "sweep": "glassengine.kernels.sweep",
}
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
