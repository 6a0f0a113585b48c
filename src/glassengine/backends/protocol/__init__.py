"""What a back-end is: availability, capabilities, build, load; devices, and the order of inputs and outputs."""

from __future__ import annotations

from glassengine.backends.protocol.backend import (
    LARGEST,
    Availability,
    Backend,
    CachingGraphs,
    Capabilities,
    CompilingGraphs,
    DecomposingGraphs,
    Describing,
    GraphFunction,
    Layer,
    MemoryUse,
    NamingKernels,
    Network,
    NetworkTensor,
    Run,
    TakingOnnx,
    Weights,
)

__all__ = [
    "LARGEST",
    "Availability",
    "Backend",
    "CachingGraphs",
    "Capabilities",
    "CompilingGraphs",
    "DecomposingGraphs",
    "Describing",
    "GraphFunction",
    "Layer",
    "MemoryUse",
    "NamingKernels",
    "Network",
    "NetworkTensor",
    "Run",
    "TakingOnnx",
    "Weights",
]
