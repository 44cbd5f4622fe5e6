"""Gated MLPs in one call of C instead of three products and the operations between them.

In a decode step the call saves starting each of these, and what goes through the gate need not leave the CPU's caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from runner.native.kernels import is_plain, native_kernels
from runner.native_modules import (
    FLOAT32,
    NativeModule,
    has_tensors,
    make_native,
    only_computes,
    output_of,
    random_rows,
    rows_agree,
)
from runner.packed_linear import Packed, PackedLinear
from runner.packed_products import MOST_NATIVE_ROWS

LAYERS = ("gate_proj", "up_proj", "down_proj")
"""What an MLP calls its linear layers, in the order of the kernel's arguments."""

CHILDREN = {*LAYERS, "act_fn"}
"""All that it is made of."""

FUNCTIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}
"""torch's own, by the names of the kernel's."""


@dataclass(frozen=True)
class Mlp:
    """What a module has turned out to compute: ``down(activation(gate(x)) * up(x))``.

    Args:
        activation: A key of :data:`~runner.native.kernels.ACTIVATIONS`.
        activation_module: The one that computes it.
    """

    activation: str
    activation_module: nn.Module


def use_native_mlps(model: nn.Module) -> int:
    """Have a model's gated MLPs in float32 computed by the native kernel; how many there are.

    A module is taken for one if its class says so, it is made of three linear layers without a bias, packed by
    :func:`~runner.packed_linear.pack_linear_layers` before this call, and an activation, and what it computes of random
    rows is what the kernel computes. It keeps its layers, and its own way of computing for where the kernel does not
    serve: with gradients, under autocast, in training mode, for more rows than
    :data:`~runner.packed_products.MOST_NATIVE_ROWS`, where its layers do not read their packed weights, or where
    something hooks into them.

    Args:
        model: In float32, on a CPU; any other is left as it is.
    """
    return make_native(model, NativeMlp, _recognized)


class NativeMlp(NativeModule):
    """A gated MLP that the kernel computes."""

    def natively(self, found: Mlp, /, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """For one tensor and nothing else."""
        if len(args) != 1 or kwargs:
            return None
        (input,) = args
        if (
            torch.is_grad_enabled()
            or not is_plain(input)
            or torch.is_autocast_enabled("cpu")
            or not self.has_activation(found)
        ):
            return None
        return _computed(self, input, found.activation)

    def has_activation(self, found: Mlp) -> bool:
        """Whether its activation is that one, and nothing hooks into it."""
        activation = self._modules.get("act_fn")
        return activation is found.activation_module and only_computes(activation)

    def native_mlp(self) -> tuple[str, list[Packed]] | None:
        """Its activation and :data:`LAYERS`, for a kernel that computes more than this module.

        None where the module computes anything else, as :func:`use_native_mlps` says.
        """
        found: Mlp | None = self.undisturbed()
        if found is None or not self.has_activation(found):
            return None
        packed = _packed(self)
        return None if packed is None else (found.activation, packed)


def _packed(module: nn.Module) -> list[Packed] | None:
    """:data:`LAYERS` as the kernel reads them; None where it cannot."""
    packed = []
    for name in LAYERS:
        layer = module._modules.get(name)
        if type(layer) is not PackedLinear or (weight := layer.native_weight()) is None or weight.bias is not None:
            return None
        packed.append(weight)
    gate, up, down = packed
    if up.origin.shape != gate.origin.shape or down.origin.shape[1] != len(gate.origin):
        return None
    return packed


def _computed(module: nn.Module, input: torch.Tensor, activation: str) -> torch.Tensor | None:
    """By the kernel; None where it does not serve."""
    packed = _packed(module)
    if packed is None:
        return None
    gate, up, down = packed
    inner, size = gate.origin.shape
    if input.dtype != torch.float32 or input.shape[-1:] != (size,) or input.numel() > MOST_NATIVE_ROWS * size:
        return None
    return native_kernels().gated_mlp(
        input, gate.weight, up.weight, down.weight, inner=inner, columns=len(down.origin), activation=activation
    )


@torch.inference_mode()
def _recognized(module: nn.Module) -> Mlp | None:
    if not type(module).__name__.endswith("MLP") or set(module._modules) != CHILDREN or has_tensors(module):
        return None
    activation = _activation(module.act_fn)
    gate = module.gate_proj
    if activation is None or type(gate) is not PackedLinear:
        return None
    rows = random_rows(gate.in_features)
    found = _computed(module, rows, activation)
    expected = None if found is None else output_of(module, rows)
    if found is None or expected is None or not rows_agree(found, expected):
        return None
    return Mlp(activation, module.act_fn)


def _activation(module: nn.Module) -> str | None:
    """Which of :data:`~runner.native.kernels.ACTIVATIONS` a module computes."""
    values = torch.linspace(-10, 10, 401, **FLOAT32)
    found = output_of(module, values) if only_computes(module) else None
    if found is None:
        return None
    agree = (
        name for name, function in FUNCTIONS.items() if torch.allclose(found, function(values), rtol=1e-5, atol=1e-6)
    )
    return next(agree, None)
