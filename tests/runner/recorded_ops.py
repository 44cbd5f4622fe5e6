"""CUDA graphs without CUDA: every operation of a run is recorded, and done again on the very same tensors.

As with a graph, nothing of Python runs again, results land where they landed the first time, and work that looks at a
value of a tensor is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS_A_VALUE = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)


class RecordingMode(TorchDispatchMode):
    """Takes down each operation with its arguments and its results."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS_A_VALUE:
            raise RuntimeError("a value was read while recording")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, result))
        return result


class RecordedOps:
    """A :class:`~runner.decode_graphs.Capture` for tests."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        work()
        with RecordingMode() as mode:
            output = work()

        @torch.inference_mode()
        def replay() -> torch.Tensor:
            self.num_replays += 1
            for func, args, kwargs, result in mode.operations:
                again = func(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old is not new and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
            return output

        return replay
