"""Products of a few rows with a weight that is laid out for them, which :mod:`runner.packed_linear` chooses from.

In float32 there are two: one of this package (:mod:`runner.native`) and, where that cannot be compiled, MKL's; in
bfloat16 there is oneDNN's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

import torch
import torch.nn.functional as F

from runner.native.build import NativeUnavailableError
from runner.native.kernels import Kernels, native_kernels
from runner.native.memory import HugePages

MOST_NATIVE_ROWS = 256
"""From here on, torch's own product is as fast as the native one."""

TORCH_ROWS = 128
"""Rows that torch packs weights for. Products of any number are right, and few are slower than without.

MKL decides by it how its threads divide the work: packed for 2,048 rows, products of 16 take nearly twice as long.
"""


class PackedForm(Protocol):
    """A way to lay weights out, and to compute with them."""

    name: ClassVar[str]
    """Whose product it is."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight ``[N, K]``, contiguous, in a form that only :meth:`product` can read.

        It must never be copied to another address.

        Raises:
            RuntimeError: It cannot be packed on this CPU, or there is no memory left.
        """

    def product(
        self, input: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """``[..., N]`` from an input ``[..., K]``, a packed weight, the weight itself, and a bias ``[N]``."""


class NativeForm:
    """float32, by the kernel of this package.

    Args:
        kernels: Compiled for this CPU.
        weights: All that will be packed: they lie one behind the other.
    """

    name: ClassVar[str] = "native"

    def __init__(self, kernels: Kernels, weights: Sequence[torch.Tensor]) -> None:
        self._kernels = kernels
        self._memory = HugePages(sum(map(kernels.packed_size, weights)))

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """As the protocol says."""
        packed = self._memory.take(self._kernels.packed_size(weight))
        self._kernels.pack(weight, packed)
        return packed

    def product(
        self, input: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As the protocol says."""
        if input.numel() > MOST_NATIVE_ROWS * weight.shape[1]:
            return F.linear(input, weight, bias)
        return self._kernels.product(input, packed, weight, bias)


# The other two rest on operations with an underscore, made for torch's compiler, which may be gone in another version.


class MklForm:
    """float32, by MKL."""

    name: ClassVar[str] = "MKL"

    @staticmethod
    def is_available() -> bool:
        """Whether this torch can."""
        return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_reorder_linear_weight")

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """As the protocol says."""
        return torch.ops.mkl._mkl_reorder_linear_weight(weight, TORCH_ROWS)

    def product(
        self, input: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As the protocol says."""
        # Torch takes the packed weight where this number is that of the rows, and it is for the caller to say. MKL asks
        # for no such thing: a packed weight is good for any number.
        num_rows = input.numel() // weight.shape[1]
        return torch.ops.mkl._mkl_linear(input, packed, weight, bias, num_rows)


class OneDnnForm:
    """bfloat16, by oneDNN."""

    name: ClassVar[str] = "oneDNN"

    @staticmethod
    def is_available() -> bool:
        """Whether this torch can."""
        return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """As the protocol says."""
        return torch.ops.mkldnn._reorder_linear_weight(weight, TORCH_ROWS)

    def product(
        self, input: torch.Tensor, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As the protocol says."""
        return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


def packed_form(dtype: torch.dtype, weights: Sequence[torch.Tensor]) -> PackedForm | str:
    """The fastest form for weights of that type, or why there is none here.

    Args:
        dtype: Of the weights, and of what they are multiplied with.
        weights: All that will be packed.

    Raises:
        OSError: There is no memory for them.
    """
    if dtype == torch.float32:
        try:
            return NativeForm(native_kernels(), weights)
        except NativeUnavailableError as error:
            return MklForm() if MklForm.is_available() else f"this torch has no packed product of MKL, and {error}"
    if dtype == torch.bfloat16:
        if not OneDnnForm.is_available():
            return "this torch has no packed product of oneDNN"
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "oneDNN has no products in bfloat16 on this CPU"
        return OneDnnForm()
    return f"there is no packed form for {str(dtype).removeprefix('torch.')}"
