"""Small models of a cache, to see how well it would do under other settings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple


class Setting(NamedTuple):
    """How much a hit counts for, and how easily a prefix counts as hit.

    Args:
        credit: How long a prefix that was hit outlives one that was not, in pools: how often as many blocks as the pool
            has are released meanwhile. 0 is plain LRU.
        lucky_share: Share of new prefixes that count as hit right away, from 0 to 1.
        ghost_share: Share of the prefixes that come back after they were overwritten that count as hit.
    """

    credit: float
    lucky_share: float = 0.0
    ghost_share: float = 1.0


class Shadow:
    """What would be in a cache under one setting, by hash: no blocks, and only a sample of the prefixes.

    No block of a prefix outlives those before it, so that each block can be looked at on its own: whether it is there
    is whether it would be hit. That is what makes a sample of single blocks as good as the whole (C. Waldspurger et
    al., "Efficient MRC construction with SHARDS", 2015).

    Args:
        setting: The setting.
        num_blocks: Size of the sample's share of the pool.
        num_ghosts: Overwritten prefixes to remember.
        credit: The setting's credit, in blocks that are released to the whole pool.

    Attributes:
        hits: Blocks found since the count was last set to 0.
    """

    def __init__(self, setting: Setting, *, num_blocks: int, num_ghosts: int, credit: float) -> None:
        self.setting = setting
        self.hits = 0
        self._num_blocks = num_blocks
        self._num_ghosts = num_ghosts
        self._credit = credit
        # When each was released last, the first to go in front.
        self._new: OrderedDict[bytes, int] = OrderedDict()
        self._hit: OrderedDict[bytes, int] = OrderedDict()
        self._ghosts: OrderedDict[bytes, None] = OrderedDict()

    def access(self, keys: Sequence[bytes], now: int, luck: float) -> None:
        """One request's prefix is used. O(keys), amortized.

        Args:
            keys: Its blocks, the last one first.
            now: Blocks released to the pool so far.
            luck: A random number of the request, from 0 to below 1.
        """
        new, hit, ghosts = self._new, self._hit, self._ghosts
        counts = luck < self.setting.lucky_share
        ghosts_count = luck < self.setting.ghost_share
        hits = 0
        first_hit = len(keys)
        for i, key in enumerate(keys):
            if new.pop(key, None) is not None or hit.pop(key, None) is not None:
                hits += 1
                counts = True
            elif key in ghosts:
                del ghosts[key]
                counts = counts or ghosts_count
            if counts and first_hit > i:
                first_hit = i
        self.hits += hits
        # The request holds its blocks while it runs: others have to go for them.
        for _ in range(min(len(new) + len(hit) + len(keys) - self._num_blocks, len(new) + len(hit))):
            if not hit or (new and next(iter(new.values())) <= next(iter(hit.values())) + self._credit):
                key, _ = new.popitem(last=False)
            else:
                key, _ = hit.popitem(last=False)
            ghosts[key] = None
        while len(ghosts) > self._num_ghosts:
            ghosts.popitem(last=False)
        for key in keys[:first_hit]:
            new[key] = now
        for key in keys[first_hit:]:
            hit[key] = now
