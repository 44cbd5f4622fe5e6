"""The events of a pool, from what happened to blocks until somebody takes them."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvcore.extra_keys import untagged
from kvcore.request import EventRequest


class EventLog:
    """Keeps events, oldest first."""

    def __init__(self) -> None:
        self._events: list[KVCacheEvent] = []

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call. O(1)."""
        events, self._events = self._events, []
        return events

    def add_stored(
        self, request: EventRequest, stored: Sequence[int], blocks: range, scale: int, block_size: int, group_id: int
    ) -> None:
        """Those of a group's ``blocks`` of a request that are in the index now, ``stored``. O(their tokens).

        Args:
            request: Whose blocks they are.
            stored: Their positions in its table.
            blocks: The positions of all blocks that were to be registered.
            scale: Hash blocks a block.
            block_size: Tokens per block.
            group_id: The group.
        """
        extra_keys = request.extra_keys
        keys = extra_keys.of_blocks(blocks.start, blocks.stop, block_size)
        hashes = request.block_hashes
        token_ids = request.token_ids[blocks.start * block_size : blocks.stop * block_size]
        self._events.append(
            BlockStored(
                block_hashes=[hashes[(i + 1) * scale - 1] for i in stored],
                parent_block_hash=hashes[blocks.start * scale - 1] if blocks.start else None,
                token_ids=[int(token) for token in token_ids],
                block_size=block_size,
                lora_name=extra_keys.lora.name if extra_keys.lora else None,
                extra_keys=[untagged(keys[i]) if i in keys else None for i in stored] or None,
                group_idx=group_id,
            )
        )

    def add_removed(self, hashes: Sequence[bytes], group_id: int) -> None:
        """Blocks of a group that left the index, each an event of its own."""
        self._events += [BlockRemoved([prefix_hash], group_idx=group_id) for prefix_hash in hashes]

    def add_cleared(self) -> None:
        """Every block left the index."""
        self._events.append(AllBlocksCleared())
