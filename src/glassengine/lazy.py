"""Lazy tensors: operations are recorded, and run as ONE graph when a value is needed.

A tensor or a module becomes lazy when it is moved to `device()`, or by `tensor(x)` and `module(m)`. Forward, backward
and the step of an optimizer are recorded, and `mark_step()` compiles and runs all of it. Printing a tensor,
`.item()` and whatever else needs a value run the graph of that tensor alone, which is counted and logged with its line.
`text(x)` and `graph(x)` show what is pending, `fallbacks()` lists the operations that were not recorded, and
`mode(...)` chooses the back-end, or lets each operation run by itself.
"""

from typing import TYPE_CHECKING

from glassengine.deferred import deferred

if TYPE_CHECKING:
    from glassengine.executable.steps import add_step_closure as add_step_closure
    from glassengine.executable.steps import mark_step as mark_step
    from glassengine.plugins.lazy.dispatching import fallbacks as fallbacks
    from glassengine.plugins.lazy.surface import device as device
    from glassengine.plugins.lazy.surface import graph as graph
    from glassengine.plugins.lazy.surface import is_lazy as is_lazy
    from glassengine.plugins.lazy.surface import mark_dynamic as mark_dynamic
    from glassengine.plugins.lazy.surface import mode as mode
    from glassengine.plugins.lazy.surface import module as module
    from glassengine.plugins.lazy.surface import pending as pending
    from glassengine.plugins.lazy.surface import tensor as tensor
    from glassengine.plugins.lazy.surface import text as text
    from glassengine.plugins.lazy.tensor import LazyTensor as LazyTensor

_PUBLIC = {
    "LazyTensor": "glassengine.plugins.lazy.tensor",
    "add_step_closure": "glassengine.executable.steps",
    "device": "glassengine.plugins.lazy.surface",
    "fallbacks": "glassengine.plugins.lazy.dispatching",
    "graph": "glassengine.plugins.lazy.surface",
    "is_lazy": "glassengine.plugins.lazy.surface",
    "mark_dynamic": "glassengine.plugins.lazy.surface",
    "mark_step": "glassengine.executable.steps",
    "mode": "glassengine.plugins.lazy.surface",
    "module": "glassengine.plugins.lazy.surface",
    "pending": "glassengine.plugins.lazy.surface",
    "tensor": "glassengine.plugins.lazy.surface",
    "text": "glassengine.plugins.lazy.surface",
}
__all__ = list(_PUBLIC)
__getattr__, __dir__ = deferred(__name__, _PUBLIC)
