"""Full attention: every block of the prefix is needed, so that the first miss ends a hit."""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.blocks import KVCacheBlock
from kvcore.request import RequestId, RequestLike
from kvcore.single_type.base import SingleTypeKVCacheManager


class FullAttentionManager(SingleTypeKVCacheManager):
    """Block tables of a group whose tokens read everything before them."""

    def find_longest_cache_hit(self, request: RequestLike, max_length: int) -> tuple[KVCacheBlock, ...]:
        """The run of cached blocks from the first one on. O(hit blocks)."""
        blocks = self._lookup.cached(request, 0, max_length // self.block_size)
        hit_length = len(blocks) * self.block_size
        if excess := hit_length % self.alignment_tokens:
            del blocks[(hit_length - excess) // self.block_size :]
        return tuple(blocks)

    def get_num_common_prefix_blocks(
        self, request_id: RequestId, num_running_requests: int, pinned: Mapping[int, int]
    ) -> int:
        """Leading blocks that all running requests hold. O(common blocks)."""
        common = 0
        for block in self.req_to_blocks[request_id]:
            if block.ref_cnt - pinned.get(block.block_id, 0) != num_running_requests:
                break
            common += 1
        return common
