"""Memory for what a step reads from the first byte to the last."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch


class HugePages:
    """Memory in pages of megabytes, where Linux gives them, handed out piece by piece.

    A core looks up where each 4 KiB page lies, which takes much of the time where it reads on and on.

    Args:
        num_floats: Room for so many.

    Raises:
        OSError: There is not so much memory.
    """

    def __init__(self, num_floats: int) -> None:
        if num_floats and hasattr(mmap, "MADV_HUGEPAGE"):
            memory = mmap.mmap(-1, 4 * num_floats, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._floats = torch.frombuffer(memory, dtype=torch.float32)
        else:
            self._floats = torch.empty(num_floats, dtype=torch.float32, device="cpu")

    def take(self, num_floats: int) -> torch.Tensor:
        """The next ``num_floats``, in no order yet."""
        taken, self._floats = self._floats[:num_floats], self._floats[num_floats:]
        return taken
