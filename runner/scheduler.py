"""Which requests compute how many tokens in the next step: continuous batching over the books of :mod:`kvcore`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.manager import KVCacheManager
from kvcore.request import Request
from runner.errors import RequestRefusedError


@dataclass(frozen=True)
class Scheduled:
    """What a request computes in a step. Its properties hold until the step is completed.

    Args:
        request: The request; it holds blocks for these tokens.
        num_new_tokens: How many of its tokens, from the first that is not computed yet.
    """

    request: Request
    num_new_tokens: int

    @property
    def samples(self) -> bool:
        """The step reaches the last token known, so that it gives the next."""
        return self.request.num_computed_tokens + self.num_new_tokens == self.request.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute."""
        start = self.request.num_computed_tokens
        return self.request.all_token_ids[start : start + self.num_new_tokens]


class Scheduler:
    """Holds the requests that wait and those that run.

    A step has room for so many tokens. Requests that decode get theirs first; prefills share the rest in order of
    admission, in chunks if need be. When blocks run out, the request admitted last is preempted: its blocks are freed,
    and it waits, ahead of all others, to be computed again (from what the cache still has of it). A request is admitted
    when all of it fits next to those that run.

    Args:
        manager: The books; made with ``max_in_flight_tokens`` of at least ``max_num_batched_tokens``.
        max_num_batched_tokens: Most tokens in a step; at least ``max_num_seqs``.
        max_num_seqs: Most requests that run at once.

    Attributes:
        waiting: Not admitted yet, or preempted; the next to be admitted in front.
        running: Admitted, in order of admission.
        num_preemptions: How often blocks were taken away.
    """

    def __init__(self, manager: KVCacheManager, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.manager = manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    def check_fits(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Refuse a request that could not finish even if it had the cache to itself. O(groups).

        Args:
            num_prompt_tokens: Tokens of the prompt.
            max_tokens: Most tokens of output.

        Raises:
            RequestRefusedError: With the arithmetic.
        """
        total = num_prompt_tokens + max_tokens
        wanted = f"{num_prompt_tokens:,} prompt tokens + {max_tokens:,} tokens of output"
        if total > self.manager.max_model_len:
            raise RequestRefusedError(
                f"{wanted} = {total:,} tokens, more than max_model_len = {self.manager.max_model_len:,}: shorten the "
                "prompt, or ask for fewer tokens"
            )
        config = self.manager.kv_cache_config
        # The last token of the output is never computed, so it needs no slot.
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        blocks = [spec.max_blocks_per_request(total - 1, self.max_num_batched_tokens) for spec in specs]
        usable = config.num_blocks - 1
        if sum(blocks) > usable:
            parts = " + ".join(f"{n:,} of {spec.block_size} tokens" for n, spec in zip(blocks, specs, strict=True))
            raise RequestRefusedError(
                f"{wanted} can need {parts} = {sum(blocks):,} blocks, and the cache has {usable:,} (and the null "
                "block): enlarge it (kv_cache_memory or num_blocks), shorten the prompt, or ask for fewer tokens"
            )

    def add(self, request: Request) -> None:
        """Queue a request that :meth:`check_fits` has let pass."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Let go of a request, finished or aborted, and of its blocks if it has any. O(requests).

        Raises:
            ValueError: It is not here.
        """
        if request in self.running:
            self.running.remove(request)
            self.manager.free(request)
        else:
            self.waiting.remove(request)

    def schedule(self) -> list[Scheduled]:
        """Decide on a step and take the blocks it needs. Empty if there is nothing to do.

        The caller computes it and then calls :meth:`complete`; nothing else in between.
        """
        scheduled, room, preempted = self._schedule_running()
        if not preempted:
            scheduled += self._admit(room)
        assert scheduled or not (self.running or self.waiting), (
            "a request that check_fits let pass does not fit an empty cache"
        )
        return scheduled

    def complete(self, scheduled: Iterable[Scheduled]) -> None:
        """Note that a step has been computed."""
        for item in scheduled:
            item.request.num_computed_tokens += item.num_new_tokens

    def _schedule_running(self) -> tuple[list[Scheduled], int, bool]:
        """The requests that run; the room that is left; whether one was preempted."""
        decodes = sum(_remaining(request) == 1 for request in self.running)
        room = self.max_num_batched_tokens - decodes  # for prefills
        scheduled: list[Scheduled] = []
        preempted = False
        # In order of admission, so that who is preempted has no place in this step yet: what is scheduled has its full
        # blocks registered already, and must be computed.
        index = 0
        while index < len(self.running):
            request = self.running[index]
            remaining = _remaining(request)
            num_new_tokens = 1 if remaining == 1 else min(remaining, room)
            if num_new_tokens and not self._grow(request, num_new_tokens):
                self._preempt_last()
                preempted = True
                continue
            if num_new_tokens:
                scheduled.append(Scheduled(request, num_new_tokens))
                room -= num_new_tokens if remaining > 1 else 0
            index += 1
        return scheduled, room, preempted

    def _grow(self, request: Request, num_new_tokens: int) -> bool:
        return self.manager.allocate_slots(request, num_new_tokens) is not None

    def _preempt_last(self) -> None:
        request = self.running.pop()
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self, room: int) -> list[Scheduled]:
        """Requests that wait, first come first served, while there is room."""
        admitted = []
        while self.waiting and room > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            # A hit may be on blocks that another request fills in this very step: every layer stores all keys and
            # values of the step before it reads any.
            hits, num_hit_tokens = self.manager.get_computed_blocks(request)
            num_new_tokens = min(request.num_tokens - num_hit_tokens, room)
            if not self._enter(request, num_new_tokens, num_hit_tokens, hits):
                break
            self.running.append(self.waiting.popleft())
            request.num_computed_tokens = num_hit_tokens
            admitted.append(Scheduled(request, num_new_tokens))
            room -= num_new_tokens
        return admitted

    def _enter(self, request: Request, num_new_tokens: int, num_hit_tokens: int, hits: KVCacheBlocks) -> bool:
        new_blocks = self.manager.allocate_slots(
            request, num_new_tokens, num_hit_tokens, hits, full_sequence_must_fit=True
        )
        return new_blocks is not None


def _remaining(request: Request) -> int:
    """Tokens known and not computed."""
    return request.num_tokens - request.num_computed_tokens
