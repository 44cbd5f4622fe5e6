"""RMS norms in one call of C instead of the seven operations that models of transformers have written out.

In a decode step each of these is short, and most of its time goes into starting it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from runner.native.build import NativeUnavailableError
from runner.native.kernels import is_plain, native_kernels

OFFSETS = (0.0, 1.0)
"""What is added to the weight: nothing, or 1 as in Gemma."""

ERROR = 16 * torch.finfo(torch.float32).eps
"""Most that a norm may differ from the module's own, as a share of the largest value."""


@dataclass(frozen=True)
class Norm:
    """What a module has turned out to compute: ``x / sqrt(mean(x^2) + epsilon) * (offset + weight)``.

    Args:
        epsilon: Keeps the root from being 0.
        offset: One of :data:`OFFSETS`.
    """

    epsilon: float
    offset: float


def use_native_norms(model: nn.Module) -> int:
    """Have a model's RMS norms in float32 computed by the native kernel; how many there are.

    A module is taken for one if its class says so, its only parameter is a weight, and what it computes of random rows
    is what the kernel computes. It keeps its weight, and its own way of computing for where the kernel does not serve:
    with gradients, in another type, or while it is compiled or traced.
    """
    restore_norms(model)
    try:
        native_kernels()
    except NativeUnavailableError:
        return 0
    taken = 0
    for module in list(model.modules()):
        norm = _recognized(module)
        if norm is not None:
            module.__class__ = _native_class(type(module))
            module.__dict__["_norm"] = norm
            taken += 1
    return taken


def restore_norms(model: nn.Module) -> None:
    """Make the modules what they were."""
    for module in model.modules():
        if isinstance(module, _Native):
            del module.__dict__["_norm"]
            module.__class__ = module._own_class


class _Native:
    """Stands before a class of norms."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own result; by the kernel where it serves, for one tensor and nothing else."""
        if len(args) != 1 or kwargs:
            return super().forward(*args, **kwargs)
        hidden_states, weight = args[0], self.weight
        if (
            torch.is_grad_enabled()
            or not is_plain(hidden_states)
            or not hidden_states.dtype == weight.dtype == torch.float32
            or hidden_states.shape[-1:] != weight.shape
            or not weight.is_contiguous()
        ):
            return super().forward(hidden_states)
        norm = self._norm
        return native_kernels().rms_norm(hidden_states, weight, epsilon=norm.epsilon, offset=norm.offset)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies are of the class that everyone knows."""
        state = {name: value for name, value in self.__dict__.items() if name != "_norm"}
        return _plain, (self._own_class, state)


def _plain(norm_class: type[nn.Module], state: dict[str, Any]) -> nn.Module:
    norm = norm_class.__new__(norm_class)
    norm.__dict__.update(state)
    return norm


@cache
def _native_class(norm_class: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": norm_class.__module__, "_own_class": norm_class}
    return type(norm_class.__name__, (_Native, norm_class), names)


@torch.inference_mode()
def _recognized(module: nn.Module) -> Norm | None:
    if not type(module).__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    weight = module.weight
    if weight.ndim != 1 or weight.dtype != torch.float32 or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    # Of a type and a place of their own, whatever torch's defaults are.
    float32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    rows = torch.randn(5, len(weight), generator=torch.Generator().manual_seed(0), **float32)
    rows *= torch.logspace(-4, 2, 5, **float32)[:, None]
    expected = module(rows)
    if expected.shape != rows.shape or expected.dtype != rows.dtype:
        return None
    for epsilon in _epsilons(module):
        for offset in OFFSETS:
            found = native_kernels().rms_norm(rows, weight, epsilon=epsilon, offset=offset)
            if ((found - expected).abs().amax(-1) <= ERROR * expected.abs().amax(-1)).all():
                return Norm(epsilon, offset)
    return None


def _epsilons(module: nn.Module) -> Iterator[float]:
    for name in ("variance_epsilon", "eps"):
        epsilon = getattr(module, name, None)
        if isinstance(epsilon, float):
            yield epsilon
