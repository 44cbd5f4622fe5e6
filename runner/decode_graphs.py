"""Decode steps replayed instead of launched: a step of each batch size recorded once, as a CUDA graph.

A decode step of a small model is hundreds of kernels that take the GPU less time than the CPU takes to launch them. A
graph launches them at once, but does the very same again: the same kernels, on the same addresses. So a step that is
replayed is padded to a size that was captured, and its inputs are written to where the captured one read them. Padded
rows write nowhere (slot -1) and read nothing (length 0).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from runner.batch import Batch, SequenceSlice
from runner.step_inputs import StepInputs

logger = logging.getLogger(__name__)

Replay = Callable[[], torch.Tensor]
"""Does again what was captured, and returns the same tensor with new contents."""


class Capture(Protocol):
    """Records work on the device."""

    def __call__(self, work: Callable[[], torch.Tensor]) -> Replay:
        """Record some work, after doing it once or more.

        Args:
            work: What to record. It reads tensors that stay where they are.

        Returns:
            What does it again.

        Raises:
            Exception: It cannot be recorded.
        """


class CudaCapture:
    """Records CUDA graphs. They share their memory: what one returns must be a tensor that was there before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], torch.Tensor]) -> Replay:
        """As :class:`Capture` says."""
        # Kernels are compiled, and libraries make their workspaces, in runs that are not recorded.
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            output = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


def capture_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes worth capturing: close together where steps are short, so that little is computed for padding.

    1, 2, 4, then every 8 up to 128, every 16 up to 256, every 32 beyond; and ``max_num_seqs`` itself.
    """
    sizes = [1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, max_num_seqs + 1, 32)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """The decode steps that have been captured.

    Args:
        inputs: Lays out the steps.
        forward: From a step to the logits of its tokens, ``[T, vocabulary]``, on the device.
        sizes: Batch sizes to capture.
        capture: What records them.

    Attributes:
        sizes: As given, the smallest first.

    Raises:
        Exception: A step cannot be captured.
    """

    def __init__(
        self, inputs: StepInputs, forward: Callable[[Batch], torch.Tensor], sizes: Sequence[int], capture: Capture
    ) -> None:
        self.sizes = sorted(sizes)
        self._inputs = inputs
        self._replays: dict[int, Replay] = {}
        start = time.perf_counter()
        # The largest first: the others find room in its memory.
        self._logits: torch.Tensor | None = None  # [largest size, vocabulary], of whatever step was last
        for size in reversed(self.sizes):
            batch = inputs.lay_out_padded([], size)
            self._replays[size] = capture(partial(self._step, forward, batch, size))
            logger.debug("captured decode steps of %d", size)
        logger.info("captured decode steps of %d sizes in %.1f s", len(self.sizes), time.perf_counter() - start)

    def _step(self, forward: Callable[[Batch], torch.Tensor], batch: Batch, size: int) -> torch.Tensor:
        """The work to capture."""
        logits = forward(batch)
        if self._logits is None:  # at the largest size, before anything is recorded
            self._logits = torch.empty_like(logits)
        return self._logits[:size].copy_(logits)

    def size_for(self, sequences: Sequence[SequenceSlice]) -> int | None:
        """The captured size that a step of these sequences is padded to; None: it has to be run as it is.

        O(sequences).
        """
        if len(sequences) > self.sizes[-1]:
            return None
        if not all(len(sequence.token_ids) == 1 and sequence.samples for sequence in sequences):
            return None
        return next(size for size in self.sizes if size >= len(sequences))

    def run(self, sequences: Sequence[SequenceSlice], size: int) -> torch.Tensor:
        """Replay the step of that size for these sequences.

        Returns:
            ``[B, vocabulary]``, the logits after each sequence's token; valid until the next step.
        """
        self._inputs.lay_out_padded(sequences, size)
        return self._replays[size]()[: len(sequences)]
