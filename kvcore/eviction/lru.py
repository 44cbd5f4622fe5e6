"""Least recently used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcore.blocks import FreeKVCacheBlockQueue, KVCacheBlock


class LRU:
    """Least recently released first; what cannot be hit goes before all. O(1) a block in every call."""

    def __init__(self) -> None:
        self.queue = FreeKVCacheBlockQueue(())
        # Bound once: the pool calls these on its hot path, and nothing is to be added on the way.
        self.reuse = self.queue.remove_n
        self.take = self.queue.popleft_n

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """Unhashed blocks to the head, hashed ones to the tail."""
        if unhashed:
            self.queue.prepend_n(unhashed)
        if hashed:
            self.queue.append_n(hashed)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self.queue)

    def __len__(self) -> int:
        return len(self.queue)
