"""Paged attention: one contract (:mod:`runner.attention.base`), one module a backend."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runner.attention.base import AttentionBackend, AttentionLayer, has_triton
from runner.attention.native_backend import NativeBackend
from runner.attention.torch_backend import TorchBackend
from runner.errors import EngineConfigError
from runner.native.build import NativeUnavailableError
from runner.native.kernels import native_kernels


def _torch_backend(device: torch.device) -> AttentionBackend:
    return TorchBackend()


def _native_backend(device: torch.device) -> AttentionBackend:
    try:
        native_kernels()
    except NativeUnavailableError as error:
        raise EngineConfigError(f"attention_backend='native' has no kernels here: {error}") from error
    return NativeBackend()


def _triton_backend(device: torch.device) -> AttentionBackend:
    if not has_triton():
        raise EngineConfigError("attention_backend='triton' needs Triton: run `pip install 'kvcore[cuda]'`")
    from runner.attention.triton_backend import TritonBackend

    return TritonBackend()


def _flash_backend(device: torch.device) -> AttentionBackend:
    from runner.attention.flash_backend import FlashAttentionBackend

    return FlashAttentionBackend.for_device(device)


BACKENDS: dict[str, Callable[[torch.device], AttentionBackend]] = {
    "torch": _torch_backend,
    "native": _native_backend,
    "triton": _triton_backend,
    "flash": _flash_backend,
}
"""By the name that ``EngineConfig.attention_backend`` takes; each is given the device it is for."""


def make_backend(name: str | None, device: torch.device | str = "cpu") -> AttentionBackend:
    """A new backend.

    Args:
        name: Of :data:`BACKENDS`; None: "native" on a CPU if its kernels can be compiled, "triton" on a CUDA device if
            Triton is installed, else "torch".
        device: Where the model runs.

    Raises:
        EngineConfigError: There is none of that name, or what it needs is not installed; says how to install it.
    """
    device = torch.device(device)
    if name is None:
        return _default_backend(device)
    if name not in BACKENDS:
        raise EngineConfigError(f"attention_backend must be one of {', '.join(BACKENDS)}; got {name!r}")
    return BACKENDS[name](device)


def _default_backend(device: torch.device) -> AttentionBackend:
    if device.type == "cuda" and has_triton():
        return _triton_backend(device)
    if device.type == "cpu":
        try:
            native_kernels()
        except NativeUnavailableError as error:
            return TorchBackend(because=f"no native kernels: {error}")
        return NativeBackend()
    return TorchBackend()


__all__ = ["BACKENDS", "AttentionBackend", "AttentionLayer", "TorchBackend", "make_backend"]
