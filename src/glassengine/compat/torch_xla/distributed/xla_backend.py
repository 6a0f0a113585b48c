"""`torch_xla.distributed.xla_backend`: tells `torch.distributed.init_process_group("xla")` why there is none."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.rendezvous import register_rendezvous_handler

from glassengine.errors import UsageError


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise UsageError(
        "there is no process group of lazy tensors",
        got="init_process_group('xla')",
        hint="init_process_group('gloo'), and collectives on tensors of the CPU: tensor.cpu()",
    )


if torch.distributed.is_available():
    register_rendezvous_handler("xla", _refuse)  # type: ignore[no-untyped-call]
    torch.distributed.Backend.register_backend("xla", _refuse, devices=["lazy"])
