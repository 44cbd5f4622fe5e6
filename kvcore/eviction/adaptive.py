"""Recency, with a credit for what was hit, as large as the traffic rewards."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from zlib import crc32

from kvcore.blocks import KVCacheBlock
from kvcore.eviction.base import Segments
from kvcore.eviction.shadow import Setting, Shadow

NEW, HIT = 1, 2

SETTINGS = (Setting(0), Setting(0.5), Setting(2), Setting(64), Setting(64, lucky_share=1 / 32, ghost_share=1 / 4))
"""What an adaptive policy chooses from.

The first is plain LRU. With more and more credit, scans and prompts that come once pass by those that were hit. The
last holds on to whatever it happened to keep, which is all that can be done where everything comes back, but later than
a pool's length: loops, many equally busy users.
"""

GHOSTS = 4  # overwritten prefixes remembered, in pools
SAMPLE_BLOCKS = 512  # a shadow holds from this many blocks up to twice as many, if the pool has more
SETTINGS_A_POOL = 2  # choices between settings while as many blocks as the pool has are released
MEMORY = 0.975  # what a hit counts for at the next choice, and so on: some 20 pools back
LRU_LEAD = 0.03  # others have to beat LRU by this share of its hits and by their square root, which chance could be,
LEAD = 0.01  # and one another by this share: a change of setting costs
PATIENCE = 0.1  # hits that LRU may be ahead of the setting that rules before all starts anew, in pools


class Adaptive(Segments):
    """Scan-resistant, and LRU where that is better.

    Two queues, least recently released first: prefixes that were hit, and prefixes that were not. A prefix that comes
    back soon after it was overwritten counts as hit, too: a list of ghosts remembers those, 4 pools long. The next
    victim is the older of the two heads, where one that was hit counts as younger than it is by the credit. So that a
    block never outlives those before it in its prefix: they were released no earlier, and hit if it was.

    How large the credit should be depends on the traffic. Small shadows of the cache, one for each of
    :data:`SETTINGS`, are shown a sample of the prefixes and count their hits; the setting with the most hits in the
    recent past rules. Since LRU is among them, the policy does not stay behind it for long: as soon as another setting
    has cost a tenth of a pool in hits, LRU rules again, and the past is forgotten.

    O(1) a block in every call, amortized. Beside the pool it remembers up to 4 hashes for each block of it, and some
    thousands in the shadows.
    """

    def __init__(self) -> None:
        super().__init__(3)
        self.setting = SETTINGS[0]
        self._credit = 0.0
        self._released_at: list[int] = []
        self._was_hit: list[bool] = []
        self._now = 0  # hashed blocks released so far
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._shadows: list[Shadow] = []
        self._scores = [0.0] * len(SETTINGS)
        self._sample_one_in = 1
        self._behind_lru = 0  # hits, counted from the last time it was not
        self._choose_at = 0
        self._random = random.Random(0)

    def start(self) -> None:
        """Sizes the shadows."""
        num_blocks = self.num_blocks
        self._released_at = [0] * len(self.queue_of)
        self._was_hit = [False] * len(self.queue_of)
        one_in = self._sample_one_in = 1 << max(0, (num_blocks // SAMPLE_BLOCKS).bit_length() - 1)
        self._shadows = [
            Shadow(
                setting,
                num_blocks=max(1, num_blocks // one_in),
                num_ghosts=GHOSTS * num_blocks // one_in,
                credit=setting.credit * num_blocks,
            )
            for setting in SETTINGS
        ]
        self._choose_at = num_blocks // SETTINGS_A_POOL

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """Those hit, and those before them in their prefix, to one queue; the others to the other."""
        self.release_unhashed(unhashed)
        was_hit = self._was_hit
        for block in unhashed:
            was_hit[block.block_id] = False
        if not hashed:
            return
        ghosts = self._ghosts
        luck = self._random.random()
        counts = luck < self.setting.lucky_share
        ghosts_count = luck < self.setting.ghost_share
        now = self._now = self._now + len(hashed)
        keys = [_key(block) for block in hashed]
        first_hit = len(hashed)
        for i, block in enumerate(hashed):
            block_id = block.block_id
            if was_hit[block_id]:
                counts = True
            elif keys[i] in ghosts:
                del ghosts[keys[i]]
                counts = counts or ghosts_count
            self._released_at[block_id] = now
            if counts:
                was_hit[block_id] = True
                first_hit = min(first_hit, i)
        self.append(hashed[:first_hit], NEW)
        self.append(hashed[first_hit:], HIT)
        self._watch(keys, luck)

    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Notes that they were hit."""
        super().reuse(blocks)
        for block in blocks:
            self._was_hit[block.block_id] = True

    def take(self, n: int) -> list[KVCacheBlock]:
        """What cannot be hit, then the older of the two heads, credit counted."""
        taken = self.take_unhashed(n)
        victims = [*islice(self._hashed(), n - len(taken))]
        ghosts = self._ghosts
        for block in victims:
            self._was_hit[block.block_id] = False
            if block.prefix_hash is not None:
                key = _key(block)
                ghosts.pop(key, None)
                ghosts[key] = None
        while len(ghosts) > GHOSTS * self.num_blocks:
            ghosts.popitem(last=False)
        super().reuse(victims)
        return taken + victims

    def __iter__(self) -> Iterator[KVCacheBlock]:
        yield from self.queues[0]
        yield from self._hashed()

    def _hashed(self) -> Iterator[KVCacheBlock]:
        """The hashed blocks, in the order they would be taken."""
        released_at, credit = self._released_at, self._credit
        new, hit = iter(self.queues[NEW]), iter(self.queues[HIT])
        next_new, next_hit = next(new, None), next(hit, None)
        while next_new is not None and next_hit is not None:
            if released_at[next_new.block_id] <= released_at[next_hit.block_id] + credit:
                yield next_new
                next_new = next(new, None)
            else:
                yield next_hit
                next_hit = next(hit, None)
        if next_new is not None:
            yield next_new
            yield from new
        if next_hit is not None:
            yield next_hit
            yield from hit

    def _watch(self, keys: list[bytes], luck: float) -> None:
        """Shows the shadows a request's prefix, and chooses anew between the settings now and then."""
        one_in = self._sample_one_in
        if one_in > 1:
            keys = [key for key in keys if not crc32(key) % one_in]
        for shadow in self._shadows:
            shadow.access(keys, self._now, luck)
        if self._now < self._choose_at:
            return
        self._choose_at = self._now + max(1, self.num_blocks // SETTINGS_A_POOL)
        self._choose([shadow.hits for shadow in self._shadows])
        for shadow in self._shadows:
            shadow.hits = 0

    def _choose(self, hits: Sequence[int]) -> None:
        """Finds the best setting, given how many hits each had since the last choice."""
        current = SETTINGS.index(self.setting)
        self._scores = [score * MEMORY + new for score, new in zip(self._scores, hits, strict=True)]
        self._behind_lru = max(0, self._behind_lru + hits[0] - hits[current])
        if self._behind_lru > PATIENCE * self.num_blocks / self._sample_one_in:
            # The traffic has changed: what the past says of other settings is no longer true.
            self._scores = [0.0] * len(SETTINGS)
            self._behind_lru = 0
        scores = self._scores.copy()
        scores[current] *= 1 + LEAD
        scores[0] += LRU_LEAD * scores[0] + math.sqrt(scores[0])
        best = scores.index(max(scores))
        if best != current:
            self._behind_lru = 0
        self.setting = SETTINGS[best]
        self._credit = self.setting.credit * self.num_blocks


def _key(block: KVCacheBlock) -> bytes:
    """The block's key in the index, made only where there are several groups."""
    assert block.prefix_hash is not None
    return block.prefix_hash if not block.group_id else block.prefix_hash + block.group_id.to_bytes(4, "big")
