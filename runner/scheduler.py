"""Which requests compute how many tokens in the next step: continuous batching over the books of :mod:`kvcore`."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, takewhile

from kvcore.errors import UnknownRequestError
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
        new_blocks: The blocks it has got for them; all that it holds, hits too, when it is admitted; None: none.
    """

    request: Request
    num_new_tokens: int
    new_blocks: KVCacheBlocks | None = None

    @property
    def samples(self) -> bool:
        """The step reaches the last token known, so that it gives the next."""
        return self.request.num_computed_tokens + self.num_new_tokens == self.request.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute. O(their number)."""
        start = self.request.num_computed_tokens
        return self.request.token_ids[start : start + self.num_new_tokens].tolist()


@dataclass
class _Turn:
    """When it is a request's turn.

    Args:
        arrival: Its number among all requests that were added.
        admission: The number of its latest admission.
        num_overtakes: How often a later one was admitted while it waited because it did not fit.
    """

    arrival: int
    admission: int = 0
    num_overtakes: int = 0


class Scheduler:
    """Holds the requests that wait and those that run.

    **Order.** Lower ``request.priority`` goes first; within a priority, earlier arrival. Nobody who runs is preempted
    for somebody who waits, however urgent.

    **A step** has room for so many tokens. Requests that decode have theirs for certain; prefills share the rest in
    order, in chunks if need be.

    **Admission.** A request is admitted when all tokens it has so far fit next to those that run and to what these
    still need for their own prompts, so that no prompt is begun that cannot be computed to its end. Next to others it
    also has to leave room: for each, itself included, to grow by ``growth_tokens``, and ``watermark_blocks``. Without
    such room, whoever is admitted last is soon preempted, and computed again.

    **Overtaking.** While a request does not fit, later ones of the same priority that do may be admitted before it.
    Each of them counts as an overtake of every request that it passes. One that was overtaken ``max_overtakes`` times
    is passed no more: nothing behind it is admitted until it is, which is at the latest when all that run, and those
    ahead of it, have finished. So a large request delays small ones only then, and is itself delayed by at most
    ``max_overtakes`` later ones of its priority; more urgent ones always go first. A step looks at as many requests
    behind the first that does not fit.

    **Preemption.** When blocks run out, the request admitted last among the least urgent is preempted: its blocks are
    freed, and it waits, at the place that priority and arrival give it, to be computed again (from what the cache still
    has of it).

    Args:
        manager: The books; made with ``max_in_flight_tokens`` of at least ``max_num_batched_tokens``, and without a
            watermark of their own.
        max_num_batched_tokens: Most tokens in a step; at least ``max_num_seqs``.
        max_num_seqs: Most requests that run at once.
        watermark_blocks: Blocks to leave free when a request is admitted next to others.
        growth_tokens: Tokens that each must then still have room to grow by.
        max_overtakes: How often a request may be overtaken; 0: strictly in order.

    Attributes:
        waiting: Not admitted yet, or preempted; the next to be admitted in front.
        running: Admitted; those of the same priority in order of admission. Who is preempted is taken from the end.
        num_preemptions: How often blocks were taken away.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        watermark_blocks: int = 0,
        growth_tokens: int = 0,
        max_overtakes: int = 16,
    ) -> None:
        self.manager = manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.watermark_blocks = watermark_blocks
        self.growth_tokens = growth_tokens
        self.max_overtakes = max_overtakes
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._turns: dict[str, _Turn] = {}
        self._released: list[str] = []
        self._arrivals = count()
        self._admissions = count()

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
        """Queue a request that :meth:`check_fits` has let pass. O(waiting requests)."""
        self._turns[request.request_id] = _Turn(next(self._arrivals))
        self._queue(request)

    def remove(self, request: Request) -> None:
        """Let go of a request, finished or aborted, and of its blocks if it has any. O(requests + its blocks).

        Between two steps at any time; between :meth:`schedule` and :meth:`complete` only all of them, as after a step
        that failed.

        Raises:
            ValueError: It is not here.
        """
        if self._turns.pop(request.request_id, None) is None:
            raise ValueError(f"request {request.request_id!r} is not here: it was removed before, or never added")
        for requests in (self.running, self.waiting):
            if request in requests:
                requests.remove(request)
        # Where a step was interrupted, who holds blocks may stand in either list, or in neither.
        with suppress(UnknownRequestError):
            self.manager.free(request)
        self._released.append(request.request_id)

    def schedule(self) -> list[Scheduled]:
        """Decide on a step and take the blocks it needs. Empty if there is nothing to do.

        The caller computes it and then calls :meth:`complete`; nothing else in between.
        """
        num_preemptions = self.num_preemptions
        scheduled, room = self._schedule_running()
        if num_preemptions == self.num_preemptions:
            scheduled += self._admit(room)
        assert scheduled or not (self.running or self.waiting), (
            "a request that check_fits let pass does not fit an empty cache"
        )
        return scheduled

    def take_released(self) -> list[str]:
        """Ids of requests that have left since the last step, or were preempted: their blocks are not theirs any more.

        Whoever keeps block tables asks between :meth:`schedule` and :meth:`complete`.
        """
        released, self._released = self._released, []
        return released

    def complete(self, scheduled: Iterable[Scheduled]) -> None:
        """Note that a step has been computed."""
        self._released.clear()
        for item in scheduled:
            item.request.num_computed_tokens += item.num_new_tokens

    def _schedule_running(self) -> tuple[list[Scheduled], int]:
        """What the requests that run compute, and the room that is left."""
        decodes = sum(_remaining(request) == 1 for request in self.running)
        room = self.max_num_batched_tokens - decodes  # for prefills
        # Nearly always, those that decode come first, and one call serves them all.
        leading = list(takewhile(lambda request: _remaining(request) == 1, self.running))
        growth = self.manager.grow(leading)
        index = growth.num_grown
        scheduled = [Scheduled(request, 1, growth.new_blocks.get(i)) for i, request in enumerate(leading[:index])]
        # In this order, so that who is preempted has no place in this step yet: what is scheduled has its full blocks
        # registered already, and must be computed.
        while index < len(self.running):
            request = self.running[index]
            remaining = _remaining(request)
            num_new_tokens = 1 if remaining == 1 else min(remaining, room)
            if num_new_tokens:
                new_blocks = self.manager.allocate_slots(request, num_new_tokens)
                if new_blocks is None:
                    self._preempt_last()
                    continue
                scheduled.append(Scheduled(request, num_new_tokens, new_blocks))
                room -= num_new_tokens if remaining > 1 else 0
            index += 1
        return scheduled, room

    def _preempt_last(self) -> None:
        request = self.running.pop()
        self.manager.free(request)
        self._released.append(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._queue(request)

    def _queue(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda other: (other.priority, self._turns[other.request_id].arrival))

    def _admit(self, room: int) -> list[Scheduled]:
        """Requests that wait, in order, and past those that do not fit as far as these may be overtaken."""
        admitted: list[Scheduled] = []
        if not self.waiting or room <= 0 or len(self.running) >= self.max_num_seqs:
            return admitted
        index = 0  # of the next to look at: those before it do not fit
        looks = self.max_overtakes
        promised = sum(map(self._blocks_to_grow, self.running))
        while index < len(self.waiting) and room > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[index]
            passed = self.waiting[:index]
            if passed and (looks == 0 or not self._may_overtake(request, passed)):
                break
            looks -= bool(passed)
            item = self._enter(request, room, promised)
            if item is None:
                index += 1
                continue
            del self.waiting[index]
            for other in passed:
                self._turns[other.request_id].num_overtakes += 1
            self._turns[request.request_id].admission = next(self._admissions)
            insort(self.running, request, key=lambda other: (other.priority, self._turns[other.request_id].admission))
            admitted.append(item)
            room -= item.num_new_tokens
            promised += self._blocks_to_grow(request)
        return admitted

    def _may_overtake(self, request: Request, passed: Iterable[Request]) -> bool:
        return all(
            other.priority == request.priority and self._turns[other.request_id].num_overtakes < self.max_overtakes
            for other in passed
        )

    def _enter(self, request: Request, room: int, promised: int) -> Scheduled | None:
        """Give a request that waits its first blocks, if all of it fits."""
        # A hit may be on blocks that another request fills in this very step: every layer stores all keys and values of
        # the step before it reads any.
        hits, num_hit_tokens = self.manager.get_computed_blocks(request)
        # Alone, it may have everything: check_fits has let it pass on that condition.
        length = self._grown(request) if self.running else request.num_tokens
        spare = self.manager.block_pool.get_num_free_blocks() - (
            self.watermark_blocks + promised if self.running else 0
        )
        coordinator = self.manager.coordinator
        if coordinator.get_num_blocks_to_admit(length, hits.blocks, num_hit_tokens, cap=True) > spare:
            return None
        num_new_tokens = min(request.num_tokens - num_hit_tokens, room)
        new_blocks = self.manager.allocate_slots(
            request, num_new_tokens, num_hit_tokens, hits, full_sequence_must_fit=True
        )
        if new_blocks is None:
            return None
        request.num_computed_tokens = num_hit_tokens
        return Scheduled(request, num_new_tokens, self.manager.get_blocks(request.request_id))

    def _blocks_to_grow(self, request: Request) -> int:
        """Free blocks that a request which runs will take for the tokens it has, and for its growth. O(groups)."""
        return self.manager.coordinator.get_num_blocks_to_grow(request.request_id, self._grown(request), cap=True)

    def _grown(self, request: Request) -> int:
        return min(request.num_tokens + self.growth_tokens, self.manager.max_model_len)


def _remaining(request: Request) -> int:
    """Tokens known and not computed."""
    return request.num_tokens - request.num_computed_tokens
