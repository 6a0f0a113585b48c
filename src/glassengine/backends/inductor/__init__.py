"""Back-end "inductor": programs compiled by AOTInductor into packages, and what a CPU gains beyond it."""

from glassengine.backends.inductor.backend import InductorBackend

__all__ = ["InductorBackend"]
