"""From a program to an engine directory, and from an engine directory to tokens."""

from glassengine.engine.build.build import build, build_program
from glassengine.engine.run.engine import Engine
from glassengine.engine.run.load import load

__all__ = ["Engine", "build", "build_program", "load"]
