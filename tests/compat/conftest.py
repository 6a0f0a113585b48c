"""Lazy tensors on the back-end that computes as eager code does."""

from __future__ import annotations

from tests.plugins.lazy.conftest import counters, device

__all__ = ["counters", "device"]
