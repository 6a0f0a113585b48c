"""What a process and the ranks that it started say to each other: a JSON document, and tensors as safetensors."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

_HEAD = struct.Struct("<QQ")
_MOST_JSON, _MOST_DATA = 1 << 20, 1 << 40
# Memory is taken as bytes come, not as a message says: twice of it at most, and this.
_PIECE = 1 << 20


def send(
    connection: socket.socket, document: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Send one message.

    Raises:
        OSError: The other side is gone.
    """
    text = json.dumps(document).encode()
    data = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}) if tensors else b""
    connection.sendall(_HEAD.pack(len(text), len(data)) + text)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """Return the next message; None where the other side has closed the connection.

    Raises:
        OSError: The connection broke, or something else than a message came.
    """
    head = _exactly(connection, _HEAD.size)
    if head is None:
        return None
    text_size, data_size = _HEAD.unpack(head)
    if text_size > _MOST_JSON or data_size > _MOST_DATA:
        raise OSError("a message of a rank has an impossible size")
    text, data = _exactly(connection, text_size), _exactly(connection, data_size)
    if text is None or data is None:
        return None
    try:
        document = json.loads(text)
        if not isinstance(document, dict):
            raise TypeError("not an object")
        return document, load(bytes(data)) if data else {}
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise OSError(f"a message of a rank is damaged: {error}") from error


def _exactly(connection: socket.socket, size: int) -> bytearray | None:
    found, done = bytearray(), 0
    while done < size:
        if done == len(found):
            found.extend(bytes(min(size - done, max(done, _PIECE))))
        with memoryview(found) as view, view[done:] as rest:
            count = connection.recv_into(rest)
        if not count:
            return None
        done += count
    return found
