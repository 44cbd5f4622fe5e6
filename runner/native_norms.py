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
from runner.native.structs import PlacedNorm
from runner.native_modules import NativeModule, make_native, output_of, random_rows, rows_agree

OFFSETS = (0.0, 1.0)
"""What is added to the weight: nothing, or 1 as in Gemma."""

ERROR = 16 * torch.finfo(torch.float32).eps
"""Most that a row may differ from the module's own, as a share of its largest value."""


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
    with gradients, in another type, with another epsilon than then, or while it is compiled, traced, transformed or
    counted.
    """
    return make_native(model, NativeNorm, _recognized)


class NativeNorm(NativeModule):
    """A norm that the kernel computes."""

    def natively(self, found: Norm, /, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """For one tensor and nothing else."""
        if len(args) != 1 or kwargs:
            return None
        (input,) = args
        weight = _weight(self)
        if (
            weight is None
            or torch.is_grad_enabled()
            or not is_plain(input)
            or input.dtype != torch.float32
            or input.shape[-1:] != weight.shape
        ):
            return None
        return native_kernels().rms_norm(input, weight, epsilon=found.epsilon, offset=found.offset)

    def placed(self) -> PlacedNorm | None:
        """What the native norm would read, for a kernel that computes more than this norm.

        None where the module computes anything else: from a weight of another kind, by a ``forward`` of its own, and
        where something hooks into it.
        """
        found, weight = self.undisturbed(), _weight(self)
        if found is None or weight is None:
            return None
        return PlacedNorm(weight.data_ptr(), found.epsilon, found.offset, len(weight))


def _weight(module: nn.Module) -> torch.Tensor | None:
    """As the kernel reads it; None where it is not of the kind."""
    weight = module._parameters.get("weight")  # module.weight takes longer than the rest
    if (
        type(weight) is not nn.Parameter  # it is computed from others, or has no such memory
        or weight.dtype != torch.float32
        or not weight.is_cpu
        or weight.ndim != 1
        or not weight.is_contiguous()
    ):
        return None
    return weight


@torch.inference_mode()
def _recognized(module: nn.Module) -> Norm | None:
    if not type(module).__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    weight = _weight(module)
    if weight is None:
        return None
    rows = random_rows(len(weight))
    expected = output_of(module, rows)
    if expected is None:
        return None
    for epsilon in _epsilons(module):
        for offset in OFFSETS:
            found = native_kernels().rms_norm(rows, weight, epsilon=epsilon, offset=offset)
            if rows_agree(found, expected, ERROR):
                return Norm(epsilon, offset)
    return None


def _epsilons(module: nn.Module) -> Iterator[float]:
    for name in ("variance_epsilon", "eps"):
        epsilon = getattr(module, name, None)
        if isinstance(epsilon, float):
            yield epsilon
