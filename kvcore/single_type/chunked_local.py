"""Chunked local attention: nothing before the start of the current chunk is needed (rule 9)."""

from __future__ import annotations

from kvcore.blocks import KVCacheBlock
from kvcore.request import RequestId, RequestLike
from kvcore.single_type.base import SingleTypeKVCacheManager
from kvcore.spec import ChunkedLocalAttentionSpec, KVCacheSpec, cdiv


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Block tables of a group whose tokens read back to the start of their own chunk."""

    def read_spec(self, kv_cache_spec: KVCacheSpec) -> None:
        """Takes the chunk size."""
        super().read_spec(kv_cache_spec)
        assert isinstance(kv_cache_spec, ChunkedLocalAttentionSpec)
        self.attention_chunk_size = kv_cache_spec.attention_chunk_size

    def find_longest_cache_hit(self, request: RequestLike, max_length: int) -> tuple[KVCacheBlock, ...]:
        """Null for the blocks of earlier chunks, then the run of cached blocks from the start of the chunk on.

        A chunk's start is always a hit: the token there reads nothing before it. O(blocks of a chunk), unless alignment
        pushes the end of the hit back into an earlier chunk.
        """
        length = min(max_length, len(request.block_hashes) * self.block_pool.hash_block_size)
        length -= length % self.alignment_tokens
        while True:
            # Decides for a hit that ends in the chunk of `length`; a shorter one, in an earlier chunk, is another case.
            chunk_start = self.get_num_skipped_tokens(length)
            first, stop = chunk_start // self.block_size, length // self.block_size
            blocks = self._lookup.cached(request, first, stop)
            hit_length = (first + len(blocks)) * self.block_size
            hit_length -= hit_length % self.alignment_tokens
            if hit_length >= chunk_start:
                del blocks[hit_length // self.block_size - first :]
                return self.block_pool.null_blocks(first) + tuple(blocks)
            length = hit_length

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens before the chunk of the next token."""
        return num_computed_tokens - num_computed_tokens % self.attention_chunk_size

    def next_skip_at(self, request_id: RequestId) -> int:
        """Start of the first chunk that lies behind the first block that is not null."""
        behind = (self.num_skipped_block[request_id] + 1) * self.block_size
        return cdiv(behind, self.attention_chunk_size) * self.attention_chunk_size
