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
NOT_HIT, WAS_HIT, JUST_HIT = 0, 1, 2

SETTINGS = (Setting(0), Setting(0.5), Setting(2), Setting(64), Setting(64, lucky_share=1 / 32, ghost_share=1 / 4))
"""What an adaptive policy chooses from.

The first is plain LRU. With more and more credit, scans and prompts that come once pass by those that were hit. The
last holds on to whatever it happened to keep, which is all that can be done where everything comes back, but later than
a pool's length: loops, many equally busy users.
"""

GHOSTS = 4  # overwritten prefixes remembered, in pools
SAMPLE_BLOCKS = 512  # a shadow holds from this many blocks up to twice as many, if the pool has more
CHOICES_A_POOL = 8  # choices between settings while as many blocks as the pool has are released
MEMORY = 0.975 ** (2 / CHOICES_A_POOL)  # what a hit counts for at the next choice, and so on: some 20 pools back

# What it takes to leave LRU: hits that LRU missed meanwhile, in pools and as a share of its own, and how sure that is,
# in standard deviations. A change of setting costs up to a good part of a pool in hits, so that less is not worth it.
LEAD_IN_POOLS = 0.1
LEAD_OVER_LRU = 0.03
CONFIDENCE = 1.5
PRICE_OF_LAST = 2.0  # how much more it takes for the last setting, which shows what it is worth only after a while
PROVEN = 0.1  # hits, in pools, that a setting has to have gained before the next bolder one is tried
LEAD = 0.01  # what it takes to leave another setting, as a share of hits
# What it takes to come back to LRU: hits given away, in pools and at least so many of the sample, beside a share of
# what the setting had gained before.
PATIENCE = 0.02
LEAST_PATIENCE = 8
GIVE_BACK = 0.25
CAUTION = 2.0  # How much more it takes to leave LRU after each time that happened,
CALM = 0.5 ** (1 / (100 * CHOICES_A_POOL))  # which wears off: by half in 100 pools.
# And how much more it takes at first, when a night's batch is half of all that was ever seen,
INEXPERIENCE = 5.0
LEARNING = 0.5 ** (1 / (8 * CHOICES_A_POOL))  # by half less every 8 pools.


class Adaptive(Segments):
    """Scan-resistant, and LRU where that is better.

    Two queues, least recently released first: prefixes that were hit, and prefixes that were not. A prefix that comes
    back soon after it was overwritten counts as hit, too: a list of ghosts remembers those, 4 pools long. The next
    victim is the older of the two heads, where one that was hit counts as younger than it is by the credit. So that a
    block never outlives those before it in its prefix: they were released no earlier, and hit if it was.

    How large the credit should be depends on the traffic. Small shadows of the cache, one for each of
    ``SETTINGS``, are shown a sample of the prefixes and count their hits. LRU rules until another setting would
    have found so many more that chance does not explain it and that a change is worth its price; a bolder setting
    follows only once the pool has gained by the first. From then on it is not the shadow that counts but what the pool
    itself finds: when that falls behind the shadow of LRU by a fiftieth of a pool, LRU rules again, the past is
    forgotten, and the next setting has to bring twice as much. At first it takes even more than that to leave LRU: what
    a few pools have shown may not be how things go on. So the policy does not stay behind LRU for long, nor often.

    O(1) a block in every call, amortized. Beside the pool it remembers up to 4 hashes for each block of it, and some
    thousands in the shadows.
    """

    def __init__(self) -> None:
        super().__init__(3)
        self.setting = SETTINGS[0]
        self._marks = SETTINGS[-2]  # the setting that says which prefixes count as hit: while LRU rules, the next best
        self._credit = 0.0
        self._released_at: list[int] = []
        self._was_hit: list[int] = []  # NOT_HIT, WAS_HIT, JUST_HIT
        self._now = 0  # hashed blocks released so far
        self._num_found = 0  # blocks of the sample that were hit, since the last choice
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()
        self._shadows: list[Shadow] = []
        self._sample_one_in = 1
        self._choose_at = 0
        self._random = random.Random(0)
        self._caution = 1.0  # at least 1
        self._inexperience = INEXPERIENCE  # at least 1
        self._forget()

    def _forget(self) -> None:
        self._lru_hits = 0.0
        # For each setting, its hits beyond those of LRU, and the sum of their squares.
        self._gains = [0.0] * len(SETTINGS)
        self._squares = [0.0] * len(SETTINGS)
        # What the pool found beyond the shadow of LRU since the setting rules, and the most that this ever was.
        self._gained = self._most_gained = 0

    def start(self) -> None:
        """Sizes the shadows."""
        num_blocks = self.num_blocks
        self._released_at = [0] * len(self.queue_of)
        self._was_hit = [NOT_HIT] * len(self.queue_of)
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
        self._choose_at = num_blocks // CHOICES_A_POOL

    def release(self, unhashed: Sequence[KVCacheBlock], hashed: Sequence[KVCacheBlock]) -> None:
        """Those hit, and those before them in their prefix, to one queue; the others to the other."""
        self.release_unhashed(unhashed)
        was_hit = self._was_hit
        for block in unhashed:
            was_hit[block.block_id] = NOT_HIT
        if not hashed:
            return
        ghosts = self._ghosts
        luck = self._random.random()
        counts = luck < self._marks.lucky_share
        ghosts_count = luck < self._marks.ghost_share
        now = self._now = self._now + len(hashed)
        keys = [_key(block) for block in hashed]
        first_hit = len(hashed)
        for i, block in enumerate(hashed):
            block_id = block.block_id
            if hit := was_hit[block_id]:
                counts = True
                if hit == JUST_HIT and not crc32(keys[i]) % self._sample_one_in:
                    self._num_found += 1
            elif keys[i] in ghosts:
                del ghosts[keys[i]]
                counts = counts or ghosts_count
            self._released_at[block_id] = now
            if counts:
                was_hit[block_id] = WAS_HIT
                first_hit = min(first_hit, i)
        self.append(hashed[:first_hit], NEW)
        self.append(hashed[first_hit:], HIT)
        self._watch(keys, luck)

    def reuse(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Notes that they were hit."""
        super().reuse(blocks)
        for block in blocks:
            self._was_hit[block.block_id] = JUST_HIT

    def take(self, n: int) -> list[KVCacheBlock]:
        """What cannot be hit, then the older of the two heads, credit counted."""
        taken = self.take_unhashed(n)
        victims = [*islice(self._hashed(), n - len(taken))]
        ghosts = self._ghosts
        for block in victims:
            self._was_hit[block.block_id] = NOT_HIT
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
        self._choose_at = self._now + max(1, self.num_blocks // CHOICES_A_POOL)
        self._choose([shadow.hits for shadow in self._shadows])
        self._num_found = 0
        for shadow in self._shadows:
            shadow.hits = 0

    def _choose(self, hits: Sequence[int]) -> None:
        """Finds the best setting, given how many hits each shadow had since the last choice."""
        self._lru_hits = self._lru_hits * MEMORY + hits[0]
        for i, found in enumerate(hits):
            gain = found - hits[0]
            self._gains[i] = self._gains[i] * MEMORY + gain
            self._squares[i] = self._squares[i] * MEMORY**2 + gain * gain
        self._caution = max(1.0, self._caution * CALM)
        self._inexperience = max(1.0, self._inexperience * LEARNING)
        current = SETTINGS.index(self.setting)
        best = self._best_setting(current, hits[0])
        if best != current:
            self._gained = self._most_gained = 0
        self.setting = SETTINGS[best]
        # The pool is made ready for the next setting: which blocks were marked when is what it starts from.
        self._marks = SETTINGS[best or max(range(1, len(SETTINGS)), key=self._gains.__getitem__)]
        self._credit = self.setting.credit * self.num_blocks

    def _best_setting(self, current: int, lru_hits: int) -> int:
        """Which setting is to rule, where ``current`` does and the shadow of LRU had ``lru_hits`` new hits."""
        gains = self._gains
        best = gains.index(max(gains))
        pool = self.num_blocks / self._sample_one_in
        if not current:
            by_gain = sorted(range(1, len(SETTINGS)), key=gains.__getitem__, reverse=True)
            return next((i for i in by_gain if gains[i] > self._price(i, pool)), 0)
        self._gained += self._num_found - lru_hits
        self._most_gained = max(self._most_gained, self._gained)
        patience = max(LEAST_PATIENCE, PATIENCE * pool) + GIVE_BACK * self._most_gained
        if self._most_gained - self._gained > patience:
            self._forget()
            self._caution *= CAUTION
            return 0
        if gains[current] <= 0:
            return 0
        if best > current and self._gained < PROVEN * pool:
            return current
        return best if gains[best] > gains[current] + LEAD * (self._lru_hits + gains[current]) else current

    def _price(self, setting: int, pool: float) -> float:
        """Hits that a setting has to be ahead of LRU by, to be tried in its place."""
        caution = self._caution * self._inexperience
        lead = max(LEAD_IN_POOLS * pool * caution, LEAD_OVER_LRU * self._lru_hits)
        lead = max(lead, CONFIDENCE * math.sqrt(self._squares[setting] * caution))
        return lead * (PRICE_OF_LAST if setting == len(SETTINGS) - 1 else 1)


def _key(block: KVCacheBlock) -> bytes:
    """The block's key in the index, made only where there are several groups."""
    assert block.prefix_hash is not None
    return block.prefix_hash if not block.group_id else block.prefix_hash + block.group_id.to_bytes(4, "big")
