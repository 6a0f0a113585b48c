"""Public name of the plugin `serving`: where the plug-in for vLLM lies."""

from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine.plugins.serving.vllm.candidate import INSIDE

__all__ = ["INSIDE"]

_PUBLIC = {"INSIDE": "glassengine.plugins.serving.vllm.candidate"}
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
