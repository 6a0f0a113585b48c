"""The tensor that a user holds: sizes, dtype and autograd as any tensor has them, and no data of its own.

To ATen and to autograd it is a tensor of the device on which its graph runs, so that everything above the single
operation (autograd, autocast, which attention is taken) does what it does there. To the user it is on the lazy device.
What needs data, as printing does, asks for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch._ops import OpOverload

from glassengine.errors import UsageError
from glassengine.plugins.lazy.memory import Handle
from glassengine.plugins.lazy.values import LazyMemory, LazyValue

DEVICE = torch.device("lazy", 0)


class LazyRecorder(Protocol):
    """What takes the operations on lazy tensors, and gives them their data."""

    def dispatch(self, target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of an operation one of whose arguments is a lazy tensor."""

    def data(self, tensor: LazyTensor, why: str) -> torch.Tensor:
        """Return the data of a tensor, computed now if it is pending; it must not be written to."""

    def promised(self, tensor: LazyTensor, site: str, on_run: Callable[[], None]) -> Any:
        """Return what has the data of a tensor, as it is now, as soon as a graph has made it."""

    def keep_promises(self, why: str) -> None:
        """Run everything that is pending."""


class LazyTensor(torch.Tensor):
    """A tensor whose operations are recorded; `glass.lazy.tensor` and moving one to `glass.lazy.device()` make it."""

    recorder: ClassVar[LazyRecorder]
    _lazy: Handle

    @staticmethod
    def made(handle: Handle, *, requires_grad: bool = False) -> LazyTensor:
        """Return a new tensor that reads and writes `handle`."""
        kind = handle.spec
        self: LazyTensor = torch.Tensor._make_wrapper_subclass(
            LazyTensor, kind.shape, strides=kind.stride, storage_offset=kind.offset, dtype=kind.dtype,
            device=kind.device, requires_grad=requires_grad,
        )  # fmt: skip
        self._lazy = handle
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Record an operation."""
        for kind in types:
            if kind is not LazyTensor and kind is not torch.Tensor and kind is not torch.nn.Parameter:
                return NotImplemented
        return cls.recorder.dispatch(func, args, kwargs or {})

    # Autograd and autocast have done their part when an operation is dispatched; nothing is to be done above them.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def _data(self, why: str) -> torch.Tensor:
        return self.recorder.data(self, why)

    def promised(self, site: str, on_run: Callable[[], None]) -> Any:
        """Return what has its data as soon as a graph has made it; `on_run` is called after each run."""
        return self.recorder.promised(self, site, on_run)

    def keep_promises(self, why: str) -> None:
        """Run everything that is pending."""
        self.recorder.keep_promises(why)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The lazy device."""
        return DEVICE

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        """False: its data is where its graph runs."""
        return False

    @property
    def data(self) -> LazyTensor:
        """The same memory, unknown to autograd."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if not isinstance(other, LazyTensor):
            self._leave(other)
            return
        with torch.no_grad():
            torch.Tensor.data.__set__(self, other.detach())  # type: ignore[attr-defined]
        self._lazy = other._lazy

    def _leave(self, other: torch.Tensor) -> None:
        """Become a tensor like any other, as a module does that is moved to another device."""
        data = other.detach()
        plain = torch.nn.Parameter(data) if isinstance(self, torch.nn.Parameter) else data
        plain.requires_grad_(self.requires_grad)
        plain.grad = None if self.grad is None else self.grad.to(data.device)
        torch.utils.swap_tensors(self, plain)  # type: ignore[no-untyped-call]

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return it with another dtype or memory format, or on another device; there it is a tensor like any other."""
        options = dict(kwargs)
        keep: dict[str, Any] = {"copy": bool(options.pop("copy", False))}
        flags = [value for value in args if isinstance(value, bool)]  # non_blocking, then copy
        if len(flags) == 2:
            args, keep["copy"] = args[:-1], flags[1]
        device, dtype, keep["non_blocking"], memory_format = torch._C._nn._parse_to(*args, **options)
        if memory_format is not None:
            keep["memory_format"] = memory_format
        # To ATen the device of another lazy tensor is the one on which its graph runs.
        if isinstance(args[0] if args else options.get("other"), LazyTensor):
            return torch.Tensor.to(self, dtype=dtype or self.dtype, **keep)
        if device is None or device.type == DEVICE.type:
            return torch.Tensor.to(self, dtype=dtype or self.dtype, **keep)
        fetched: torch.Tensor = _Fetch.apply(self)  # type: ignore[no-untyped-call]
        return fetched.to(device=device, dtype=dtype, **keep)

    def cpu(self, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
        """Return a tensor like any other with its data."""
        return self.to("cpu", memory_format=memory_format)

    def cuda(self, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format) -> Any:
        """Return a tensor on a GPU with its data."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def numpy(self, *, force: bool = False) -> Any:
        """Return its data as an array of its own."""
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self._data("numpy()").detach().cpu().clone().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        """Return its data as an array of its own."""
        made = self.numpy()
        return made if dtype is None else made.astype(dtype, copy=False)

    def __dlpack__(self, **kwargs: Any) -> Any:
        """Hand on a copy of its data."""
        return self._data("__dlpack__()").detach().clone().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        """Return the device on which its graph runs."""
        return self._lazy.spec.empty().new_empty(0).__dlpack_device__()

    def tolist(self) -> Any:
        """Return its elements as Python numbers."""
        return self._data("tolist()").tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show it as PyTorch/XLA shows its own: the values, the device and what autograd knows."""
        text = repr(self._data("print").detach())[:-1]
        if torch.get_default_dtype() is self.dtype:
            text = text.replace(f", dtype={self.dtype}", "")
        if isinstance(self, torch.nn.Parameter):
            text = f"Parameter containing:\n{text}"
        text += f", device='{DEVICE}'"
        if self.grad_fn is not None:
            return f"{text}, grad_fn=<{type(self.grad_fn).__name__}>)"
        return f"{text}, requires_grad=True)" if self.requires_grad else f"{text})"

    def __format__(self, format_spec: str) -> str:
        """Format the number of a tensor that has one."""
        return self.item().__format__(format_spec) if self.dim() == 0 else object.__format__(self, format_spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy, which is recorded; nothing is computed."""
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the"
                " moment."
            )
        if id(self) in memo:
            return memo[id(self)]
        made: Any
        with torch.no_grad():
            made = self.detach().clone()
        made.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            # As torch does it: without a gradient, and without attributes.
            memo[id(self)] = made = torch.nn.Parameter(made, self.requires_grad)
            return made
        for name, value in self.__dict__.items():
            if name != "_lazy":
                made.__dict__[name] = copy.deepcopy(value, memo)
        memo[id(self)] = made
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __copy__(self) -> Any:
        """Return a tensor that shares its memory."""
        same = self.detach()
        made: Any = torch.nn.Parameter(same, False) if isinstance(self, torch.nn.Parameter) else same
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name != "_lazy"})
        return made.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save its data, as a tensor like any other: what is loaded needs nothing of this package."""
        data = self._data("save").detach().clone()
        plain = torch.nn.Parameter(data, self.requires_grad) if isinstance(self, torch.nn.Parameter) else data
        if plain is data:
            plain.requires_grad_(self.requires_grad and self.is_leaf)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def data_ptr(self) -> int:
        """Return an address that is the same for tensors that begin at the same place of one memory."""
        memory = self._lazy if isinstance(self._lazy, LazyMemory) else self._lazy.memory
        return id(memory) + self._lazy.spec.offset * self.dtype.itemsize

    def untyped_storage(self) -> Any:
        """Refuse."""
        raise UsageError(
            "a lazy tensor has no storage", got=str(self._lazy.spec), hint="take its data first: tensor.cpu()"
        )

    # With both of these a module that is moved exchanges its parameters for lazy ones, in place.
    def __tensor_flatten__(self) -> Any:
        """Refuse: it is not made of other tensors."""
        raise UsageError("a lazy tensor cannot be compiled by torch.compile", hint="torch.compile(f)(tensor.cpu())")

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:
        """Refuse: it is not made of other tensors."""
        raise UsageError("a lazy tensor is not made of other tensors")


class _Fetch(torch.autograd.Function):
    """From the lazy device to another; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: LazyTensor) -> torch.Tensor:
        return tensor._data("cpu()").detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].to(DEVICE)


def value_of(tensor: LazyTensor) -> LazyValue:
    """Return what a lazy tensor holds now."""
    return tensor._lazy.get()
