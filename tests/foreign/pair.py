"""A model of one author beside the same model of another one, and mistakes that may be in the second."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Mistake:
    """What is wrong in a candidate.

    Attributes:
        sites: Of the baseline, as patterns: one has to be named.
        says: Pieces of text of which a hint that helps holds one. Other hints mislead.
        known: What is wrong with the answer today, if anything is; it counts as a failure.
        kinds: That are right for its hint, where they are not in `kinds.py`; a second one needs a reason beside it.
        because: Pieces of text of which the reasons hold one, where the mistake is outside of the operations.
    """

    sites: Sequence[str]
    says: Sequence[str] = ()
    known: str = ""
    kinds: Sequence[str] = ()
    because: Sequence[str] = ()


@dataclass(frozen=True)
class Pair:
    """Two implementations of one model.

    Attributes:
        name: On screen.
        packages: What has to be installed.
        make: Given a mistake, or "" for a port that is right, returns baseline and candidate of the same weights; the
            second may be a file of it.
        inputs: Of one forward, by name, or of several, one after the other.
        mistakes: By name, which is what `make` is given.
        known: Why the right one is not judged finely enough today, where it is not; it counts as a failure.
    """

    name: str
    packages: Sequence[str]
    make: Callable[[str], tuple[nn.Module, Any]]
    inputs: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]
    mistakes: Mapping[str, Mistake] = field(default_factory=dict)
    known: str = ""

    def keep_inputs(self, path: Path) -> None:
        """Write a file of the inputs for `check`."""
        torch.save(dict(self.inputs) if isinstance(self.inputs, Mapping) else list(self.inputs), path)


def module_of(package: str, file: str) -> Any:
    """Return one module of a package, without what the package itself imports: sound, images, training."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations is not None
    path = f"{found.submodule_search_locations[0]}/{file}"
    spec = importlib.util.spec_from_file_location(f"{package}_{file.removesuffix('.py')}".replace("/", "_"), path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class _Absent(ModuleType):
    """Stands for a module that is not installed: whatever is asked of it is a class that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (nn.Module,), {})


def part_of(name: str, *, bare: Sequence[str] = (), without: Sequence[str] = ()) -> Any:
    """Import one module of a package as users do, but for what it imports beside the model.

    Args:
        name: Of the module, with its package.
        bare: Packages whose own start-up is left out.
        without: Modules in whose place something stands that does nothing.
    """
    for package in bare:
        if package not in sys.modules:
            parent = sys.modules.get(package.rpartition(".")[0])
            found = importlib.machinery.PathFinder.find_spec(
                package if parent is None else package.rpartition(".")[2], None if parent is None else parent.__path__
            )
            assert found is not None and found.submodule_search_locations is not None, package
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = list(found.submodule_search_locations)
            sys.modules[package].__spec__ = found
    for other in without:
        if other not in sys.modules:
            sys.modules[other] = _Absent(other)
            sys.modules[other].__path__ = []
    return importlib.import_module(name)


def edited(module: ModuleType, old: str, new: str) -> Any:
    """Return a copy of a package's module in whose source one piece of text is another: a mistake of its author."""
    assert module.__file__ is not None
    text = Path(module.__file__).read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {module.__file__}"
    path = Path(tempfile.mkdtemp()) / Path(module.__file__).name
    path.write_text(text.replace(old, new))
    copy = ModuleType(module.__name__)
    copy.__dict__.update(__package__=module.__package__, __file__=str(path))
    exec(compile(path.read_text(), str(path), "exec"), copy.__dict__)
    return copy


def rewritten(names: Sequence[str], edit: tuple[str, str] | None) -> list[Any]:
    """Return copies of modules that import each other, given in that order, with one text in one of them another."""
    originals = {name: importlib.import_module(name) for name in names}
    texts = {name: Path(str(module.__file__)).read_text() for name, module in originals.items()}
    texts = {name: text.replace("\N{NO-BREAK SPACE}", " ") for name, text in texts.items()}
    if edit is not None:
        number = sum(text.count(edit[0]) for text in texts.values())
        assert number == 1, f"{edit[0]!r} stands {number} times in {', '.join(names)}"
        texts = {name: text.replace(*edit) for name, text in texts.items()}
    folder = Path(tempfile.mkdtemp())
    made = []
    try:
        for name, text in texts.items():
            path = folder / f"{name.rpartition('.')[2]}.py"
            path.write_text(text)
            copy = sys.modules[name] = ModuleType(name)
            copy.__dict__.update(__package__=originals[name].__package__, __file__=str(path))
            exec(compile(text, str(path), "exec"), copy.__dict__)
            made.append(copy)
    finally:
        sys.modules.update(originals)
    return made


def answering(module: nn.Module, *names: str) -> nn.Module:
    """Let a module return these of its results only: those that a port returns as well."""
    whole: Any = type(module).forward

    @functools.wraps(whole)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        found = whole(self, *args, **kwargs)
        return {name: getattr(found, name) for name in names}

    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})
    return module


def copied(target: nn.Module, tensors: Mapping[str, Any]) -> None:
    """Fill the weights of a module by name; every name must be there."""
    target.load_state_dict({name: tensor.detach().clone() for name, tensor in tensors.items()})


def shaken(module: nn.Module) -> nn.Module:
    """Return a module in which no weight is what it was made as: ones and zeros of norms say nothing."""
    for tensor in module.parameters():
        tensor.data.add_(0.1 * tensor.new_empty(tensor.shape).normal_())
    for name, tensor in module.named_buffers():
        if name.endswith("running_mean"):
            tensor.normal_()
        if name.endswith("running_var"):
            tensor.uniform_(0.5, 2)
    return module.eval()


def in_order(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights and running statistics of a module by name, in the order in which it makes them."""
    return {name: tensor for name, tensor in module.state_dict().items() if not name.endswith("num_batches_tracked")}


def filled_in_order(target: nn.Module, tensors: Mapping[str, Any], leave: str = "") -> None:
    """Fill the weights of a module with those of another one that makes them in the same order.

    `leave` is the beginning of names that are left as they are; a tensor of another size, or one too many, is an error.
    """
    own = {name: tensor for name, tensor in in_order(target).items() if not (leave and name.startswith(leave))}
    for (name, tensor), (other, given) in zip(own.items(), tensors.items(), strict=True):
        assert tensor.numel() == given.numel(), f"{name} {list(tensor.shape)} for {other} {list(given.shape)}"
        tensor.copy_(given.detach().reshape(tensor.shape))
