"""A request as the books see it: its tokens, the hashes of its full blocks, how much of it is computed."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol, TypeAlias

from kvcore.contents import PrefixContents
from kvcore.errors import CountError
from kvcore.extra_keys import ExtraKeys, LoRAAdapter, MultiModalItem
from kvcore.hashing import MAX_TOKEN_ID, BlockHasher, pack_tokens

RequestId: TypeAlias = Hashable
"""What the manager knows a request by: a string, as a rule; whatever can be the key of a dictionary will do."""


class RequestLike(Protocol):
    """What the manager reads of a request. Any object that has these works.

    The manager knows a request by its id and expects the same object from admission until ``free``.
    """

    @property
    def request_id(self) -> RequestId:
        """Unique among the requests that hold blocks."""

    num_tokens: int
    """Tokens known so far: prompt and output."""

    num_computed_tokens: int
    """Tokens whose keys and values are in the cache. The engine sets it after each step, and to 0 when it preempts."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Hash of each full hash block of the tokens (``BlockHasher.hash_tokens``), growing with them."""

    @property
    def block_contents(self) -> PrefixContents | None:
        """What the hashes stand for, None if they are to be trusted alone."""


def takes_part_in_caching(request: RequestLike) -> bool:
    """Whether blocks of a request are ever looked up or registered: not if it says that nobody hashes it."""
    return getattr(request, "block_hasher", True) is not None


class EventRequest(RequestLike, Protocol):
    """What is read besides when KV events are on."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and output tokens."""

    @property
    def extra_keys(self) -> ExtraKeys:
        """Adapter, multi-modal items and salt."""


class Request:
    """A prompt and what was generated after it.

    Args:
        request_id: Unique among the requests that hold blocks.
        prompt_token_ids: At least one token; a list, an array, a tensor, ...
        block_hasher: Hashes its full blocks as they fill; None: this request takes no part in prefix caching.
        cache_salt: Only requests with the same salt share blocks.
        lora: The adapter that computes its keys and values.
        mm_items: Multi-modal items of the prompt.
        priority: For the scheduler and for eviction; lower is more urgent.

    Attributes:
        num_computed_tokens: Tokens whose keys and values are in the cache; the engine sets it.
        num_preemptions: How often the engine took its blocks away; the engine counts it.
        token_ids: Prompt and output, packed: an ``array`` of unsigned 32-bit integers, which numpy reads without
            a copy. Read only: append through :meth:`append_output_token_ids`, which raises ``BufferError`` while such a
            view is alive.
        num_tokens: Their count.
        block_hashes: One hash for each full hash block. Read only.

    Raises:
        CountError: The prompt is empty.
        TokenRangeError: A token id is not a whole number from 0 to 2**32 - 1.
    """

    def __init__(
        self,
        request_id: RequestId,
        prompt_token_ids: Iterable[int],
        *,
        block_hasher: BlockHasher | None = None,
        cache_salt: str | None = None,
        lora: LoRAAdapter | None = None,
        mm_items: Iterable[MultiModalItem] = (),
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.token_ids = pack_tokens(prompt_token_ids)
        # Counts are attributes, not properties: the manager reads them in every step of every request.
        self.num_tokens = self.num_prompt_tokens = len(self.token_ids)
        if not self.num_tokens:
            raise CountError(f"request {request_id!r} has no prompt tokens; it needs at least one")
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.priority = priority
        self.extra_keys = ExtraKeys(lora, mm_items, cache_salt)
        self.block_hasher = block_hasher
        self.block_hashes: list[bytes] = []
        self.block_contents: PrefixContents | None = None
        self._hash_at = sys.maxsize  # number of tokens at which the next block is full
        if block_hasher is not None:
            if block_hasher.verify_hits:
                self.block_contents = PrefixContents(self.token_ids, self.extra_keys, block_hasher.block_size)
            self._hash_new_blocks(block_hasher)

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, num_prompt_tokens={self.num_prompt_tokens}, num_tokens={self.num_tokens}, "
            f"num_computed_tokens={self.num_computed_tokens})"
        )

    @property
    def all_token_ids(self) -> list[int]:
        """Prompt and output, as a new list. O(tokens): slice ``token_ids`` where it matters."""
        return self.token_ids.tolist()

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's tokens, as a new list."""
        return self.token_ids[: self.num_prompt_tokens].tolist()

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens after the prompt, as a new list."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def cache_salt(self) -> str | None:
        """Only requests with the same salt share blocks."""
        return self.extra_keys.cache_salt

    @property
    def lora(self) -> LoRAAdapter | None:
        """The adapter that computes its keys and values."""
        return self.extra_keys.lora

    @property
    def mm_items(self) -> tuple[MultiModalItem, ...]:
        """Multi-modal items, by offset."""
        return self.extra_keys.mm_items

    @property
    def hash_block_size(self) -> int | None:
        """Tokens per hash, None without a hasher."""
        return self.block_hasher.block_size if self.block_hasher else None

    def append_output_token_ids(self, token_ids: int | Iterable[int]) -> None:
        """Appends one token or several, and hashes the blocks that they fill. O(tokens).

        Raises:
            TokenRangeError: A token id is not a whole number from 0 to 2**32 - 1; none was appended.
        """
        if isinstance(token_ids, int) and 0 <= token_ids <= MAX_TOKEN_ID:
            self.token_ids.append(token_ids)
            self.num_tokens += 1
        else:
            self.token_ids += pack_tokens(token_ids)
            self.num_tokens = len(self.token_ids)
        if self.num_tokens >= self._hash_at:
            assert self.block_hasher is not None
            self._hash_new_blocks(self.block_hasher)

    def _hash_new_blocks(self, hasher: BlockHasher) -> None:
        first, stop = len(self.block_hashes), self.num_tokens // hasher.block_size
        extra_keys = self.extra_keys.of_blocks(first, stop, hasher.block_size) if self.extra_keys else {}
        hasher.extend(self.block_hashes, self.token_ids, extra_keys)
        self._hash_at = (len(self.block_hashes) + 1) * hasher.block_size
