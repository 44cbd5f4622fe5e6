"""A worker's prefix index as others see it: kept up to date by events, asked by routers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvcore.errors import ConfigError
from kvcore.events import (
    AllBlocksCleared,
    BlockStored,
    ExternalBlockHash,
    KVCacheEvent,
    KVEventBatch,
    integer_hash,
)
from kvcore.spec import ChunkedLocalAttentionSpec, SlidingWindowSpec, cdiv, require_positive


class Prompt(Protocol):
    """What is read of a prompt; a :class:`kvcore.Request` has it."""

    num_tokens: int
    """Its length."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The hash of each full hash block, made as the worker makes them: same algorithm, seed and hash block size."""


class IndexMirror:
    """What one worker could answer a lookup with, known from its events alone.

    Groups, their block sizes and their windows are learned from the events. A mirror that heard every event since the
    worker's start answers as the worker's own :meth:`kvcore.KVCacheManager.get_computed_blocks`. One that missed some
    must be cleared: then it knows what came after, and never promises what is gone.

    Hashes are trusted: where a worker compares tokens as well, and two prefixes have one hash, it may have less.

    Args:
        hash_block_size: Tokens per hash of the prompts; None: the greatest common divisor of the groups' block sizes.
        chunk_sizes: The attention chunk size in tokens of each group of chunked local attention. Events do not tell
            it; without it, such a group is taken for one of full attention, and the answers are too short.
        medium: Only blocks that are there count.
    """

    def __init__(
        self,
        *,
        hash_block_size: int | None = None,
        chunk_sizes: Mapping[int, int] | None = None,
        medium: str = "GPU",
    ) -> None:
        if hash_block_size is not None:
            require_positive(hash_block_size=hash_block_size)
        for group, size in (chunk_sizes or {}).items():
            require_positive(**{f"chunk_sizes[{group}]": size})
        self._hash_block_size = hash_block_size
        self._chunk_sizes = dict(chunk_sizes or {})
        self._medium = medium
        self._groups: dict[int, _Group] = {}
        self._integer_hashes = False

    def __repr__(self) -> str:
        return f"IndexMirror(groups={len(self._groups)}, prefixes={len(self)})"

    def __len__(self) -> int:
        """Distinct prefixes that can be hit, over all groups."""
        return sum(len(group.held) for group in self._groups.values())

    def apply(self, batch: KVEventBatch) -> None:
        """Takes the events of a batch in; every batch once, in the order of their numbers. O(hashes)."""
        for event in batch.events:
            self._apply(event)

    def clear(self) -> None:
        """Forgets all prefixes: events were missed, or the worker began anew. What is known of its groups stays."""
        for group in self._groups.values():
            group.held.clear()

    def longest_prefix(self, prompt: Prompt) -> int:
        """Tokens of a prompt that the worker holds, all but the last of them at most: that one is always computed.

        O(blocks) for full attention, and O(blocks of a window) more where the window of the end is cached too.

        Raises:
            ConfigError: The hash block size does not divide the block size of a group.
        """
        groups = self._groups.values()
        if not groups:
            return 0
        hash_size = self._hash_block_size or math.gcd(*[group.block_size for group in groups])
        alignment = math.lcm(*[group.block_size for group in groups])
        if any(group.block_size % hash_size for group in groups):
            raise ConfigError(
                f"hash_block_size {hash_size} does not divide the block sizes of the worker's groups: "
                f"{', '.join(str(group.block_size) for group in groups)}"
            )
        hashes: Sequence[ExternalBlockHash] = prompt.block_hashes
        if self._integer_hashes:
            hashes = [*map(integer_hash, hashes)]
        by_group = [
            (group, hashes[group.block_size // hash_size - 1 :: group.block_size // hash_size]) for group in groups
        ]
        length = min(prompt.num_tokens - 1, len(hashes) * hash_size)
        for group, own in by_group:
            if group.reads_all:
                length = min(length, group.num_held(own) * group.block_size)
        length -= length % alignment
        while length > 0 and not all(group.serves(own, length) for group, own in by_group if not group.reads_all):
            length -= alignment
        return max(length, 0)

    def _apply(self, event: KVCacheEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.clear()
        elif event.medium == self._medium:
            index = event.group_idx or 0
            if isinstance(event, BlockStored):
                group = self._groups.get(index)
                if group is None:
                    group = self._groups[index] = _Group(event, self._chunk_sizes.get(index))
                for block_hash in event.block_hashes:
                    # Several blocks may be registered under one hash, and each tells of itself.
                    group.held[block_hash] = group.held.get(block_hash, 0) + 1
                    self._integer_hashes = isinstance(block_hash, int)
            elif index in self._groups:
                self._groups[index].remove(event.block_hashes)


class _Group:
    """What a worker holds of one KV cache group.

    Args:
        event: Its first event, which says what kind it is.
        chunk_size: The attention chunk size, if it has one.
    """

    def __init__(self, event: BlockStored, chunk_size: int | None) -> None:
        self.block_size = event.block_size
        self.window = event.kv_cache_spec_sliding_window if event.kv_cache_spec_kind == SlidingWindowSpec.kind else None
        self.chunk_size = chunk_size if event.kv_cache_spec_kind == ChunkedLocalAttentionSpec.kind else None
        self.held: dict[ExternalBlockHash, int] = {}

    @property
    def reads_all(self) -> bool:
        """Whether a hit needs every block of the prefix."""
        return self.window is None and self.chunk_size is None

    def remove(self, block_hashes: Sequence[ExternalBlockHash]) -> None:
        for block_hash in block_hashes:
            times = self.held.pop(block_hash, 0)  # 0: it was stored before the mirror was cleared
            if times > 1:
                self.held[block_hash] = times - 1

    def num_held(self, hashes: Sequence[ExternalBlockHash]) -> int:
        """Leading blocks that are held."""
        return next((n for n, block_hash in enumerate(hashes) if block_hash not in self.held), len(hashes))

    def serves(self, hashes: Sequence[ExternalBlockHash], length: int) -> bool:
        """Whether all is held that the token after ``length`` tokens reads (rule 9)."""
        stop = length // self.block_size
        if self.window is not None:
            first = max(stop - cdiv(self.window - 1, self.block_size), 0)
        else:
            assert self.chunk_size is not None
            first = length // self.chunk_size * self.chunk_size // self.block_size
        return all(block_hash in self.held for block_hash in hashes[first:stop])
