"""What an eviction policy is, and what most of them are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from kvcore.blocks import KVCacheBlock
from kvcore.free_block_queue import FreeKVCacheBlockQueue


@runtime_checkable
class EvictionPolicy(Protocol):
    """Keeps the blocks that nobody holds, and says in which order they are overwritten.

    A policy serves one pool. The pool's first call is ``release(blocks, ())`` with every block that it will ever hand
    out; the policy learns the size of the pool from it. From then on a block is either with the policy or with the
    requests that hold it. Block ids count up from 1 without gaps, so that a list can keep what a policy notes of each.

    Two things to know about a block that comes back with ``release``. Its ``prefix_hash`` names the whole prefix that
    ends with it: a prefix that was overwritten and is computed again has the same hash, which is how a policy can
    remember what it gave away. And a block that is with the policy may lose its hash, when it is evicted by id or the
    cache is reset: it is reused then, and released again with the unhashed ones.

    No call may raise: it comes in the middle of a change of the books. Every call is O(1) a block, amortized.
    :func:`kvcore.testing_eviction.check_eviction_policy` tests all of this but the first.

    A policy may have two things more. ``serve(request, tables)`` is called before the blocks of a request come back:
    ``tables`` are its block tables, one for each group, the blocks that other requests still hold and null blocks
    included. ``queue`` is what :attr:`kvcore.block_pool.BlockPool.free_block_queue` shows, for a policy that keeps all
    blocks in one :class:`FreeKVCacheBlockQueue`.
    """

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """Takes blocks in that their last holder let go of, each list with the one to overwrite first in front.

        ``unhashed`` blocks are in no index and cannot be hit again, so that they go before every hashed one (rule 4),
        the newest first. With them come registered blocks that are not worth keeping
        (:mod:`kvcore.single_type.ends`): those can still be hit. ``hashed`` blocks of one prefix come with the end of
        the prefix in front: a block cannot be hit without those before it in its prefix, so that it should not outlast
        them.
        """

    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Lets blocks go that were hit while free."""

    def take(self, n: int) -> list[KVCacheBlock]:
        """Gives away ``n`` blocks to be overwritten; at least that many are free.

        They still have their hashes. What the pool did before with the same calls decides the answer, nothing else: no
        clock, and no random numbers but those of a generator with a fixed seed.
        """

    def __iter__(self) -> Iterator[KVCacheBlock]:
        """The free blocks in the order they would be taken if nothing came in between. Changes nothing."""

    def __len__(self) -> int:
        """How many are free. O(1)."""


class FreeBlocks:
    """The free blocks of a policy, for reading: what a pool shows where there is no single queue to show."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy

    @property
    def num_free_blocks(self) -> int:
        """How many are free."""
        return len(self._policy)

    def __len__(self) -> int:
        return len(self._policy)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        return iter(self._policy)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Every free block, in the order they would be overwritten. O(pool); for tests and inspection."""
        return list(self._policy)


class Segments:
    """Several queues that share the blocks of a pool: the ground of policies that sort blocks into kinds.

    Queue 0 is for the blocks that cannot be hit: they go first.

    Args:
        num_queues: How many, queue 0 included.

    Attributes:
        queues: The queues; new ones may be appended.
        queue_of: For each block id, the queue that the block is in, or was in last.
        num_blocks: Blocks of the pool, from the first release on.
    """

    def __init__(self, num_queues: int) -> None:
        self.queues = [FreeKVCacheBlockQueue(()) for _ in range(num_queues)]
        self.queue_of: list[int] = []
        self.num_blocks = 0

    def release_unhashed(self, blocks: Sequence[KVCacheBlock]) -> None:
        """To the front of queue 0. The first call learns the size of the pool. O(blocks)."""
        if not self.num_blocks:
            self.num_blocks = len(blocks)
            self.queue_of = [0] * (max((block.block_id for block in blocks), default=0) + 1)
            self.start()
        queue_of = self.queue_of
        for block in blocks:
            queue_of[block.block_id] = 0
        self.queues[0].prepend_n(blocks)

    def start(self) -> None:
        """For a subclass: the size of the pool is known now."""

    def append(self, blocks: Sequence[KVCacheBlock], queue: int) -> None:
        """To the end of a queue. O(blocks)."""
        queue_of = self.queue_of
        for block in blocks:
            queue_of[block.block_id] = queue
        self.queues[queue].append_n(blocks)

    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Lets blocks go that were hit while free. O(blocks)."""
        queue_of, queues = self.queue_of, self.queues
        first = 0
        # A chain lies in few queues, in runs: one call a run.
        for stop in range(1, len(blocks) + 1):
            queue = queue_of[blocks[first].block_id]
            if stop == len(blocks) or queue_of[blocks[stop].block_id] != queue:
                queues[queue].remove_n(blocks[first:stop])
                first = stop

    def take_unhashed(self, n: int) -> list[KVCacheBlock]:
        """The first ``n`` of queue 0, or all that are there. O(n)."""
        queue = self.queues[0]
        return queue.popleft_n(min(n, len(queue)))

    def __len__(self) -> int:
        return sum([queue.num_free_blocks for queue in self.queues])
