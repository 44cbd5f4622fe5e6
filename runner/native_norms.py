"""RMS norms in one call of C instead of the seven operations that models of transformers have written out.

In a decode step each of these is short, and most of its time goes into starting it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runner.native.kernels import is_plain, native_kernels
from runner.native_modules import NativeModule, make_native, output_of

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
    with gradients, in another type, or while it is compiled, traced, transformed or counted.
    """
    return make_native(model, _NativeNorm, _recognized)


class _NativeNorm(NativeModule):
    _found: Norm

    def natively(self, input: torch.Tensor) -> torch.Tensor | None:
        weight = self._parameters.get("weight")  # self.weight takes longer than the rest
        if (
            weight is None  # it is computed from others
            or torch.is_grad_enabled()
            or not is_plain(input)
            or not input.dtype == weight.dtype == torch.float32
            or input.shape[-1:] != weight.shape
            or not weight.is_contiguous()
        ):
            return None
        return native_kernels().rms_norm(input, weight, epsilon=self._found.epsilon, offset=self._found.offset)


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
    expected = output_of(module, rows)
    if expected is None:
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
