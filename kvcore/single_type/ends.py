"""Which blocks of a window are worth keeping: those at which a later prompt can join in.

With a window, a hit needs the last blocks before its end and nothing else. Most blocks of a long prompt stand before no
end that anyone will ask for; kept like the others, they push out those that do, until no group has what the others
still have. So blocks that no known end needs are overwritten first. Known ends of a request are:

- where it was hit itself: others may begin as it did,
- where full attention could have gone on but the windows were gone: two prompts part there,
- the end of its prompt: the same question may be asked again,
- its own end: a conversation goes on there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcore.blocks import KVCacheBlock
from kvcore.request import RequestId


class Ends:
    """The known ends of the requests that hold blocks in one KV cache group.

    Args:
        block_size: Tokens per block of the group.
        alignment_tokens: Every hit length is a multiple of this.
        num_skipped_tokens: Leading tokens that no token from a given one on reads.
    """

    def __init__(self, block_size: int, alignment_tokens: int, num_skipped_tokens: Callable[[int], int]) -> None:
        self._block_size = block_size
        self._alignment_tokens = alignment_tokens
        self._num_skipped_tokens = num_skipped_tokens
        self._needed: dict[RequestId, list[range]] = {}

    def note(self, request_id: RequestId, num_tokens: int) -> None:
        """A prompt may join in after ``num_tokens`` tokens, or ask for just these: a hit then ends before the last."""
        before_last = max(num_tokens - 1, 0) // self._alignment_tokens * self._alignment_tokens
        first = self._num_skipped_tokens(before_last) // self._block_size
        self._needed.setdefault(request_id, []).append(range(first, num_tokens // self._block_size))

    def split(
        self, request_id: RequestId, first_block: int, blocks: Sequence[KVCacheBlock]
    ) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        """Blocks that no end needs, and the others, each in order; ``first_block`` is the first one's position."""
        spent: list[KVCacheBlock] = []
        needed: list[KVCacheBlock] = []
        ranges = self._needed.get(request_id, ())
        for position, block in enumerate(blocks, first_block):
            (needed if any(position in some for some in ranges) else spent).append(block)
        return spent, needed

    def forget(self, request_id: RequestId) -> None:
        """The request holds no blocks any more."""
        self._needed.pop(request_id, None)
