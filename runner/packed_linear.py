"""Linear layers with their weights laid out a second time, in the order in which a CPU's matrix product reads them.

A product with few rows, as in a decode step, otherwise brings the weights into that order every time, which takes it
about as long as the arithmetic. Here that is done once, for one of the products in :mod:`runner.packed_products`. The
product is the same, but for the order of its sums, which differs between batches of different sizes anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType

import torch
import torch.nn.functional as F
from torch import nn

from kvcore.planning_text import size
from runner.machine import machine_memory
from runner.native.kernels import is_plain
from runner.native_modules import only_computes
from runner.packed_products import NativeForm, PackedForm, packed_form

ERROR = {torch.float32: 64, torch.bfloat16: 4}
"""Most that a packed product may differ from the plain one, in units of rounding of the largest value."""

MEMORY_SHARE = 0.25
"""Of the machine's memory: most that packed weights take where nobody asked for them."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A packed weight, and what it was made from.

    Args:
        weight: As ``form`` made it.
        form: Computes with it.
        origin: What was packed. Held, so that no other weight can come to lie where it does.
        bias: The layer's then, if it had one.
        state: :func:`_state_of` the two then.
    """

    weight: torch.Tensor
    form: PackedForm
    origin: torch.Tensor
    bias: torch.Tensor | None
    state: tuple[object, ...]


def held(references: Iterable[ReferenceType[Packed]]) -> list[Packed] | None:
    """What references are to, for as long as the list is there. None: another thread has let go of one."""
    packed = [reference() for reference in references]
    return None if None in packed else packed  # type: ignore[return-value]


class PackedLinear(nn.Linear):
    """A linear layer that has a packed weight beside its own. Layers become one by :func:`pack_linear_layers`.

    Computes as any other where gradients are wanted, under autocast, while it is compiled, traced, transformed or
    counted, and where its weight or bias has been written to or replaced since; but torch does not count what is
    written through ``weight.data`` or a numpy array of the same memory: pack again after that. Copies of the layer have
    no packed weight.
    """

    packed: Packed | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., N]`` from ``[..., K]``."""
        packed = self.__dict__.get("packed")  # who has kept this method may call it for a layer that is unpacked
        parameters = self._parameters  # self.weight takes as long as all that is asked below
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if (
            packed is None
            or weight is None  # it is computed from others
            or torch.is_grad_enabled()
            or not is_plain(input)
            or packed.state != _state_of(weight, bias)
            or input.dtype != weight.dtype
            or input.shape[-1:] != weight.shape[1:]
            or torch.is_autocast_enabled("cpu")
        ):
            return F.linear(input, self.weight, self.bias)
        return packed.form.product(input, packed.weight, weight, bias)

    def native_weight(self) -> Packed | None:
        """What the native product would read, for a kernel that computes more than this layer.

        None where the layer computes anything else: by another product, from a weight or bias that has changed, by a
        ``forward`` of its own, and where something hooks into it.
        """
        packed, parameters = self.packed, self._parameters
        weight = parameters.get("weight")
        if (
            packed is None
            or weight is None
            or not only_computes(self)
            or packed.form.name != NativeForm.name
            or packed.state != _state_of(weight, parameters.get("bias"))
        ):
            return None
        return packed

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "packed"}


@dataclass(frozen=True)
class Packing:
    """What came of packing a model.

    Args:
        num_bytes: Memory that the packed weights take; 0: nothing is packed.
        product: Whose they are packed for.
        because: Why nothing is.
    """

    num_bytes: int = 0
    product: str = ""
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
    num_bytes = sum(weight.nbytes for weight in weights)
    if not whatever_it_takes:
        memory = machine_memory()
        if memory is None:
            return Packing(because="the system does not say how much memory there is")
        if num_bytes > MEMORY_SHARE * memory:
            share = f"more than {MEMORY_SHARE:.0%} of this machine's {size(memory)}"
            return Packing(because=f"they would take {size(num_bytes)}, {share}")
    try:
        form = packed_form(dtype, weights)
    except OSError as error:
        return Packing(because=f"there is no memory for {size(num_bytes)} ({error.strerror})")
    if isinstance(form, str):
        return Packing(because=form)
    agree: dict[tuple[int, ...], bool] = {}
    for layer in layers:
        weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        try:
            packed = Packed(form.pack(weight), form, weight, bias, _state_of(layer.weight, layer.bias))
            if weight.shape not in agree:
                agree[weight.shape] = _agrees(packed, weight)
        except RuntimeError as error:
            unpack_linear_layers(model)
            complaint = str(error).splitlines()[0]
            return Packing(because=f"a weight {list(weight.shape)} cannot be packed for {form.name} ({complaint})")
        if not agree[weight.shape]:
            unpack_linear_layers(model)
            return Packing(because=f"the {form.name} product of a weight {list(weight.shape)} is not the plain one")
        layer.__class__ = PackedLinear
        layer.packed = packed
    return Packing(num_bytes, form.name)


def unpack_linear_layers(model: nn.Module) -> None:
    """Make the layers what they were."""
    for module in model.modules():
        if type(module) is PackedLinear:  # torch makes subclasses, for parametrizations
            module.__dict__.pop("packed", None)
            module.__class__ = nn.Linear


def _linear_layers(model: nn.Module) -> Iterator[nn.Linear]:
    """Plain ones; a class of its own may compute something else, or read its weight elsewhere."""
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        weight, bias = module.weight, module.bias
        # Tensors of other classes may have no memory that could be read: quantized, distributed, wrapped ones.
        if type(weight) is not nn.Parameter or not weight.numel() or not weight.is_contiguous():
            continue
        if bias is None or (type(bias) is nn.Parameter and bias.is_contiguous() and bias.dtype == weight.dtype):
            yield module


def _state_of(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[object, ...]:
    """Changes when one of the two is written to, or another takes its place."""
    if bias is not None:
        return *_state_of(weight, None), *_state_of(bias, None)
    version = None if weight.is_inference() else weight._version
    return weight.data_ptr(), version, weight.dtype, weight.shape, weight.stride()


@torch.inference_mode()
def _agrees(packed: Packed, weight: torch.Tensor) -> bool:
    """Whether the packed product is the plain one but for rounding, with fewer rows and with more than packed for."""
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 3, 17, 65, 257):
        rows = torch.randn(num_rows, weight.shape[1], generator=generator, device="cpu").to(weight.dtype)
        expected = F.linear(rows, weight).float()
        error = (packed.form.product(rows, packed.weight, weight, None).float() - expected).abs().max()
        # Not the other way round: of a weight that holds NaN, the error is NaN.
        if not error <= ERROR[weight.dtype] * torch.finfo(weight.dtype).eps * expected.abs().max():
            return False
    return True
