"""`import glassengine.eager_debug`: run every operation of this script by itself, if the environment asks for it.

With GLASS_EAGER_DEBUG=1 or NEURON_USE_EAGER_DEBUG_MODE=1 set before the import, each operation that the importing
thread calls from then on is compiled and run alone, until the process ends. Otherwise nothing happens, so that the line
can stay. For a part of a script there is `with glassengine.compat.eager_debug():`.
"""

from glassengine import environment

if environment.eager_debug():
    from glassengine.backends.registry import choose_graph_backend
    from glassengine.frontends.eager_debug import EagerDebugMode, op_runner

    EagerDebugMode(op_runner(type(choose_graph_backend(None)))).__enter__()  # type: ignore[no-untyped-call]
