"""What stays in the cache although nobody runs with it: prefixes that are pinned, and those that are asked for soon."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from kvcore.blocks import KVCacheBlock
from kvcore.checks import check_hashes, check_protocol
from kvcore.coordinator import KVCacheCoordinator
from kvcore.errors import PinError
from kvcore.hashing import BlockHasher
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.request import Request, RequestLike


@dataclass(frozen=True, eq=False)
class Pin:
    """A prefix that is kept.

    Args:
        num_tokens: How much of it was in the cache when it was pinned, hence is kept.
        blocks: Where it is, for each KV cache group; null blocks where a window needs none.
    """

    num_tokens: int
    blocks: KVCacheBlocks


class Residency:
    """Keeps prefixes from being overwritten, for good or for a while.

    Args:
        coordinator: Finds prefixes.
        max_model_len: Longest sequence, in tokens.
        max_pinned_blocks: Most blocks that all pins together may hold.

    Attributes:
        counts: How many pins hold each block, by block id. Read only.
    """

    def __init__(self, coordinator: KVCacheCoordinator, max_model_len: int, max_pinned_blocks: int) -> None:
        self.max_pinned_blocks = max_pinned_blocks
        self.counts: Counter[int] = Counter()
        self._coordinator = coordinator
        self._max_model_len = max_model_len
        self._pins: dict[Pin, list[KVCacheBlock]] = {}

    def __repr__(self) -> str:
        return f"Residency(pins={len(self._pins)}, pinned_blocks={len(self.counts)} of {self.max_pinned_blocks})"

    def pin(self, prefix: RequestLike | Iterable[int], *, block_hasher: BlockHasher | None = None) -> Pin:
        """Keeps what the cache has of a prefix until :meth:`unpin`, as if a request ran with it.

        What is not in the cache is not kept, now or later: pin a system prompt once a first request has computed it,
        and look at ``num_tokens`` of the pin. While anything is pinned, ``reset_prefix_cache`` answers False. O(blocks
        of the prefix).

        Args:
            prefix: A request, which need not hold blocks, or token ids: a list, an array, a tensor, ...
            block_hasher: What the requests are hashed with, for token ids. The very one: with ``xxh3``, hashers that
                were given no seed have one of their own each.

        Raises:
            PinError: More than the pool's ``pin_limit``, or token ids without a hasher; nothing is pinned.
            ConfigError: The prefix is hashed at another block size than the manager's.
        """
        request = as_request(prefix, block_hasher)
        blocks, num_tokens = self._look_up(request, request.num_tokens)
        held = _held(blocks)
        num_pinned = len(self.counts) + sum(block.block_id not in self.counts for block in held)
        if num_pinned > self.max_pinned_blocks:
            raise PinError(
                f"with {num_tokens} tokens of {request.request_id!r}, {num_pinned} blocks would be pinned, and "
                f"{self.max_pinned_blocks} may be: unpin another prefix first, or make the manager with a larger "
                "pin_limit"
            )
        pin = Pin(num_tokens, blocks)
        self._coordinator.block_pool.hold(held)
        self._pins[pin] = held
        self.counts.update(block.block_id for block in held)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Lets a prefix go. It stays in the cache until its blocks are overwritten, its end first. O(blocks).

        Raises:
            PinError: It is not pinned here, or not any more.
        """
        held = self._pins.pop(pin, None)
        if held is None:
            raise PinError(f"a prefix of {pin.num_tokens} tokens is not pinned here: it was unpinned before")
        for block in held:
            self.counts[block.block_id] -= 1
            if not self.counts[block.block_id]:
                del self.counts[block.block_id]
        self._coordinator.block_pool.give_back(held)

    def expect(self, request: RequestLike) -> int:
        """Says that a request which waits will be admitted soon: what the cache has of it counts as used just now.

        For the head of a waiting queue, so that those who run do not evict what it is about to hit. No promise: under
        pressure it can still be evicted. To the eviction policy it is a hit: once a request is enough, and more would
        count for more where hits are counted. O(hit blocks).

        Returns:
            How many tokens the cache has of it.

        Raises:
            ConfigError: The request is hashed at another block size than the manager's.
        """
        blocks, num_tokens = self._look_up(request, request.num_tokens - 1)
        held = _held(blocks)
        self._coordinator.block_pool.hold(held)
        self._coordinator.block_pool.give_back(held)
        return num_tokens

    def _look_up(self, request: RequestLike, max_length: int) -> tuple[KVCacheBlocks, int]:
        check_protocol(request, events=False)
        check_hashes(request, self._coordinator.hash_block_size)
        groups, num_tokens = self._coordinator.find_longest_cache_hit(request, min(max_length, self._max_model_len))
        return KVCacheBlocks(tuple(map(tuple, groups))), num_tokens


def _held(blocks: KVCacheBlocks) -> list[KVCacheBlock]:
    return [block for group in blocks.blocks for block in group if not block.is_null]


def as_request(prefix: RequestLike | Iterable[int], block_hasher: BlockHasher | None) -> RequestLike:
    """A prefix as a request: itself, or one made of token ids.

    Raises:
        PinError: Token ids without a hasher.
    """
    if hasattr(prefix, "block_hashes"):
        return cast("RequestLike", prefix)
    if block_hasher is None:
        raise PinError("token ids are pinned by their hashes: pass the block_hasher that the requests are made with")
    return Request("pinned prefix", prefix, block_hasher=block_hasher)
