"""Paged attention: one contract (:mod:`runner.attention.base`), one module a backend."""

from __future__ import annotations

from collections.abc import Callable

from runner.attention.base import AttentionBackend, AttentionLayer
from runner.attention.torch_backend import TorchBackend
from runner.errors import EngineConfigError

BACKENDS: dict[str, Callable[[], AttentionBackend]] = {"torch": TorchBackend}
"""By the name that ``EngineConfig.attention_backend`` takes."""


def make_backend(name: str) -> AttentionBackend:
    """A new backend of that name.

    Raises:
        EngineConfigError: There is none.
    """
    if name not in BACKENDS:
        raise EngineConfigError(f"attention_backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    return BACKENDS[name]()


__all__ = ["BACKENDS", "AttentionBackend", "AttentionLayer", "TorchBackend", "make_backend"]
