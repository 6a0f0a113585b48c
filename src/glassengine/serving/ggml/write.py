"""Public name of the plugin `serving`: writes models as GGUF files."""

from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine.plugins.serving.ggml.write import write_gguf

__all__ = ["write_gguf"]

_PUBLIC = {"write_gguf": "glassengine.plugins.serving.ggml.write"}
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
