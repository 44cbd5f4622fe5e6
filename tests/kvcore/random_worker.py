"""A worker that runs made-up requests through a real manager, in a random order that its seed decides."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvcore import BlockHasher, Request
from kvcore.testing import make_manager, make_spec


class RandomWorker:
    """Admits, decodes, preempts, finishes, evicts and resets, in a pool so small that blocks are overwritten all along.

    Args:
        groups: As for :func:`kvcore.testing.make_spec`, with the block size behind a slash: ``"full/4"``.
        seed: Of all that is random.
        num_blocks: Blocks of the pool.
    """

    def __init__(self, groups: Sequence[str] = ("full/4",), seed: int = 0, num_blocks: int = 40) -> None:
        specs = [make_spec(kind, int(size)) for kind, size in (group.split("/") for group in groups)]
        self.manager = make_manager(num_blocks, groups=specs, enable_kv_cache_events=True, log_stats=True)
        self.hasher = BlockHasher(self.manager.coordinator.hash_block_size, seed="0")
        self.rng = random.Random(seed)
        self.families = [[self.rng.randrange(1000) for _ in range(60)] for _ in range(4)]
        self.running: list[Request] = []
        self.num_requests = 0

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            self.operation()

    def operation(self) -> str:
        """Does one thing to the cache; what it was."""
        roll = self.rng.random()
        if roll < 0.25 or not self.running:
            self.admit(self.prompt())
            return "admit"
        if roll < 0.80:
            self.step(self.rng.choice(self.running))
            return "step"
        if roll < 0.97:
            self.free(self.rng.choice(self.running))
            return "free"
        if roll < 0.995:
            num_blocks = len(self.manager.block_pool.blocks)
            self.manager.evict_blocks({self.rng.randrange(num_blocks) for _ in range(3)})
            return "evict"
        for request in list(self.running):
            self.free(request)
        assert self.manager.reset_prefix_cache()
        return "reset"

    def prompt(self) -> Request:
        """A new request, which may begin as others did."""
        shared = self.rng.choice(self.families)[: self.rng.randrange(61)]
        own = [self.rng.randrange(1000) for _ in range(self.rng.randrange(1, 8))]
        self.num_requests += 1
        salt = self.rng.choice([None, None, "salt"])
        return Request(str(self.num_requests), [*shared, *own], block_hasher=self.hasher, cache_salt=salt)

    def admit(self, request: Request) -> None:
        hits, num_hit = self.manager.get_computed_blocks(request)
        num_new = self.rng.randrange(1, request.num_tokens - num_hit + 1)
        if self.manager.allocate_slots(request, num_new, num_hit, hits) is not None:
            request.num_computed_tokens = num_hit + num_new
            self.running.append(request)

    def step(self, request: Request) -> None:
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(self.rng.randrange(1000))
        num_new = self.rng.randrange(1, request.num_tokens - request.num_computed_tokens + 1)
        if self.manager.allocate_slots(request, num_new) is None:
            self.free(request)
        else:
            request.num_computed_tokens += num_new

    def free(self, request: Request) -> None:
        self.running.remove(request)
        self.manager.free(request)

    def longest_prefix(self, prompt: Request) -> int:
        """What the manager itself answers, in tokens."""
        return self.manager.get_computed_blocks(prompt)[1]
