"""A long run on a small pool: nothing piles up, and the books balance at the end."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter

import pytest

from kvcore import BlockHasher, KVCacheBlocks, KVCacheManager, Request
from kvcore.testing import ShadowMemory, free_block_ids, make_manager

NUM_OPERATIONS = 200_000
MAX_MODEL_LEN = 160


class Traffic:
    """A scheduler of small means: requests with shared prefixes come, grow, are preempted, finish."""

    def __init__(self, manager: KVCacheManager, seed: int) -> None:
        self.manager = manager
        self.random = random.Random(seed)
        self.hasher = BlockHasher(manager.coordinator.hash_block_size)
        self.shadow = ShadowMemory(manager)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_calls = 0
        self.seen: Counter[str] = Counter()
        self.prompts = [[self.random.randrange(3) for _ in range(96)] for _ in range(8)]

    def operate(self, num_operations: int) -> None:
        """Makes that many calls of the manager, at least."""
        target = self.num_calls + num_operations
        while self.num_calls < target:
            if len(self.running) < 8 and self.random.random() < 0.3:
                self._admit()
            elif not self.running:
                continue
            elif self.random.random() < 0.9:
                self._step(self.random.choice(self.running))
            else:
                self._disturb()

    def drain(self) -> None:
        """Frees all, then lets one request overwrite the pool: what is cached then does not depend on the past."""
        for request in self.running:
            self.manager.free(request)
        self.running.clear()
        self.waiting.clear()
        pool = self.manager.block_pool
        per_token = sum(1 / group.kv_cache_spec.block_size for group in self.manager.kv_cache_config.kv_cache_groups)
        last = Request("last", range(int(pool.get_num_free_blocks() / per_token)), block_hasher=self.hasher)
        assert self.manager.allocate_slots(last, last.num_tokens) is not None
        self.manager.free(last)
        self.manager.get_computed_blocks(last)

    def _admit(self) -> None:
        if not self.waiting:
            self.seen["arrived"] += 1
            prompt = self.random.choice(self.prompts)[: self.random.randrange(1, 96)]
            tail = [self.random.randrange(3) for _ in range(self.random.randrange(20))]
            salt = self.random.choice([None, None, None, "a"])
            name = f"request {self.seen['arrived']}"
            self.waiting.append(Request(name, prompt + tail, block_hasher=self.hasher, cache_salt=salt))
        request = self.waiting.pop()
        hits, num_hit = self._look_up(request)
        num_new = min(request.num_tokens - num_hit, self.random.randrange(1, 64))
        self.num_calls += 1
        if self.manager.allocate_slots(request, num_new, num_hit, hits) is None:
            self.seen["refusals"] += 1
            self.waiting.append(request)
            if self.running:
                self._free(self.random.choice(self.running))
            return
        self.seen["with hits"] += bool(num_hit)
        self.shadow.write(request, num_hit, num_hit + num_new)
        request.num_computed_tokens = num_hit + num_new
        self.running.append(request)

    def _look_up(self, request: Request) -> tuple[KVCacheBlocks, int]:
        self.num_calls += 1
        hits, num_hit = self.manager.get_computed_blocks(request)
        self.shadow.check_hit(request, hits, num_hit)
        return hits, num_hit

    def _step(self, request: Request) -> None:
        computed = request.num_computed_tokens
        if computed == request.num_tokens:
            if computed == MAX_MODEL_LEN or self.random.random() < 0.04:
                self._free(request)
                return
            request.append_output_token_ids(self.random.randrange(3))
        num_new = min(request.num_tokens - computed, self.random.randrange(1, 64))
        self.num_calls += 1
        if self.manager.allocate_slots(request, num_new, num_lookahead_tokens=self.random.choice([0, 0, 3])) is None:
            self.seen["preemptions"] += 1
            victim = self.random.choice(self.running)
            self._free(victim)
            victim.num_computed_tokens = 0
            self.waiting.append(victim)
            return
        self.shadow.write(request, computed, computed + num_new)
        request.num_computed_tokens = computed + num_new

    def _free(self, request: Request) -> None:
        self.num_calls += 1
        self.manager.free(request)
        self.running.remove(request)

    def _disturb(self) -> None:
        self.num_calls += 1
        self.seen["disturbances"] += 1
        if self.random.random() < 0.8:
            num_blocks = self.manager.kv_cache_config.num_blocks
            self.manager.evict_blocks(self.random.randrange(num_blocks) for _ in range(self.random.randrange(4)))
        elif self.random.random() < 0.1:
            for request in [*self.running]:
                self._free(request)
            assert self.manager.reset_prefix_cache()
        else:
            assert not self.manager.reset_prefix_cache() or not self.running


@pytest.mark.slow
@pytest.mark.parametrize("groups", [["full"], ["full", "sliding:9"]], ids=" and ".join)
def test_200_000_operations_leave_nothing_behind_and_the_books_balance(groups: list[str]) -> None:
    manager = make_manager(100, groups=groups, max_model_len=MAX_MODEL_LEN)
    traffic = Traffic(manager, seed=len(groups))

    def operate(num_operations: int) -> tuple[int, int, int]:
        """Bytes and objects in use afterwards, with the cache in a state that does not depend on what was done."""
        for _ in range(10):
            traffic.operate(num_operations // 10)
            manager.check_invariants()
        traffic.drain()
        gc.collect()
        return tracemalloc.get_traced_memory()[0], len(gc.get_objects()), traffic.seen["arrived"]

    operate(NUM_OPERATIONS // 2)
    tracemalloc.start()
    try:
        bytes_before, objects_before, arrived_before = operate(NUM_OPERATIONS // 10)
        bytes_after, objects_after, arrived_after = operate(NUM_OPERATIONS * 4 // 10)
    finally:
        tracemalloc.stop()

    seen = traffic.seen
    assert traffic.num_calls >= NUM_OPERATIONS
    assert min(seen["refusals"], seen["preemptions"], seen["with hits"], seen["disturbances"]) > 500, seen
    num_requests = arrived_after - arrived_before
    assert num_requests > 1000
    # One object, or 16 bytes, kept per request would be seen.
    assert objects_after - objects_before < num_requests / 2
    assert bytes_after - bytes_before < 16 * num_requests

    for single_type in manager.coordinator.single_type_managers:
        assert not single_type.req_to_blocks
        assert not single_type.num_cached_block
        assert not single_type.num_skipped_block
    assert manager.usage == 0.0
    assert len(manager.block_pool.prefix_index) <= 99
    assert sorted(free_block_ids(manager)) == list(range(1, 100))
    assert manager.reset_prefix_cache()
    assert len(manager.block_pool.prefix_index) == 0
    manager.check_invariants()
