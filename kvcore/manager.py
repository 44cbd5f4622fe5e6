"""The facade: admit, grow and free requests. All that a scheduler needs to call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from kvcore.admission import Admission
from kvcore.checks import (
    check_blocks,
    check_computed,
    check_counts,
    check_hashes,
    check_no_hits,
    check_protocol,
    check_same_request,
    check_slots,
)
from kvcore.coordinators import make_coordinator
from kvcore.errors import ComputedTokensError, ConfigError, CountError, InvariantError
from kvcore.events import BlockStored, KVCacheEvent
from kvcore.eviction import PolicyChoice, policy_name
from kvcore.growth import Growth, Holder, find_holder, grow_each
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.manager_log import ManagerLog
from kvcore.request import RequestId, RequestLike, takes_part_in_caching
from kvcore.residency import Residency
from kvcore.snapshot import Snapshot
from kvcore.snapshot_take import take_snapshot
from kvcore.spec import KVCacheConfig, require_positive
from kvcore.stats import PrefixCacheStats


class KVCacheManager:
    """Keeps the books of a paged KV cache for a scheduler.

    The life of a request: :meth:`get_computed_blocks` says how much of its prompt is cached; :meth:`allocate_slots`
    admits it with those hits and gives it blocks for the tokens of its next step, then again in every step;
    :meth:`free` takes the blocks back. Between the calls the engine computes and sets ``request.num_computed_tokens``.

    Not thread-safe: one scheduler, one thread. Every call that raises leaves the books as they were, unless what raised
    was an eviction policy of your own.

    Args:
        kv_cache_config: Groups and size of the pool.
        max_model_len: Longest sequence, in tokens; no request gets slots beyond it.
        hash_block_size: Tokens per block hash of the requests; None: the greatest common divisor of the groups' block
            sizes, which is the block size where all have the same.
        enable_caching: Let requests share the blocks of equal prefixes.
        log_stats: Count lookups, see :meth:`make_prefix_cache_stats`.
        enable_kv_cache_events: Keep events, see :meth:`take_events`.
        eviction_policy: Which free block to overwrite next: a name of :data:`kvcore.eviction.POLICIES`, a policy, or
            a class of policies.
        window_retention: What a window leaves behind is evicted in turn, like all else ("all", as in vLLM), or before
            all else unless a later prompt is likely to join in there ("ends"). On models with windows, "ends" keeps
            many times as many conversations in the cache.
        watermark: Share of the pool, from 0 to below 1, to leave free when a request that holds nothing yet is
            admitted.
        pin_limit: Most of the pool, from 0 to below 1, that ``residency`` may pin.
        max_in_flight_tokens: Most tokens of one request in one step. With it, ``full_sequence_must_fit`` counts for a
            window only what it holds at once; None: the whole length.
        record: A new file to write every call to, see :mod:`kvcore.recording`. Costs nothing when off.
        record_tokens: Write token ids too. Else block hashes only, under names that lead back to nothing.

    Attributes:
        coordinator: The layer below. Read only.
        block_pool: The pool. Read only.
        residency: Keeps prefixes in the cache: pins, and what will be asked for soon.
        empty_kv_cache_blocks: No blocks, for as many groups as there are.

    Raises:
        ConfigError: A setting that cannot work.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        *,
        hash_block_size: int | None = None,
        enable_caching: bool = True,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        eviction_policy: PolicyChoice = "lru",
        window_retention: str = "all",
        watermark: float = 0.0,
        pin_limit: float = 0.5,
        max_in_flight_tokens: int | None = None,
        record: str | os.PathLike[str] | None = None,
        record_tokens: bool = False,
    ) -> None:
        require_positive(max_model_len=max_model_len)
        for name, size in (("max_in_flight_tokens", max_in_flight_tokens), ("hash_block_size", hash_block_size)):
            if size is not None:
                require_positive(**{name: size})
        for name, share in (("watermark", watermark), ("pin_limit", pin_limit)):
            if not isinstance(share, (int, float)) or not 0.0 <= share < 1.0:
                raise ConfigError(f"{name} is a share of the pool, from 0 to below 1, got {share!r}")
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = bool(enable_caching)  # here and below, for the layers that compile: 1 is not True there
        self.log_stats = log_stats
        self.coordinator = make_coordinator(
            kv_cache_config,
            max_model_len,
            max_in_flight_tokens=max_in_flight_tokens,
            enable_caching=self.enable_caching,
            enable_kv_cache_events=bool(enable_kv_cache_events),
            hash_block_size=hash_block_size,
            eviction_policy=eviction_policy,
            window_retention=window_retention,
        )
        self.block_pool = self.coordinator.block_pool
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.empty_kv_cache_blocks = KVCacheBlocks(tuple(() for _ in kv_cache_config.kv_cache_groups))
        self._holders: dict[RequestId, Holder] = {}
        self.residency = Residency(self.coordinator, max_model_len, int(pin_limit * kv_cache_config.num_blocks))
        self._stats = PrefixCacheStats()
        self._admission = Admission(self.coordinator, max_model_len, self.watermark_blocks, self.empty_kv_cache_blocks)
        self._log = ManagerLog(self)
        if record is not None:
            from kvcore.recording import start_recording

            settings = {
                "max_model_len": max_model_len,
                "hash_block_size": hash_block_size,
                "enable_caching": enable_caching,
                "log_stats": log_stats,
                "enable_kv_cache_events": enable_kv_cache_events,
                "eviction_policy": policy_name(eviction_policy),
                "window_retention": window_retention,
                "watermark": watermark,
                "pin_limit": pin_limit,
                "max_in_flight_tokens": max_in_flight_tokens,
            }
            start_recording(self, record, tokens=record_tokens, settings=settings)

    def __repr__(self) -> str:
        return (
            f"KVCacheManager({type(self.coordinator).__name__}, groups={len(self.empty_kv_cache_blocks.blocks)}, "
            f"requests={len(self._holders)}, {self.block_pool!r})"
        )

    def get_computed_blocks(self, request: RequestLike) -> tuple[KVCacheBlocks, int]:
        """Looks up how much of a request is cached. Takes nothing: the blocks are the request's own only after
        :meth:`allocate_slots`.

        At most ``num_tokens - 1`` tokens: the last one is always computed, since its logits are wanted (rule 6).
        O(hit blocks); of a prompt that misses, a look for each window.

        Returns:
            The blocks found for each group, and the number of tokens they cover, the same in every group.

        Raises:
            RequestProtocolError: A request of your own class lacks what is read of it, or has it in another type.
            ConfigError: The request is hashed at another block size than the manager's.
        """
        if not self.enable_caching or not takes_part_in_caching(request):
            return self.empty_kv_cache_blocks, 0
        check_protocol(request, events=self.block_pool.enable_kv_cache_events)
        check_hashes(request, self.coordinator.hash_block_size)
        longest = min(request.num_tokens - 1, self.max_model_len)
        groups, num_tokens = self.coordinator.find_longest_cache_hit(request, longest)
        if self.log_stats:
            preempted = getattr(request, "num_preemptions", 0) > 0
            self._stats.record(request.num_tokens, num_tokens, preempted=preempted)
        blocks = KVCacheBlocks(groups) if num_tokens else self.empty_kv_cache_blocks
        self._admission.note_lookup(request, blocks, num_tokens)
        return blocks, num_tokens

    def allocate_slots(
        self,
        request: RequestLike,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        *,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
    ) -> KVCacheBlocks | None:
        """Gives a request the blocks for its next tokens, and admits it if it holds none yet.

        The tokens of a request, in order, and what becomes of them::

            | num_computed_tokens | new computed | external | new           | lookahead |
            | has blocks          | hits, shared | get blocks, not shared with anyone   |
            | registered for prefix hits once their block is full           | never     |

        Blocks that a window has left are freed first, hits are taken second, new blocks handed out last (rules 8, 9).
        Full blocks among the request's known tokens are registered at once: their content arrives before any later step
        reads.

        O(1) while a request stays inside its last block, else O(hit blocks + new blocks + newly full blocks).

        Args:
            request: One that holds blocks, or a new one with ``num_computed_tokens`` 0.
            num_new_tokens: Tokens to compute in the next step, draft tokens included. May be 0 when admitting with
                computed tokens.
            num_new_computed_tokens: Tokens that ``new_computed_blocks`` cover.
            new_computed_blocks: What :meth:`get_computed_blocks` answered; for a new request only.
            num_lookahead_tokens: Slots for draft tokens after these, never registered (rule 7).
            num_external_computed_tokens: Tokens after the hits whose keys and values come from elsewhere.
            delay_cache_blocks: Register nothing yet; :meth:`cache_blocks` will, when the data has arrived.
            full_sequence_must_fit: Refuse unless all of ``num_tokens`` would fit now.
            reserved_blocks: Leave that many blocks free. Where fewer are, even a step that needs none is refused, as in
                vLLM.

        Returns:
            The new blocks for each group, without the hits and the blocks of external tokens (:meth:`get_blocks` has
            all); None if it does not fit now. Then nothing was handed out, shared or registered; only blocks that a
            window has left may have been freed.

        Raises:
            CountError: A negative count, or nothing to do.
            ComputedTokensError: More tokens computed than the request has, or than the hit blocks hold.
            DuplicateRequestError: Another request holds blocks under this id.
            UnknownRequestError: The request has computed tokens but holds no blocks.
            HitHandoverError: Hits for a running request, or from a cache that is off.
            StaleHitError: Hits that were evicted since the lookup.
            ForeignBlockError: Hits of another pool.
            RequestProtocolError: A request of your own class lacks what is read of it, or has it in another type.
            ConfigError: The request is hashed at another block size than the manager's.
        """
        holder = self._holders.get(request.request_id)
        if (
            holder is not None
            and new_computed_blocks is None
            and not (
                num_new_computed_tokens or num_external_computed_tokens or full_sequence_must_fit or reserved_blocks
            )
        ):
            # A step of decoding, nearly always: known to be in order by a few comparisons.
            computed = request.num_computed_tokens
            num_tokens = computed + num_new_tokens + num_lookahead_tokens
            if (
                type(num_tokens) is int  # a float anywhere in the sum would show
                and num_new_tokens > 0
                and num_lookahead_tokens >= 0
                and holder.request is request
                and 0 <= computed <= request.num_tokens
            ):
                if num_tokens < holder.quiet_tokens and computed < holder.skip_at:
                    return self.empty_kv_cache_blocks
                if computed <= holder.num_slots and not delay_cache_blocks:
                    return holder.grow(num_new_tokens, num_lookahead_tokens) or self._log.refused(request)

        check_counts(
            "num_new_tokens num_new_computed_tokens num_lookahead_tokens num_external_computed_tokens reserved_blocks",
            num_new_tokens,
            num_new_computed_tokens,
            num_lookahead_tokens,
            num_external_computed_tokens,
            reserved_blocks,
        )
        num_new_computed = num_new_computed_tokens + num_external_computed_tokens
        if not num_new_tokens and not num_new_computed:
            raise CountError(
                f"num_new_tokens must be at least 1 for {request.request_id!r}: there is nothing to allocate"
            )
        check_computed(request, num_new_computed)
        hits = self.empty_kv_cache_blocks if new_computed_blocks is None else new_computed_blocks
        check_blocks(hits)
        if holder is not None:
            check_same_request(request, holder.request)
            check_slots(request, holder.num_slots)
            check_no_hits(request, hits, num_new_computed)
            return holder.grow(
                num_new_tokens,
                num_lookahead_tokens,
                delay_cache_blocks=bool(delay_cache_blocks),
                full_sequence_must_fit=bool(full_sequence_must_fit),
                reserved_blocks=reserved_blocks,
            ) or self._log.refused(request)
        self._admission.check(request, hits, num_new_computed_tokens)
        admitted = self._admission.admit(
            request,
            hits,
            num_new_tokens,
            num_new_computed,
            num_external_computed_tokens=num_external_computed_tokens,
            num_lookahead_tokens=num_lookahead_tokens,
            delay_cache_blocks=bool(delay_cache_blocks),
            full_sequence_must_fit=bool(full_sequence_must_fit),
            reserved_blocks=reserved_blocks,
        )
        if admitted is None:
            return self._log.refused(request)
        self._holders[request.request_id], new_blocks = admitted
        return new_blocks

    def grow(
        self, requests: Sequence[RequestLike], num_new_tokens: int = 1, *, num_lookahead_tokens: int = 0
    ) -> Growth:
        """Gives running requests the blocks for their next tokens: :meth:`allocate_slots` for each in turn, in one
        call.

        Stops at the first that does not fit; those before it have their slots, those after it are as they were. Only
        requests that leave their last block, fill it, or move their window past a block cost more than a comparison. A
        bad request anywhere in the batch is found first: then no request was given anything.
        O(requests + new blocks + newly full blocks).

        Args:
            requests: Requests that hold blocks.
            num_new_tokens: Tokens to compute for each in the next step.
            num_lookahead_tokens: Slots for draft tokens after these.

        Raises:
            CountError: A negative count, or no new tokens.
            UnknownRequestError: A request holds no blocks.
            DuplicateRequestError: A request's id is that of another request.
            ComputedTokensError: A request has more computed tokens than tokens, or than slots.
        """
        check_counts("num_new_tokens num_lookahead_tokens", num_new_tokens, num_lookahead_tokens)
        if not num_new_tokens:
            raise CountError("num_new_tokens must be at least 1: there is nothing to allocate")
        batch = list(requests)
        growth = grow_each(self._holders, batch, num_new_tokens, num_lookahead_tokens)
        if growth.num_grown < len(batch):
            self._log.refused(batch[growth.num_grown])
        return growth

    def free(self, request: RequestLike) -> None:
        """Takes back all blocks of a request: finished, aborted or preempted. O(blocks).

        They go back with the tail in front, so that it is overwritten before the head (rule 4). Cached blocks stay
        hittable until then. To preempt, also set ``num_computed_tokens`` to 0 before admitting the request again.
        If the step that was to compute the request's last tokens did not run, :meth:`evict_blocks` the full blocks
        among them first: they were registered when they were allocated.

        Raises:
            UnknownRequestError: The request holds nothing: never admitted, or freed already.
            DuplicateRequestError: Another request holds blocks under this id.
        """
        check_same_request(request, self._holder(request.request_id).request)
        self.coordinator.tell_policy(request)  # the one call that may fail: it is the user's
        del self._holders[request.request_id]
        self.coordinator.free(request.request_id)

    def cache_blocks(self, request: RequestLike, num_computed_tokens: int) -> None:
        """Registers the full blocks among the first tokens of a request; after ``delay_cache_blocks``.

        O(newly full blocks).

        Args:
            request: One that holds blocks.
            num_computed_tokens: Tokens whose keys and values are in place.

        Raises:
            UnknownRequestError: The request holds no blocks.
            ComputedTokensError: More than the request's tokens, or than its blocks hold.
        """
        holder = self._holder(request.request_id)
        check_same_request(request, holder.request)
        check_counts("num_computed_tokens", num_computed_tokens)
        slots = holder.num_slots
        if num_computed_tokens > min(request.num_tokens, slots):
            raise ComputedTokensError(
                f"{num_computed_tokens} tokens of {request.request_id!r} cannot be computed: "
                f"it has {request.num_tokens} tokens and slots for {slots}"
            )
        self.coordinator.cache_blocks(request, num_computed_tokens)
        holder.note_registered()

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Takes blocks out of the prefix cache, for example when their data was lost. Those in use stay in use. O(n).

        Raises:
            ForeignBlockError: No such block; nothing was evicted.
        """
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks, for example when weights change. O(cached blocks).

        Returns:
            False, and nothing changed, while any request or pin holds blocks.
        """
        done = self.block_pool.reset_prefix_cache()
        self._log.reset(done=done)
        if done:
            self._stats.reset = True
        return done

    @property
    def usage(self) -> float:
        """Share of the pool that requests and pins hold, from 0 to 1; what is only cached counts as free. O(1)."""
        return self.block_pool.get_usage()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """The counts since the last call; None unless ``log_stats``."""
        if not self.log_stats:
            return None
        stats, self._stats = self._stats, PrefixCacheStats()
        return stats

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call, oldest first; none unless ``enable_kv_cache_events``."""
        events = self.block_pool.take_events()
        for event in events:
            if isinstance(event, BlockStored) and event.group_idx is not None:
                spec = self.kv_cache_config.kv_cache_groups[event.group_idx].kv_cache_spec
                event.kv_cache_spec_kind = spec.kind
                event.kv_cache_spec_sliding_window = getattr(spec, "sliding_window", None)
        return events

    def get_blocks(self, request_id: RequestId) -> KVCacheBlocks:
        """The block tables of a request, as they are now. O(blocks).

        Raises:
            UnknownRequestError: The request holds no blocks.
        """
        self._holder(request_id)
        return KVCacheBlocks(tuple(map(tuple, self.coordinator.get_blocks(request_id))))

    def get_block_ids(self, request_id: RequestId) -> tuple[list[int], ...]:
        """The block ids of a request for each group, 0 for positions a window has left. O(blocks).

        Raises:
            UnknownRequestError: The request holds no blocks.
        """
        self._holder(request_id)
        return KVCacheBlocks(self.coordinator.get_blocks(request_id)).get_block_ids()

    def get_num_common_prefix_blocks(self, request_id: RequestId) -> list[int]:
        """For each group, the leading blocks of a request that all requests holding blocks share. O(common blocks).

        0 for windows: their heads become null at different times.

        Raises:
            UnknownRequestError: The request holds no blocks.
        """
        self._holder(request_id)
        return [
            manager.get_num_common_prefix_blocks(request_id, len(self._holders), self.residency.counts)
            for manager in self.coordinator.single_type_managers
        ]

    def snapshot(
        self, label: str = "", *, previous: Snapshot | None = None, known_requests: Iterable[RequestLike] = ()
    ) -> Snapshot:
        """The pool, the index and all tables as they are now, as plain data. O(pool + blocks in tables).

        Args:
            label: What has just happened, for whoever looks at it later.
            previous: The snapshot before this one. A cached block does not know what comes before it in its prefix; its
                request does, while it runs, and earlier snapshots keep that.
            known_requests: Requests that hold no blocks, waiting or finished, to learn the same from.
        """
        return take_snapshot(self, label, previous=previous, known_requests=known_requests)

    def check_invariants(self) -> None:
        """Recomputes the books from scratch and compares. O(pool + blocks in tables); for tests and debugging.

        Raises:
            InvariantError: What does not agree; a fault of this package, or of a caller who changed blocks by hand.
        """
        for manager in self.coordinator.single_type_managers:
            if manager.req_to_blocks.keys() != self._holders.keys():
                raise InvariantError(
                    f"{manager!r} has tables of {set(manager.req_to_blocks)}, not of {set(self._holders)}"
                )
        self.coordinator.check_invariants(self.residency.counts)

    def _holder(self, request_id: RequestId) -> Holder:
        return find_holder(self._holders, request_id)
