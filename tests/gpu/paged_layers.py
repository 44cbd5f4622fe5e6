"""Layers' caches full of random numbers and a step over them, for timing a backend as the engine calls it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from kvcore.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, SlidingWindowSpec, cdiv
from runner.attention.base import AttentionBackend, AttentionLayer, visible_from
from runner.batch import GroupBatch, SequenceSlice
from runner.step_inputs import StepInputs, make_batch
from tests.runner.paged_reference import blocks_of


def attention_spec(
    *, page: int, num_kv_heads: int, head_size: int, window: int | None = None, dtype: str = "bfloat16"
) -> KVCacheSpec:
    """Of a layer with a window of so many tokens, or of full attention."""
    if window is None:
        return FullAttentionSpec(page, num_kv_heads, head_size, dtype)
    return SlidingWindowSpec(page, num_kv_heads, head_size, dtype, window)


class PagedLayers:
    """A step of equal sequences through several layers of one group.

    Each layer has a cache of its own, and together they are larger than any L2 cache: what a layer reads is not there
    from the time before. Pages lie in no order. Blocks that a window has left are null, as in the books.

    Args:
        backend: What computes.
        spec: Of the layers.
        lengths: Each sequence's tokens in the cache, and those of the step.
        num_query_heads: Hq.
        num_layers: Caches.
        device: Where.

    Raises:
        UnsupportedModelError: The backend refuses such layers.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        spec: KVCacheSpec,
        lengths: Sequence[tuple[int, int]],
        *,
        num_query_heads: int,
        num_layers: int,
        device: str,
    ) -> None:
        self.backend, self.spec, self.lengths = backend, spec, lengths
        self.dtype = getattr(torch, spec.dtype)
        layer = AttentionLayer("layer", spec, num_query_heads)
        backend.check([layer], device=torch.device(device), dtype=self.dtype)
        num_blocks = 1 + sum(cdiv(past + new, spec.block_size) for past, new in lengths)
        free = list(range(1, num_blocks))
        random.Random(0).shuffle(free)
        self._sequences = []
        for past, new in lengths:
            table = [free.pop() for _ in range(cdiv(past + new, spec.block_size))]
            left = visible_from(spec, past) // spec.block_size
            table[:left] = [0] * left
            name = f"sequence-{len(self._sequences)}"
            self._sequences.append(SequenceSlice(name, [7] * new, past, blocks_of(table), samples=True))
        self._config = KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layer"], spec)])
        self._device = device
        num_tokens = sum(new for _, new in lengths)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=self.dtype, device=device)

        # The views that models give: queries and keys come out of the rotary embedding head by head, values do not.
        self.query = noise(num_query_heads, num_tokens, spec.head_size).transpose(0, 1)  # [T, Hq, D]
        self.key = noise(spec.num_kv_heads, num_tokens, spec.head_size).transpose(0, 1)  # [T, Hkv, D]
        self.value = noise(num_tokens, spec.num_kv_heads, spec.head_size)  # [T, Hkv, D]
        page = (2, spec.block_size, spec.num_kv_heads, spec.head_size)
        self.caches = [noise(num_blocks, *page) for _ in range(num_layers)]
        self._batch = make_batch(self._sequences, self._config, device)

    @property
    def bytes_to_read(self) -> int:
        """Of keys and values, in one layer: what the step's queries read, each once for a sequence."""
        seen = sum(past + new - visible_from(self.spec, past) for past, new in self.lengths)
        return seen * 2 * self.spec.num_kv_heads * self.spec.head_size * self.dtype.itemsize

    @property
    def flops(self) -> int:
        """Of one layer: two products for each pair of a query and a key that it reads."""
        pairs = 0
        for past, new in self.lengths:
            pairs += sum(position + 1 - visible_from(self.spec, position) for position in range(past, past + new))
        return 4 * pairs * self.query.shape[1] * self.spec.head_size

    def run(self) -> torch.Tensor:
        """The step through all layers, launched one by one; ``[T, Hq, D]``, what the last layer gives."""
        # A new group each time: what it computes once, such as its block table, belongs to the step.
        return self._attend(replace(self._batch.groups[0]))

    def prepare_captured(self) -> None:
        """Lay the step out as the engine does for a captured one; for :meth:`run_captured`. Decodes only."""
        size = len(self.lengths)
        self._inputs = StepInputs(
            self._config,
            max_num_batched_tokens=size,
            max_num_seqs=size,
            max_model_len=max(past + new for past, new in self.lengths),
            device=self._device,
        )
        self._captured_group = self._inputs.lay_out_padded(self._sequences, size).groups[0]

    def run_captured(self) -> torch.Tensor:
        """As :meth:`run`, from the inputs of a captured step, in which all lengths are upper bounds."""
        return self._attend(replace(self._captured_group))

    def _attend(self, group: GroupBatch) -> torch.Tensor:
        plan = self.backend.plan(group)
        for cache in self.caches:
            output = self.backend.forward(
                self.query, self.key, self.value, cache, plan, scale=self.spec.head_size**-0.5
            )
        return output
