"""Directory of the libraries that Inductor builds and loads; private to the user.

By default that is a directory of a known name among everybody's temporary files. Another user of the machine can make
it first, with libraries of his own in it under the names of those that Inductor builds for every program.
"""

from __future__ import annotations

import atexit
import functools
import logging
import stat
import tempfile
from pathlib import Path

from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from glassengine import environment
from glassengine.writing.files import private_directory, remove_tree, untrusted

logger = logging.getLogger("glassengine")


def use_private_directory() -> None:
    """Let Inductor work in its default directory only where that is the user's alone, and otherwise in one that is.

    What the user names himself (TORCHINDUCTOR_CACHE_DIR) is left as it is.
    """
    default = Path(default_cache_dir()).absolute()
    named = environment.inductor_directory()
    if named is not None and named.absolute() != default:
        return
    problem = _problem(default)
    if problem is not None:
        environment.set_inductor_directory(_other(default, problem))


@functools.cache
def _other(default: Path, problem: str) -> Path:
    """Return a directory of this user in place of `default`: among what he keeps, or of this process alone."""
    kept = environment.cache_dirs()["glassengine"]
    place = kept / "inductor"
    if _problem(kept) is not None or _problem(place) is not None:
        place = Path(tempfile.mkdtemp(prefix="glass-inductor-"))
        atexit.register(remove_tree, place)
    logger.warning("Inductor does not use %s: %s, and what is in it is run; it works in %s", default, problem, place)
    return place


def _problem(directory: Path) -> str | None:
    """Return why others could have put something into a directory, which is made if need be; None if they could not."""
    try:
        private_directory(directory)
        found = directory.lstat()
    except OSError as error:
        return error.strerror or str(error)
    if not stat.S_ISDIR(found.st_mode):
        return "it is a link"
    return untrusted(found)
