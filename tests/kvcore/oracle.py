"""The rules of the books written down a second time, slowly, and a machine that drives the manager against them.

:class:`Books` answers from lists and sets what the manager answers from its linked queue, hash tables and counters:
what is hit, whether something fits, which blocks are handed out, shared, registered, and overwritten next. It takes two
things as they are: which of the blocks that may be registered really were (it checks the bounds of that), and the
requests' hashes, as mere labels.
"""

from __future__ import annotations

import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvcore import (
    AllBlocksCleared,
    BlockHasher,
    BlockRemoved,
    BlockStored,
    ComputedTokensError,
    CountError,
    DuplicateRequestError,
    ForeignBlockError,
    FullAttentionSpec,
    HitHandoverError,
    KVCacheBlocks,
    KVCacheError,
    KVCacheManager,
    KVCacheSpec,
    LoRAAdapter,
    MultiModalItem,
    Pin,
    Request,
    StaleHitError,
    UnknownRequestError,
)
from kvcore.testing import (
    ShadowMemory,
    first_position_read,
    free_block_ids,
    make_manager,
    make_request,
    make_spec,
    prefix_identities,
)

Ids = list[list[int]]
"""Block ids for each group."""


def specs_of(groups: str) -> list[KVCacheSpec]:
    """Specs from a line such as ``"full/8 sliding:6/4"``; the block size is 4 where none is given."""
    specs = []
    for group in groups.split():
        kind, _, block_size = group.partition("/")
        specs.append(make_spec(kind, int(block_size or 4)))
    return specs


def expect(what: str, actual: object, wanted: object) -> None:
    if actual != wanted:
        raise AssertionError(f"{what}: {actual} where the rules say {wanted}")


def blocks_read(spec: KVCacheSpec, num_computed: int) -> range:
    """The blocks among the first ``num_computed`` tokens that later tokens read (rule 9)."""
    return range(first_position_read(spec, num_computed) // spec.block_size, num_computed // spec.block_size)


def snapshot(manager: KVCacheManager) -> tuple[object, ...]:
    """Everything about the books that can be seen from outside, to tell whether a call changed anything."""
    return (
        {
            request_id: manager.get_block_ids(request_id)
            for request_id in manager.coordinator.single_type_managers[0].req_to_blocks
        },
        free_block_ids(manager),
        [(block.ref_cnt, block.block_hash) for block in manager.block_pool.blocks],
        manager.usage,
        len(manager.block_pool.prefix_index),
    )


class Registration(NamedTuple):
    group: int
    prefix_hash: bytes
    identity: bytes


class Books:
    """What the manager's books should say.

    Attributes:
        free: Free blocks, next victim first.
        tables: Block ids for each request and group.
        registered: What each registered block holds, in the order of registration.
        finished: For each request, how many leading tokens have been offered for registration.
    """

    def __init__(self, manager: KVCacheManager, *, max_in_flight_tokens: int | None = None) -> None:
        self.manager = manager
        self.specs = [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups]
        self.hash_block_size = manager.coordinator.hash_block_size
        self.alignment = math.lcm(*(spec.block_size for spec in self.specs))
        self.max_model_len = manager.max_model_len
        num_blocks = manager.kv_cache_config.num_blocks
        self.free = list(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.tables: dict[str, Ids] = {}
        self.requests: dict[str, Request] = {}
        self.registered: dict[int, Registration] = {}
        self.finished: dict[str, int] = {}
        in_flight = max_in_flight_tokens or self.max_model_len
        self.most_held = [
            max(
                math.ceil(min(computed + in_flight, self.max_model_len) / spec.block_size)
                - first_position_read(spec, computed) // spec.block_size
                for computed in range(self.max_model_len)
            )
            for spec in self.specs
        ]
        self._hittable_by_events: Counter[tuple[int | None, bytes]] = Counter()

    # Lookups

    def longest_hit(self, request: Request) -> tuple[int, Ids]:
        """By trial: every aligned length from the longest down, until all that is read after it is registered."""
        identities = prefix_identities(request)
        holder: dict[tuple[int, bytes], int] = {}
        for block_id, entry in self.registered.items():
            holder.setdefault((entry.group, entry.identity), block_id)
        longest = (request.num_tokens - 1) // self.alignment * self.alignment
        if not self.manager.enable_caching or not request.block_hashes:
            longest = 0
        for length in range(longest, 0, -self.alignment):
            tables = []
            for group, spec in enumerate(self.specs):
                ids = [0] * (length // spec.block_size)
                for i in blocks_read(spec, length):
                    ids[i] = holder.get((group, identities[(i + 1) * spec.block_size - 1]), -1)
                tables.append(ids)
            if not any(-1 in ids for ids in tables):
                return length, tables
        return 0, [[] for _ in self.specs]

    def are_stale(self, request: Request, hits: Sequence[Sequence[int]], num_hit: int) -> bool:
        """Whether a block of hits found earlier, one that is read after them, no longer holds what it did."""
        identities = prefix_identities(request)
        for group, spec in enumerate(self.specs):
            for i in blocks_read(spec, num_hit):
                entry = self.registered.get(hits[group][i])
                if entry is None or entry[0] != group or entry.identity != identities[(i + 1) * spec.block_size - 1]:
                    return True
        return False

    # Changes

    def allocated(
        self,
        request: Request,
        answer: KVCacheBlocks | None,
        num_new: int,
        *,
        hits: Sequence[Sequence[int]] | None = None,
        num_hit: int = 0,
        num_external: int = 0,
        num_lookahead: int = 0,
        reserved: int = 0,
        must_fit: bool = False,
        delay: bool = False,
        one_of_several: bool = False,
    ) -> None:
        """Follows an ``allocate_slots``, or one part of a ``grow``, and checks its answer."""
        request_id = request.request_id
        total = request.num_computed_tokens + num_hit + num_external
        end = min(total + num_new + num_lookahead, self.max_model_len)
        new_request = request_id not in self.tables
        hits = hits or [[] for _ in self.specs]
        margin = reserved + (self.manager.watermark_blocks if new_request else 0)

        leaving = [] if new_request else self._leaving(request_id, total)
        free_then = len(self.free) + sum(self.refs[block_id] == 1 for group in leaving for block_id in group)
        fits = self._blocks_to_take(request_id, hits, num_hit, total, end)[0] + margin <= free_then
        must_be_given = fits
        if must_fit and fits:
            full_end = min(request.num_tokens, self.max_model_len)
            least, most = self._blocks_to_take(request_id, hits, num_hit, total, full_end, cap=True)
            fits = least + margin - reserved <= free_then
            must_be_given = most + margin - reserved <= free_then
        if answer is None:
            if must_be_given:
                raise AssertionError(f"{request!r} was refused but fits: {self.free} are free, tables {self.tables}")
            if not new_request and list(self.manager.get_block_ids(request_id)) != self.tables[request_id]:
                self._leave(request_id, leaving)
            return
        if not fits:
            raise AssertionError(
                f"{request!r} was given {answer.get_block_ids()} but does not fit: {self.free} are free"
            )

        if new_request:
            self._admit(request, hits, num_hit, total)
            self._grow(request_id, total)
        else:
            self._leave(request_id, leaving)
        expect(f"new blocks of {request!r}", list(answer.get_block_ids()), self._grow(request_id, end))
        finished = None if delay else min(total + num_new, request.num_tokens)
        self.register(request, finished, one_of_several=one_of_several)

    def register(self, request: Request, num_finished: int | None, *, one_of_several: bool = False) -> None:
        """Takes over what was registered in the last call, and checks that it may be, and that what a hit can use is.

        Args:
            request: Whose call it was.
            num_finished: Leading tokens whose blocks may be registered; None: nothing may be.
            one_of_several: The call registered blocks of other requests too; leave those alone.
        """
        before = self.finished[request.request_id]
        finished = before if num_finished is None else max(before, num_finished)
        self.finished[request.request_id] = finished
        pool = self.manager.block_pool
        gained = {
            block.block_id
            for block in pool.blocks
            if block.block_hash is not None and block.block_id not in self.registered
        }
        if not self.manager.enable_caching or not request.block_hashes:
            finished = before = 0
        identities = prefix_identities(request)
        by_hash = {entry[:2]: entry.identity for entry in self.registered.values()}
        aligned_before, aligned = (n // self.alignment * self.alignment for n in (before, finished))
        for group, spec in enumerate(self.specs):
            size = spec.block_size
            useful = {
                i
                for length in range(aligned_before + self.alignment, aligned + 1, self.alignment)
                for i in blocks_read(spec, length)
            }
            for i in range(finished // size):
                block_id = self.tables[request.request_id][group][i]
                prefix_hash = request.block_hashes[(i + 1) * size // self.hash_block_size - 1]
                entry = Registration(group, prefix_hash, identities[(i + 1) * size - 1])
                if block_id in gained:
                    gained.remove(block_id)
                    expect(
                        f"key of block {block_id}",
                        pool.blocks[block_id].block_hash,
                        prefix_hash + group.to_bytes(4, "big"),
                    )
                    expect("what one hash stands for", by_hash.setdefault(entry[:2], entry.identity), entry.identity)
                    self.registered[block_id] = entry
                    continue
                missing = block_id and block_id not in self.registered and i >= aligned_before // size and i in useful
                # What stands under its hash for another prefix keeps a block out.
                if missing and by_hash.get(entry[:2]) in (None, entry.identity):
                    raise AssertionError(f"block {i} of {request!r} in group {group} is finished but not registered")
        if not one_of_several:
            expect("blocks registered that must not be", gained, set())

    def freed(self, request: Request) -> None:
        """Follows a ``free``."""
        del self.requests[request.request_id], self.finished[request.request_id]
        for table in self.tables.pop(request.request_id):
            self._give_back([block_id for block_id in reversed(table) if block_id])

    def evicted(self, block_ids: Iterable[int]) -> None:
        """Follows an ``evict_blocks``."""
        for block_id in block_ids:
            self.registered.pop(block_id, None)

    def was_reset(self, answer: bool) -> None:
        """Follows a ``reset_prefix_cache``."""
        expect("answer to reset", answer, not any(self.refs))
        if answer:
            self.registered.clear()

    # Comparison

    def check(self) -> None:
        """Compares everything that the manager shows."""
        manager = self.manager
        pool = manager.block_pool
        expect("eviction order", free_block_ids(manager), self.free)
        expect("reference counts", [block.ref_cnt for block in pool.blocks], self.refs)
        keys = {
            block_id: entry.prefix_hash + entry.group.to_bytes(4, "big") for block_id, entry in self.registered.items()
        }
        expect("registered", {b.block_id: b.block_hash for b in pool.blocks if b.block_hash is not None}, keys)
        expect("index size", len(pool.prefix_index), len(set(keys.values())))
        expect("usage", round(manager.usage, 9), round(1 - len(self.free) / (len(self.refs) - 1), 9))
        for request_id, tables in self.tables.items():
            expect(f"tables of {request_id}", list(manager.get_block_ids(request_id)), tables)
            expect(
                f"common prefix of {request_id}",
                manager.get_num_common_prefix_blocks(request_id),
                [self._common(tables[group], group) for group in range(len(self.specs))],
            )
        self._check_events()

    def _common(self, table: list[int], group: int) -> int:
        if not isinstance(self.specs[group], FullAttentionSpec):
            return 0
        others = [tables[group] for tables in self.tables.values()]
        return next(
            (i for i, block_id in enumerate(table) if any(i >= len(o) or o[i] != block_id for o in others)), len(table)
        )

    def _check_events(self) -> None:
        """Whoever follows the events knows what is registered."""
        for event in self.manager.take_events():
            if isinstance(event, BlockStored):
                self._hittable_by_events.update((event.group_idx, prefix_hash) for prefix_hash in event.block_hashes)
            elif isinstance(event, BlockRemoved):
                self._hittable_by_events.subtract((event.group_idx, prefix_hash) for prefix_hash in event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self._hittable_by_events.clear()
        if self.manager.block_pool.enable_kv_cache_events:
            counted = {key: count for key, count in self._hittable_by_events.items() if count}
            expect("index as events tell it", counted, dict(Counter(entry[:2] for entry in self.registered.values())))

    # Mechanics

    def _blocks_to_take(
        self, request_id: str, hits: Sequence[Sequence[int]], num_hit: int, total: int, end: int, *, cap: bool = False
    ) -> tuple[int, int]:
        """Free blocks needed so that positions up to ``end`` have slots.

        With ``cap``, for the whole sequence, where only the bounds are laid down: what a window can hold at once must
        be there, and one block more may be asked for, as if the window began anywhere in a block.
        """
        least = most = 0
        for group, spec in enumerate(self.specs):
            table = self.tables.get(request_id, [[]] * len(self.specs))[group]
            wanted = range(first_position_read(spec, total) // spec.block_size, math.ceil(end / spec.block_size))
            if table:
                held = [table[i] for i in wanted if i < len(table)]
            else:
                held = [hits[group][i] for i in wanted if i < num_hit // spec.block_size]
            new = len([i for i in wanted if i >= max(len(table), num_hit // spec.block_size)])
            revived = sum(not self.refs[block_id] for block_id in held)
            needed = new + revived
            if cap:
                # Blocks that nobody else holds come back when the window leaves them.
                own = sum(self.refs[block_id] == 1 for block_id in held) if table else 0
                room = self.most_held[group] - own
                least += max(min(needed, room), 0)
                most += max(min(needed, room + (not isinstance(spec, FullAttentionSpec))), 0)
            else:
                least += needed
                most += needed
        return least, most

    def _admit(self, request: Request, hits: Sequence[Sequence[int]], num_hit: int, total: int) -> None:
        self.requests[request.request_id] = request
        self.finished[request.request_id] = num_hit
        self.tables[request.request_id] = tables = []
        for group, spec in enumerate(self.specs):
            skipped = first_position_read(spec, total) // spec.block_size
            shared = list(hits[group][skipped:])
            for block_id in shared:
                if not self.refs[block_id]:
                    self.free.remove(block_id)
                self.refs[block_id] += 1
            tables.append([0] * skipped + shared)

    def _grow(self, request_id: str, end: int) -> Ids:
        grown = []
        for spec, table in zip(self.specs, self.tables[request_id], strict=True):
            count = max(0, math.ceil(end / spec.block_size) - len(table))
            new, self.free = self.free[:count], self.free[count:]
            for block_id in new:
                self.registered.pop(block_id, None)
                self.refs[block_id] = 1
            table += new
            grown.append(new)
        return grown

    def _leaving(self, request_id: str, computed: int) -> Ids:
        """For each group, the blocks that no token from ``computed`` on reads, the last one first."""
        leaving = []
        for spec, table in zip(self.specs, self.tables[request_id], strict=True):
            stop = first_position_read(spec, computed) // spec.block_size
            leaving.append([block_id for block_id in reversed(table[:stop]) if block_id])
        return leaving

    def _leave(self, request_id: str, leaving: Ids) -> None:
        for table, block_ids in zip(self.tables[request_id], leaving, strict=True):
            table[:] = [0 if block_id in block_ids else block_id for block_id in table]
            self._give_back(block_ids)

    def _give_back(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.refs[block_id] -= 1
        free = [block_id for block_id in block_ids if not self.refs[block_id]]
        unhashed = [block_id for block_id in free if block_id not in self.registered]
        self.free = unhashed + self.free + [block_id for block_id in free if block_id in self.registered]


@dataclass
class Cache:
    """A cache for the machine to try.

    Attributes:
        groups: As for :func:`specs_of`.
        num_blocks: Sizes of the pool.
        hasher: Makes the requests' hasher from the hash block size.
        options: For :class:`KVCacheManager`.
    """

    groups: str
    num_blocks: tuple[int, ...] = (6, 12, 24)
    hasher: Callable[[int], BlockHasher] = BlockHasher
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Tracked:
    """A request on its way through the machine.

    Attributes:
        hits: Answer of its last lookup, maybe stale by now.
        arriving: Positions whose keys and values are still on their way from elsewhere.
        floor: Computed tokens at the last allocation: what a window left then cannot be computed again.
    """

    request: Request
    hits: tuple[KVCacheBlocks, int] | None = None
    arriving: range | None = None
    floor: int = 0


MAX_MODEL_LEN = 36

EXTRAS: list[dict[str, Any]] = [
    {},
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    {"lora": LoRAAdapter("l", "a")},
    {"lora": LoRAAdapter("l", "b")},
    {"mm_items": [MultiModalItem("x", 2, 5)]},
    {"mm_items": [MultiModalItem("y", 2, 5)]},
    {"mm_items": [MultiModalItem("x", 3, 5), MultiModalItem("y", 8, 1)]},
]

picks = st.integers(0, 5)
tokens = st.integers(0, 1)
prompts = st.lists(tokens, min_size=1, max_size=MAX_MODEL_LEN)
tails = st.lists(tokens, min_size=1, max_size=12)
lookaheads = st.sampled_from([0, 0, 1, 2, 5])
chunks = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 13, MAX_MODEL_LEN])
rarely = st.sampled_from([False, False, False, True])
reserved_counts = st.sampled_from([0, 0, 0, 1, 4])


class CacheMachine(RuleBasedStateMachine):
    """Drives a manager as a scheduler with every feature would, and a clumsy one at that."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache
        self.waiting: dict[str, Tracked] = {}
        self.running: dict[str, Tracked] = {}
        self.known: deque[Request] = deque(maxlen=6)
        self.num_arrived = 0

    @initialize(
        size=st.integers(0, 2),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
        max_in_flight_tokens=st.sampled_from([None, None, 4, 9]),
        prompts=st.lists(prompts, min_size=1, max_size=3),
    )
    def build(self, size: int, watermark: float, max_in_flight_tokens: int | None, prompts: list[list[int]]) -> None:
        self.manager = make_manager(
            self.cache.num_blocks[size],
            groups=specs_of(self.cache.groups),
            max_model_len=MAX_MODEL_LEN,
            watermark=watermark,
            max_in_flight_tokens=max_in_flight_tokens,
            enable_kv_cache_events=True,
            **self.cache.options,
        )
        self.hasher = self.cache.hasher(self.manager.coordinator.hash_block_size)
        self.books = Books(self.manager, max_in_flight_tokens=max_in_flight_tokens)
        self.shadow = ShadowMemory(self.manager)
        for prompt in prompts:
            self._arrive(prompt, {})

    @precondition(lambda self: len(self.waiting) < 6)
    @rule(prompt=prompts, extra=st.integers(0, len(EXTRAS) - 1))
    def arrive(self, prompt: list[int], extra: int) -> None:
        self._arrive(prompt, EXTRAS[extra])

    @precondition(lambda self: self.known and len(self.waiting) < 6)
    @rule(
        pick=picks,
        keep=st.sampled_from([MAX_MODEL_LEN, 24, 17, 9, 5]),
        tail=tails,
        extra=st.sampled_from([None, None, None, None, *range(len(EXTRAS))]),
        chunk=chunks,
    )
    def arrive_with_a_prefix_of_another(
        self, pick: int, keep: int, tail: list[int], extra: int | None, chunk: int
    ) -> None:
        """Its tokens, and most often its adapter, items and salt too."""
        relative = self.known[pick % len(self.known)]
        same = {key: getattr(relative, key) for key in ("cache_salt", "lora", "mm_items")}
        tracked = self._arrive([*relative.all_token_ids[:keep], *tail], same if extra is None else EXTRAS[extra])
        self._look_up(tracked)
        self._admit(tracked, chunk)

    @precondition(lambda self: self.waiting)
    @rule()
    def look_up(self) -> None:
        for tracked in self.waiting.values():
            self._look_up(tracked)

    @precondition(lambda self: self.waiting)
    @rule(pick=picks, chunk=chunks, lookahead=lookaheads, reserved=reserved_counts, delay=rarely, must_fit=rarely)
    def admit(self, pick: int, chunk: int, lookahead: int, reserved: int, delay: bool, must_fit: bool) -> None:
        tracked = self._pick(self.waiting, pick)
        self._look_up(tracked)
        self._admit(tracked, chunk, lookahead=lookahead, reserved=reserved, delay=delay, must_fit=must_fit)

    @precondition(lambda self: self.found)
    @rule(pick=picks, chunk=chunks, must_fit=rarely)
    def admit_with_hits_of_an_earlier_lookup(self, pick: int, chunk: int, must_fit: bool) -> None:
        self._admit(self._pick(self.found, pick), chunk, must_fit=must_fit)

    @precondition(lambda self: self.found)
    @rule(pick=picks, other=picks, chunk=chunks)
    def admit_with_hits_of_another(self, pick: int, other: int, chunk: int) -> None:
        """Which may be as good as its own, if both have the prefix in common."""
        tracked = self._pick(self.waiting, pick)
        hits = self._pick(self.found, other).hits
        if hits is not None and hits[1] < tracked.request.num_tokens:
            tracked.hits = hits
            self._admit(tracked, chunk)

    @precondition(lambda self: self.waiting)
    @rule(pick=picks, chunk=chunks)
    def admit_without_a_lookup(self, pick: int, chunk: int) -> None:
        """So that one hash comes to name several blocks."""
        tracked = self._pick(self.waiting, pick)
        tracked.hits = self.manager.empty_kv_cache_blocks, 0
        self._admit(tracked, chunk)

    @precondition(lambda self: self.waiting)
    @rule(
        pick=picks, chunk=chunks, external=st.integers(1, MAX_MODEL_LEN), reserved=reserved_counts, delay=st.booleans()
    )
    def admit_with_data_from_elsewhere(self, pick: int, chunk: int, external: int, reserved: int, delay: bool) -> None:
        tracked = self._pick(self.waiting, pick)
        self._look_up(tracked)
        self._admit(tracked, chunk, external=external, reserved=reserved, delay=delay)

    @precondition(lambda self: any(tracked.arriving for tracked in self.running.values()))
    @rule(pick=picks)
    def data_arrives(self, pick: int) -> None:
        tracked = self._pick({name: t for name, t in self.running.items() if t.arriving}, pick)
        request, arriving = tracked.request, tracked.arriving
        assert arriving is not None
        self.shadow.write(request, arriving.start, arriving.stop)
        self.manager.cache_blocks(request, arriving.stop)
        self.books.register(request, arriving.stop)
        request.num_computed_tokens = arriving.stop
        tracked.arriving = None

    @precondition(lambda self: self.ready)
    @rule(pick=picks, chunk=chunks, lookahead=lookaheads, reserved=reserved_counts, delay=rarely, must_fit=rarely)
    def step(self, pick: int, chunk: int, lookahead: int, reserved: int, delay: bool, must_fit: bool) -> None:
        """A chunk of a prompt, or one decoded token."""
        tracked = self._pick(self.ready, pick)
        self._step(tracked, chunk, lookahead=lookahead, reserved=reserved, delay=delay, must_fit=must_fit)

    @precondition(lambda self: self.ready)
    @rule(pick=picks, sampled=st.lists(tokens, min_size=1, max_size=9))
    def decode(self, pick: int, sampled: list[int]) -> None:
        """Several tokens, one a step."""
        tracked = self._pick(self.ready, pick)
        for token in sampled:
            if not self._step(tracked, MAX_MODEL_LEN, sampled=token):
                break

    @precondition(lambda self: self.ready)
    @rule(
        pick=picks,
        sampled=tokens,
        drafts=st.lists(tokens, min_size=1, max_size=6),
        num_accepted=st.integers(0, 6),
        lookahead=lookaheads,
    )
    def speculate(self, pick: int, sampled: int, drafts: list[int], num_accepted: int, lookahead: int) -> None:
        """A step with draft tokens, of which some are accepted."""
        tracked = self._pick(self.ready, pick)
        self._step(
            tracked, MAX_MODEL_LEN, sampled=sampled, drafts=drafts, num_accepted=num_accepted, lookahead=lookahead
        )

    @precondition(lambda self: self.ready)
    @rule(sampled=st.lists(tokens, min_size=1, max_size=9), lookahead=lookaheads)
    def grow_together(self, sampled: list[int], lookahead: int) -> None:
        """A decode step of all requests in one call, several times."""
        for token in sampled:
            batch = [t for t in self.ready.values() if t.request.num_computed_tokens < MAX_MODEL_LEN]
            for tracked in batch:
                if tracked.request.num_computed_tokens == tracked.request.num_tokens:
                    tracked.request.append_output_token_ids(token)
            growth = self.manager.grow([t.request for t in batch], num_lookahead_tokens=lookahead)
            nothing = self.manager.empty_kv_cache_blocks
            for index, tracked in enumerate(batch[: growth.num_grown + 1]):
                request, computed = tracked.request, tracked.request.num_computed_tokens
                fits = index < growth.num_grown
                answer = growth.new_blocks.get(index, nothing) if fits else None
                self.books.allocated(request, answer, 1, num_lookahead=lookahead, one_of_several=True)
                tracked.floor = computed
                if fits:
                    self.shadow.write(request, computed, computed + 1)
                    self.shadow.check_reads(request, computed, computed + 1)
                    request.num_computed_tokens += 1
            self.the_books_agree_with_the_rules()

    @precondition(lambda self: self.ready)
    @rule(pick=picks, num_tokens=st.integers(0, MAX_MODEL_LEN))
    def register_late(self, pick: int, num_tokens: int) -> None:
        """As after a step that delayed it."""
        request = self._pick(self.ready, pick).request
        num_tokens = min(num_tokens, request.num_computed_tokens)
        self.manager.cache_blocks(request, num_tokens)
        self.books.register(request, num_tokens)

    @precondition(lambda self: self.ready)
    @rule(pick=picks, num_tokens=st.integers(1, MAX_MODEL_LEN))
    def go_back(self, pick: int, num_tokens: int) -> None:
        """Computed tokens are thrown away: as far as no window has been left, or anywhere where there is no window."""
        tracked = self._pick(self.ready, pick)
        floor = 0 if all(isinstance(spec, FullAttentionSpec) for spec in self.books.specs) else tracked.floor
        tracked.request.num_computed_tokens = max(floor, tracked.request.num_computed_tokens - num_tokens)

    @precondition(lambda self: self.running)
    @rule(pick=picks)
    def free(self, pick: int) -> None:
        self._free(self._pick(self.running, pick))

    @precondition(lambda self: self.running)
    @rule(pick=picks, chunk=chunks)
    def preempt(self, pick: int, chunk: int) -> None:
        tracked = self._pick(self.running, pick)
        self._free(tracked)
        tracked.request.num_computed_tokens = 0
        tracked.request.num_preemptions += 1
        tracked.arriving = None
        self.waiting[tracked.request.request_id] = tracked

    @precondition(lambda self: self.books.registered)
    @rule(numbers=st.lists(st.integers(0, 23), min_size=1, max_size=4))
    def evict(self, numbers: list[int]) -> None:
        looked_up = [tracked.hits[0] for tracked in self.waiting.values() if tracked.hits]
        found = [block_id for blocks in looked_up for group in blocks.get_block_ids() for block_id in group]
        candidates = [*found, *self.books.registered, 0]
        block_ids = [candidates[number % len(candidates)] for number in numbers]
        self.manager.evict_blocks(block_ids)
        self.books.evicted(block_ids)

    @precondition(lambda self: self.books.registered)
    @rule(number=st.integers(0, 3))
    def reset(self, number: int) -> None:
        """Now and then after all that is running has been freed."""
        if number == 0:
            for tracked in list(self.running.values()):
                self._free(tracked)
        self.books.was_reset(self.manager.reset_prefix_cache())

    @precondition(lambda self: self.known)
    @rule(pick=picks, number=st.integers(0, 20))
    def make_a_mistake(self, pick: int, number: int) -> None:
        """Whatever the caller gets wrong is named, and changes nothing."""
        manager = self.manager
        mistakes: list[tuple[type[Exception], Callable[[], object]]] = [
            (ForeignBlockError, lambda: manager.evict_blocks([1, len(self.books.refs)])),
            (UnknownRequestError, lambda: manager.get_block_ids("nobody")),
        ]
        if self.waiting:
            idle = self._pick(self.waiting, pick).request
            one_block = KVCacheBlocks(tuple(manager.block_pool.blocks[1:2] for _ in self.books.specs))
            mistakes += [
                (UnknownRequestError, lambda: manager.free(idle)),
                (UnknownRequestError, lambda: manager.cache_blocks(idle, 1)),
                (CountError, lambda: manager.allocate_slots(idle, 0)),
                (CountError, lambda: manager.allocate_slots(idle, 1, num_lookahead_tokens=-1)),
                (ComputedTokensError, lambda: manager.allocate_slots(idle, 1, idle.num_tokens + 1)),
                (ComputedTokensError, lambda: manager.allocate_slots(idle, 1, 0, one_block)),
            ]
        if self.running:
            busy = self._pick(self.running, pick).request
            twin = make_request(busy.request_id, [0, 1, 0], manager)
            mistakes += [
                (DuplicateRequestError, lambda: manager.allocate_slots(twin, 1)),
                (DuplicateRequestError, lambda: manager.free(twin)),
                (CountError, lambda: manager.allocate_slots(busy, -1)),
                (CountError, lambda: manager.allocate_slots(busy, 0)),
                (CountError, lambda: manager.allocate_slots(busy, 1, reserved_blocks=-1)),
                (ComputedTokensError, lambda: manager.cache_blocks(busy, busy.num_tokens + 1)),
            ]
            num_slots = min(
                len(table) * spec.block_size
                for table, spec in zip(self.books.tables[busy.request_id], self.books.specs, strict=True)
            )
            if num_slots < busy.num_tokens:
                mistakes += [(ComputedTokensError, lambda: self._claim_computed(busy, num_slots + 1))]
            if busy.num_computed_tokens < busy.num_tokens:
                mistakes += [
                    (HitHandoverError, lambda: manager.allocate_slots(busy, 1, 1)),
                    (HitHandoverError, lambda: manager.allocate_slots(busy, 1, num_external_computed_tokens=1)),
                ]
        error, call = mistakes[number % len(mistakes)]
        before = snapshot(manager)
        with pytest.raises(error):
            call()
        expect("books after a mistake", snapshot(manager), before)

    @invariant()
    def the_books_agree_with_the_rules(self) -> None:
        self.manager.check_invariants()
        self.books.check()

    def teardown(self) -> None:
        """Everything is given back in the end."""
        if not hasattr(self, "manager") or sys.exc_info()[0] is not None:  # a failure is on its way up already
            return
        for tracked in list(self.running.values()):
            self._free(tracked)
        self.the_books_agree_with_the_rules()
        expect("usage with nothing running", self.manager.usage, 0.0)
        expect("number of free blocks", len(self.books.free), len(self.books.refs) - 1)

    @property
    def ready(self) -> dict[str, Tracked]:
        """Requests that can take a step."""
        return {name: tracked for name, tracked in self.running.items() if not tracked.arriving}

    @property
    def found(self) -> dict[str, Tracked]:
        """Waiting requests with hits to hand over."""
        return {name: tracked for name, tracked in self.waiting.items() if tracked.hits and tracked.hits[1]}

    @staticmethod
    def _pick(requests: dict[str, Tracked], pick: int) -> Tracked:
        return list(requests.values())[pick % len(requests)]

    def _arrive(self, prompt: list[int], options: dict[str, Any]) -> Tracked:
        name = f"r{self.num_arrived}"
        self.num_arrived += 1
        request = make_request(name, prompt[:MAX_MODEL_LEN], self.manager, block_hasher=self.hasher, **options)
        self.known.append(request)
        tracked = self.waiting[name] = Tracked(request)
        return tracked

    def _look_up(self, tracked: Tracked) -> None:
        request = tracked.request
        before = snapshot(self.manager)
        blocks, num_hit = self.manager.get_computed_blocks(request)
        expect("books after a lookup", snapshot(self.manager), before)
        longest, ids = self.books.longest_hit(request)
        expect(f"hit length of {request!r}", num_hit, longest)
        expect(f"blocks hit by {request!r}", [list(group) for group in blocks.get_block_ids()], ids)
        self.shadow.check_hit(request, blocks, num_hit)
        tracked.hits = blocks, num_hit

    def _admit(
        self,
        tracked: Tracked,
        chunk: int,
        *,
        lookahead: int = 0,
        external: int = 0,
        reserved: int = 0,
        delay: bool = False,
        must_fit: bool = False,
    ) -> None:
        request = tracked.request
        assert tracked.hits is not None
        hits, num_hit = tracked.hits
        external = min(external, request.num_tokens - 1 - num_hit)
        total = num_hit + external
        num_new = 0 if external and delay else min(chunk, request.num_tokens - total)
        before = snapshot(self.manager)

        def allocate() -> KVCacheBlocks | None:
            return self.manager.allocate_slots(
                request,
                num_new,
                num_hit,
                hits,
                num_lookahead_tokens=lookahead,
                num_external_computed_tokens=external,
                delay_cache_blocks=delay,
                full_sequence_must_fit=must_fit,
                reserved_blocks=reserved,
            )

        hit_ids = hits.get_block_ids()
        if self.books.are_stale(request, hit_ids, num_hit):
            with pytest.raises(StaleHitError):
                allocate()
            expect("books after stale hits", snapshot(self.manager), before)
            tracked.hits = None
            return
        answer = allocate()
        self.books.allocated(
            request,
            answer,
            num_new,
            hits=hit_ids,
            num_hit=num_hit,
            num_external=external,
            num_lookahead=lookahead,
            reserved=reserved,
            must_fit=must_fit,
            delay=delay,
        )
        if answer is None:
            expect("books after a refusal", snapshot(self.manager), before)
            return
        del self.waiting[request.request_id]
        self.running[request.request_id] = tracked
        tracked.hits = None
        tracked.floor = total
        if external and delay:
            tracked.arriving = range(num_hit, total)
            return
        self.shadow.write(request, num_hit, total + num_new)
        self.shadow.check_reads(request, total, total + num_new)
        request.num_computed_tokens = total + num_new

    def _step(
        self,
        tracked: Tracked,
        chunk: int,
        *,
        sampled: int = 0,
        drafts: Sequence[int] = (),
        num_accepted: int = 0,
        lookahead: int = 0,
        reserved: int = 0,
        delay: bool = False,
        must_fit: bool = False,
    ) -> bool:
        """Computes the next tokens; drafts come after the last of the request's own. False: no room, or done."""
        request = tracked.request
        computed = request.num_computed_tokens
        if computed == request.num_tokens:
            if computed == MAX_MODEL_LEN:
                self._free(tracked)
                return False
            request.append_output_token_ids(sampled)
        rest = request.num_tokens - computed
        num_known = min(chunk, rest)
        drafts = drafts[: MAX_MODEL_LEN - request.num_tokens] if num_known == rest else ()
        num_new = num_known + len(drafts)
        answer = self.manager.allocate_slots(
            request,
            num_new,
            num_lookahead_tokens=lookahead,
            delay_cache_blocks=delay,
            full_sequence_must_fit=must_fit,
            reserved_blocks=reserved,
        )
        self.books.allocated(
            request, answer, num_new, num_lookahead=lookahead, reserved=reserved, must_fit=must_fit, delay=delay
        )
        tracked.floor = computed
        if answer is None:
            return False
        self.shadow.write(request, computed, computed + num_new, draft_token_ids=drafts)
        self.shadow.check_reads(request, computed, computed + num_new, draft_token_ids=drafts)
        request.num_computed_tokens = computed + num_new
        if drafts:
            accepted = list(drafts[:num_accepted])
            request.append_output_token_ids([*accepted, sampled][: MAX_MODEL_LEN - request.num_tokens])
            request.num_computed_tokens = computed + num_known + len(accepted)
        return True

    def _claim_computed(self, request: Request, num_tokens: int) -> None:
        computed, request.num_computed_tokens = request.num_computed_tokens, num_tokens
        try:
            self.manager.allocate_slots(request, 1)
        finally:
            request.num_computed_tokens = computed

    def _free(self, tracked: Tracked) -> None:
        self.manager.free(tracked.request)
        self.books.freed(tracked.request)
        del self.running[tracked.request.request_id]


counts = st.sampled_from([1, 1, 2, 4, 4, 8, 8, 16, 0, -1, 30, 10**6])
mostly_zero = st.one_of(st.just(0), st.just(0), st.just(0), st.just(0), counts)


class AnythingGoes(RuleBasedStateMachine):
    """Makes any call with any arguments, in any order: it may be refused, by a KVCacheError that changes nothing."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache

    @initialize(
        num_blocks=st.sampled_from([4, 8, 16]),
        max_model_len=st.sampled_from([1, 7, 16, 20]),
        watermark=st.sampled_from([0.0, 0.3]),
        max_in_flight_tokens=st.sampled_from([None, 1, 5]),
        lengths=st.lists(st.sampled_from([3, 8, 17, 30]), min_size=4, max_size=4),
        period=st.integers(1, 40),
    )
    def build(
        self,
        num_blocks: int,
        max_model_len: int,
        watermark: float,
        max_in_flight_tokens: int | None,
        lengths: list[int],
        period: int,
    ) -> None:
        specs = specs_of(self.cache.groups)
        self.manager = make_manager(
            num_blocks,
            groups=specs,
            max_model_len=max_model_len,
            watermark=watermark,
            max_in_flight_tokens=max_in_flight_tokens,
            enable_kv_cache_events=True,
            **self.cache.options,
        )
        hasher = self.cache.hasher(self.manager.coordinator.hash_block_size)
        hashers = [hasher, hasher, hasher, None]
        # Two of them have one id.
        self.requests = [
            make_request(name, [i % period for i in range(length)], self.manager, block_hasher=hasher)
            for name, length, hasher in zip("aabc", lengths, hashers, strict=True)
        ]
        foreign = make_manager(8, groups=specs).block_pool.blocks[1:2]
        self.pins: list[Pin] = []
        self.hits: deque[tuple[KVCacheBlocks | None, int]] = deque(maxlen=5)
        self.hits += [(None, 0), (KVCacheBlocks(tuple(foreign for _ in specs)), specs[0].block_size)]

    @rule(
        pick=picks,
        hit=st.one_of(st.none(), picks),
        num_new=counts,
        num_hit=st.one_of(st.none(), st.none(), counts),
        lookahead=mostly_zero,
        external=mostly_zero,
        reserved=mostly_zero,
        delay=rarely,
        must_fit=rarely,
    )
    def allocate(
        self,
        pick: int,
        hit: int | None,
        num_new: int,
        num_hit: int | None,
        lookahead: int,
        external: int,
        reserved: int,
        delay: bool,
        must_fit: bool,
    ) -> None:
        """With its own hits, or with those of another, of long ago, or of another cache."""
        if hit is None:
            self.look_up(pick)
        blocks, num_found = self.hits[-1 if hit is None else hit % len(self.hits)]
        self._call(
            self.manager.allocate_slots,
            self._pick(pick),
            num_new,
            num_found if num_hit is None else num_hit,
            blocks,
            num_lookahead_tokens=lookahead,
            num_external_computed_tokens=external,
            delay_cache_blocks=delay,
            full_sequence_must_fit=must_fit,
            reserved_blocks=reserved,
        )

    @rule(pick=picks)
    def look_up(self, pick: int) -> None:
        found = self._call(self.manager.get_computed_blocks, self._pick(pick))
        if found is not None:
            self.hits.append(found)

    @rule(pick=picks, num_tokens=st.one_of(st.none(), counts))
    def set_computed_tokens(self, pick: int, num_tokens: int | None) -> None:
        request = self._pick(pick)
        request.num_computed_tokens = request.num_tokens if num_tokens is None else num_tokens

    @rule(pick=picks, new=tails)
    def append(self, pick: int, new: list[int]) -> None:
        self._pick(pick).append_output_token_ids(new)

    @rule(some=st.lists(picks, max_size=3), num_new=counts, lookahead=mostly_zero)
    def grow(self, some: list[int], num_new: int, lookahead: int) -> None:
        self._call(self.manager.grow, [self._pick(pick) for pick in some], num_new, num_lookahead_tokens=lookahead)

    @rule(pick=picks, num_tokens=counts)
    def register(self, pick: int, num_tokens: int) -> None:
        self._call(self.manager.cache_blocks, self._pick(pick), num_tokens)

    @rule(pick=picks)
    def free(self, pick: int) -> None:
        self._call(self.manager.free, self._pick(pick))

    @rule(block_ids=st.lists(st.integers(-1, 16), max_size=3))
    def evict(self, block_ids: list[int]) -> None:
        self._call(self.manager.evict_blocks, block_ids)

    @rule()
    def reset(self) -> None:
        self._call(self.manager.reset_prefix_cache)

    @rule(pick=picks)
    def pin(self, pick: int) -> None:
        pin = self._call(self.manager.residency.pin, self._pick(pick))
        if pin is not None:
            self.pins.append(pin)

    @precondition(lambda self: self.pins)
    @rule(pick=picks, again=rarely)
    def unpin(self, pick: int, again: bool) -> None:
        pin = self.pins[pick % len(self.pins)]
        self._call(self.manager.residency.unpin, pin)
        if not again:
            self.pins.remove(pin)

    @rule(pick=picks)
    def expect(self, pick: int) -> None:
        self._call(self.manager.residency.expect, self._pick(pick))

    @invariant()
    def the_books_agree_with_themselves(self) -> None:
        self.manager.check_invariants()

    def _pick(self, pick: int) -> Request:
        return self.requests[pick % len(self.requests)]

    def _call(self, call: Callable[..., Any], *args: object, **options: object) -> Any:
        before = snapshot(self.manager)
        try:
            return call(*args, **options)
        except KVCacheError as error:
            expect(f"books after {error!r}", snapshot(self.manager), before)
            return None


def run_machine(
    cache: Cache, *, thorough: bool, machine: Callable[[Cache], RuleBasedStateMachine] = CacheMachine
) -> None:
    """Tries a cache with random sequences of operations: few short ones, or an eighth of the profile's examples."""
    num_examples = settings().max_examples
    run_state_machine_as_test(
        lambda: machine(cache),  # type: ignore[arg-type]  # any factory will do
        settings=settings(
            max_examples=num_examples // 8 if thorough else max(4, num_examples // 50),
            stateful_step_count=40 if thorough else 20,
        ),
    )
