"""One way to the device: all integers of a step side by side in one buffer, sent in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16
"""Bytes. What starts at a multiple of it can be read 16 bytes at a time, and kernels are compiled for that once."""

_DTYPES: dict[torch.dtype, npt.DTypeLike] = {torch.int32: np.int32, torch.int64: np.int64}


@dataclass(frozen=True)
class Section:
    """A piece of the buffer, on both sides.

    Args:
        host: To be written to, until the buffer is sent.
        device: The same numbers on the device, once the buffer has been sent; overwritten by the next sending.
    """

    host: npt.NDArray[Any]
    device: torch.Tensor


class StagingBuffer:
    """Pinned memory of the host and its twin on the device.

    Sections are laid out in the order they are asked for. The same sizes in the same order lie at the same addresses,
    which is what lets a captured graph read its inputs from here.

    Args:
        num_bytes: Of each.
        device: Where the twin is.
        separate: Whether the twin is memory of its own; else the two are one, and sending does nothing.
    """

    def __init__(self, num_bytes: int, device: torch.device | str, *, separate: bool = True) -> None:
        device = torch.device(device)
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._array = self._host.numpy()
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device) if separate else self._host
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self._end = 0

    def __len__(self) -> int:
        """Bytes it holds."""
        return self._host.numel()

    @property
    def room(self) -> int:
        """Bytes that are left for further sections."""
        return len(self) - self._end

    def begin(self) -> None:
        """Start anew. Waits for what was sent last to have left the host's side."""
        if self._sent is not None:
            self._sent.synchronize()
        self._end = 0

    def section(self, shape: Sequence[int], dtype: torch.dtype) -> Section:
        """The next piece.

        Args:
            shape: Of the numbers.
            dtype: int32 or int64.

        Raises:
            ValueError: The buffer is full: it was made too small.
        """
        num_bytes = section_bytes(shape, dtype)
        if num_bytes > self.room:
            raise ValueError(f"a section of {num_bytes:,} bytes does not fit: {self.room:,} of {len(self):,} are left")
        piece = slice(self._end, self._end + prod(shape) * dtype.itemsize)
        self._end += num_bytes
        host = self._array[piece].view(_DTYPES[dtype]).reshape(shape)
        return Section(host, self._device[piece].view(dtype).view(tuple(shape)))

    def send(self) -> None:
        """Copy what has been laid out since :meth:`begin`, without waiting for it."""
        if self._device is not self._host:
            self._device[: self._end].copy_(self._host[: self._end], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def section_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes that a section takes of a buffer."""
    return -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
