"""Sliding window: only the last tokens are needed, so that a hit may begin anywhere, if it is long enough (rule 9)."""

from __future__ import annotations

from kvcore.blocks import KVCacheBlock
from kvcore.request import RequestId, RequestLike
from kvcore.single_type.base import SingleTypeKVCacheManager
from kvcore.spec import KVCacheSpec, SlidingWindowSpec, cdiv


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Block tables of a group whose tokens read themselves and the ``sliding_window - 1`` tokens before them."""

    def read_spec(self, kv_cache_spec: KVCacheSpec) -> None:
        """Takes the window."""
        super().read_spec(kv_cache_spec)
        assert isinstance(kv_cache_spec, SlidingWindowSpec)
        self.sliding_window = kv_cache_spec.sliding_window
        self._blocks_of_window = cdiv(self.sliding_window - 1, self.block_size)

    def find_longest_cache_hit(self, request: RequestLike, max_length: int) -> tuple[KVCacheBlock, ...]:
        """The rightmost run of cached blocks that covers a window, or a shorter one that begins at the first block.

        O(blocks / window) where nothing is cached, O(blocks of a window) where the end of the prefix is.
        """
        step = self.alignment_tokens // self.block_size
        end = (
            min(max_length, len(request.block_hashes) * self.block_pool.hash_block_size) // self.alignment_tokens * step
        )
        while end:
            begin = max(end - self._blocks_of_window, 0)
            # From the left: a miss there rules out the most candidates at once.
            run = self._lookup.cached(request, begin, end)
            if begin + len(run) == end:
                return self.block_pool.null_blocks(begin) + tuple(run)
            # Every run that ends after the miss contains it, down to the next aligned end.
            end = (begin + len(run)) // step * step
        return ()

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens before the window of the next token: all but the last ``sliding_window - 1`` computed ones."""
        return max(num_computed_tokens - self.sliding_window + 1, 0)

    def next_skip_at(self, request_id: RequestId) -> int:
        """When the window of the next token leaves the first block that is not null."""
        return (self.num_skipped_block[request_id] + 1) * self.block_size + self.sliding_window - 1

    def cacheable_mask(self, first_block: int, stop_block: int) -> list[bool] | None:
        """Where hits must end at multiples of several blocks, only blocks of a window before such an end can be hit."""
        step = self.alignment_tokens // self.block_size
        if self._blocks_of_window >= step:
            return None
        return [i % step >= step - self._blocks_of_window for i in range(first_block, stop_block)]
