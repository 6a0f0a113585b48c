"""Names of PyTorch/XLA without a meaning here: they can be imported, and raise an error when they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from glassengine.errors import UsageError


def refusing(module: str, absent: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module that refuses names of PyTorch/XLA.

    A script may import or mention them where it does not use them, so that the error comes with the call.

    Args:
        module: Its `__name__`.
        absent: Name -> why it has no meaning here, or what to use in its place.
    """

    def get(name: str) -> Any:
        if name not in absent:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            raise UsageError(f"{module.partition('.compat.')[2]}.{name} is not available", hint=absent[name])

        refuse.__name__ = refuse.__qualname__ = name
        return refuse

    return get


def require_default(name: str, given: Mapping[str, Any], why: str) -> None:
    """Refuse arguments of a function of PyTorch/XLA that are set and would change what it does.

    Args:
        name: Of the function.
        given: Argument -> its value; None or False where it is not set.
        why: They have no meaning here.

    Raises:
        UsageError: One of them is set.
    """
    for argument, value in given.items():
        if value:
            raise UsageError(f"{name} does not take {argument}", got=f"{argument}={value!r}", hint=why)
