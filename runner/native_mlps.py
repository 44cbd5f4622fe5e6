"""Gated MLPs in one call of C instead of three products and the operations between them.

In a decode step the call saves starting each of these, and what goes through the gate need not leave the CPU's caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runner.native.build import NativeUnavailableError
from runner.native.kernels import ACTIVATIONS, is_plain, native_kernels
from runner.native_modules import NativeModule, make_native, restore_modules
from runner.packed_linear import PackedLinear
from runner.packed_products import MOST_NATIVE_ROWS

LAYERS = ("gate_proj", "up_proj", "down_proj")
"""What an MLP calls its linear layers, in the order of the kernel's arguments."""

CHILDREN = {*LAYERS, "act_fn"}
"""All that it is made of."""

ERROR = 64 * torch.finfo(torch.float32).eps
"""Most that an MLP may differ from the module's own, as a share of the largest value."""


@dataclass(frozen=True)
class Mlp:
    """What a module has turned out to compute: ``down(activation(gate(x)) * up(x))``.

    Args:
        activation: A key of :data:`~runner.native.kernels.ACTIVATIONS`.
        module: The one that computes it.
    """

    activation: str
    module: nn.Module


def use_native_mlps(model: nn.Module) -> int:
    """Have a model's gated MLPs in float32 computed by the native kernel; how many there are.

    A module is taken for one if its class says so, it is made of three linear layers, which are packed and have no
    bias, and an activation, and what it computes of random rows is what the kernel computes. It keeps these, and its
    own way of computing for where the kernel does not serve: where its layers do not read their packed weights, or
    something hooks into them.
    """
    restore_modules(model, _NativeMlp)
    try:
        native_kernels()
    except NativeUnavailableError:
        return 0
    taken = 0
    for module in list(model.modules()):
        mlp = _recognized(module)
        if mlp is not None:
            make_native(module, _NativeMlp, mlp)
            taken += 1
    return taken


class _NativeMlp(NativeModule):
    _found: Mlp

    def natively(self, input: torch.Tensor) -> torch.Tensor | None:
        activation = self._modules["act_fn"]
        if (
            activation is not self._found.module
            or activation._forward_hooks
            or activation._forward_pre_hooks
            or torch.is_grad_enabled()
            or not is_plain(input)
            or torch.is_autocast_enabled("cpu")
        ):
            return None
        return _computed(self, input, self._found.activation)


def _computed(module: nn.Module, input: torch.Tensor, activation: str) -> torch.Tensor | None:
    """By the kernel; None where it does not serve."""
    packed = []
    for name in LAYERS:
        layer = module._modules[name]
        if type(layer) is not PackedLinear or (weight := layer.native_weight()) is None:
            return None
        packed.append(weight)
    gate, up, down = packed
    inner, size = gate.origin.shape
    if (
        input.dtype != torch.float32
        or input.shape[-1:] != (size,)
        or input.numel() > MOST_NATIVE_ROWS * size
        or up.origin.shape != gate.origin.shape
        or down.origin.shape[1] != inner
    ):
        return None
    return native_kernels().gated_mlp(
        input, gate.weight, up.weight, down.weight, inner=inner, columns=len(down.origin), activation=activation
    )


@torch.inference_mode()
def _recognized(module: nn.Module) -> Mlp | None:
    if not type(module).__name__.endswith("MLP") or {name for name, _ in module.named_children()} != CHILDREN:
        return None
    gate = module.gate_proj
    if type(gate) is not PackedLinear:
        return None
    # Of a type and a place of their own, whatever torch's defaults are. Of several sizes: what is large may be cut off.
    float32: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    rows = torch.randn(6, gate.in_features, generator=torch.Generator().manual_seed(0), **float32)
    rows *= torch.logspace(-3, 2, 6, **float32)[:, None]
    expected = None
    for activation in ACTIVATIONS:
        found = _computed(module, rows, activation)
        if found is None:
            return None
        if expected is None:
            expected = module(rows)
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return None
        if ((found - expected).abs().amax(-1) <= ERROR * expected.abs().amax(-1)).all():
            return Mlp(activation, module.act_fn)
    return None
