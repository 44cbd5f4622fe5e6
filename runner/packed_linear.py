"""Linear layers with their weights laid out a second time, in the order in which a CPU's matrix product reads them.

A product with few rows, as in a decode step, otherwise brings the weights into that order every time, which takes it
about as long as the arithmetic. Torch has operations that do so once: MKL's for float32, oneDNN's for bfloat16. The
product is the same, but for the order of its sums, which differs between batches of different sizes anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from kvcore.planning_text import size
from runner.machine import machine_memory

ROWS = 128
"""Rows that weights are packed for. Products of any number are right, and few are slower than without.

MKL decides by it how its threads divide the work: packed for 2,048 rows, products of 16 take nearly twice as long.
"""

ERROR = {torch.float32: 64, torch.bfloat16: 4}
"""Most that a packed product may differ from the plain one, in units of rounding of the largest value."""

MEMORY_SHARE = 0.25
"""Of the machine's memory: most that packed weights take where nobody asked for them."""

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]
"""From input ``[..., K]``, packed weight, weight ``[N, K]`` and bias ``[N]`` or None to ``[..., N]``."""


@dataclass(frozen=True)
class Packed:
    """A packed weight, and what it was made from.

    Args:
        weight: In a form that only ``product`` can read. It must never be copied to another address.
        product: Computes with it.
        origin: What was packed. Held, so that no other weight can come to lie where it does.
        state: :func:`_state_of` it then.
    """

    weight: torch.Tensor
    product: Product
    origin: torch.Tensor
    state: tuple[object, ...]


class PackedLinear(nn.Linear):
    """A linear layer that has a packed weight beside its own. Layers become one by :func:`pack_linear_layers`.

    Computes as any other where gradients are wanted, under autocast, and where its weight has been written to or
    replaced since; but torch does not count what is written through ``weight.data`` or a numpy array of the same
    memory: pack again after that. Copies of the layer have no packed weight.
    """

    packed: Packed | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., N]`` from ``[..., K]``."""
        packed, weight = self.packed, self.weight
        if (
            packed is None
            or torch.is_grad_enabled()
            or packed.state != _state_of(weight)
            or input.dtype != weight.dtype
            or input.shape[-1:] != weight.shape[1:]
            or torch.is_autocast_enabled("cpu")
        ):
            return F.linear(input, weight, self.bias)
        return packed.product(input, packed.weight, weight, self.bias)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "packed"}


@dataclass(frozen=True)
class Packing:
    """What came of packing a model.

    Args:
        num_bytes: Memory that the packed weights take; 0: nothing is packed.
        because: Why nothing is.
    """

    num_bytes: int = 0
    because: str = ""


def pack_linear_layers(model: nn.Module, *, whatever_it_takes: bool = False) -> Packing:
    """Pack the weights of a model's linear layers, anew if they are packed already.

    The layers stay where they are and keep their weights. Takes about a second for 1 GB, and as much memory again as
    the weights do.

    Args:
        model: On its device, in its element type.
        whatever_it_takes: Even if that is more than :data:`MEMORY_SHARE` of the machine's memory.
    """
    unpack_linear_layers(model)
    layers = list(_linear_layers(model))
    if not layers:
        return Packing(because="it has no plain linear layers")
    weights = [layer.weight for layer in layers]
    if any(weight.is_inference() for weight in weights):
        return Packing(because="of weights made under torch.inference_mode, torch does not tell when they change")
    kinds = {(weight.device.type, weight.dtype) for weight in weights}
    if len(kinds) > 1:
        return Packing(because="its linear layers differ in device or element type")
    ((device, dtype),) = kinds
    if device != "cpu":
        return Packing(because=f"the model is on {weights[0].device}, not on a CPU")
    method = _method(dtype)
    if isinstance(method, str):
        return Packing(because=method)
    pack, product = method
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    if not whatever_it_takes:
        memory = machine_memory()
        if memory is None:
            return Packing(because="the system does not say how much memory there is")
        if num_bytes > MEMORY_SHARE * memory:
            share = f"more than {MEMORY_SHARE:.0%} of this machine's {size(memory)}"
            return Packing(because=f"they would take {size(num_bytes)}, {share}")
    agree: dict[tuple[int, ...], bool] = {}
    for layer in layers:
        weight = layer.weight.detach()
        try:
            packed = Packed(pack(weight), product, weight, _state_of(layer.weight))
            if weight.shape not in agree:
                agree[weight.shape] = _agrees(packed, weight)
        except RuntimeError as error:  # not built for this CPU, or no memory left
            unpack_linear_layers(model)
            return Packing(because=f"torch cannot pack a weight {list(weight.shape)} ({str(error).splitlines()[0]})")
        if not agree[weight.shape]:
            unpack_linear_layers(model)
            return Packing(because=f"torch's packed product of a weight {list(weight.shape)} is not the plain one")
        layer.__class__ = PackedLinear
        layer.packed = packed
    return Packing(num_bytes)


def unpack_linear_layers(model: nn.Module) -> None:
    """Make the layers what they were."""
    for module in model.modules():
        if type(module) is PackedLinear:  # torch makes subclasses, for parametrizations
            module.__dict__.pop("packed", None)
            module.__class__ = nn.Linear


def _linear_layers(model: nn.Module) -> Iterator[nn.Linear]:
    """Plain ones; a class of its own may compute something else, or read its weight elsewhere."""
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.numel() and module.weight.is_contiguous():
            yield module


def _state_of(weight: torch.Tensor) -> tuple[object, ...]:
    """Changes when the weight is written to, or another takes its place."""
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.dtype, weight.shape, weight.stride()


def _method(dtype: torch.dtype) -> tuple[Callable[[torch.Tensor], torch.Tensor], Product] | str:
    """How to pack a weight of that type, and to compute with it; or why that cannot be done here."""
    # Names with an underscore: torch's compiler is what they were made for. They may be gone in another version.
    if dtype == torch.float32:
        if not (torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")):
            return "this torch has no packed product of MKL"
        return _pack_by_mkl, _mkl_product
    if dtype == torch.bfloat16:
        if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
            return "this torch has no packed product of oneDNN"
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "oneDNN has no products in bfloat16 on this CPU"
        return _pack_by_onednn, _onednn_product
    return f"there is no packed form for {str(dtype).removeprefix('torch.')}"


def _pack_by_mkl(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS)


def _mkl_product(
    input: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    # Torch takes the packed weight where this number is that of the rows, and it is for the caller to say. MKL asks for
    # no such thing: a packed weight is good for any number, of which _agrees assures itself.
    num_rows = input.numel() // weight.shape[1]
    return torch.ops.mkl._mkl_linear(input, packed, weight, bias, num_rows)


def _pack_by_onednn(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)


def _onednn_product(
    input: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


@torch.inference_mode()
def _agrees(packed: Packed, weight: torch.Tensor) -> bool:
    """Whether the packed product is the plain one but for rounding, with fewer rows and with more than packed for."""
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 3, ROWS // 2 + 1, 2 * ROWS + 1):
        rows = torch.randn(num_rows, weight.shape[1], generator=generator).to(weight.dtype)
        expected = F.linear(rows, weight).float()
        error = (packed.product(rows, packed.weight, weight, None).float() - expected).abs().max()
        # Not the other way round: of a weight that holds NaN, the error is NaN.
        if not error <= ERROR[weight.dtype] * torch.finfo(weight.dtype).eps * expected.abs().max():
            return False
    return True
