"""KVCacheManager in a loop of your own: admission, chunked prefill, decode, preemption, free.

The model is a stand-in that keeps one number for each slot of its cache and sees a request only through the block
table: a block shared wrongly, or overwritten too early, would change the tokens.
"""

from __future__ import annotations

import zlib
from collections import deque

from kvcore import BlockHasher, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request

BLOCK_SIZE = 4
TOKENS_PER_STEP = 16  # over all requests; longer prompts are computed in chunks


class FakeModel:
    """Its next token depends on every token that the block table leads to."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = [0] * (num_blocks * BLOCK_SIZE)

    def run(self, tokens: list[int], start: int, stop: int, block_table: list[int]) -> int:
        slots = [block_table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(stop)]
        for p in range(start, stop):
            self.cache[slots[p]] = tokens[p]
        return zlib.crc32(repr([self.cache[slot] for slot in slots]).encode()) % 50_000


class Loop:
    """First come, first served. When blocks run out, the youngest running request is preempted."""

    def __init__(self, num_blocks: int) -> None:
        spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=8, head_size=64, dtype="bfloat16")
        config = KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layers.0"], spec)])
        self.max_model_len = (num_blocks - 1) * BLOCK_SIZE  # what fits when it is alone; block 0 is the null block
        self.manager = KVCacheManager(config, self.max_model_len)
        self.hasher = BlockHasher(BLOCK_SIZE)
        self.model = FakeModel(num_blocks)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stop_at: dict[str, int] = {}
        self.num_hit_tokens = self.num_preemptions = 0

    def add(self, request_id: str, prompt: list[int], max_new_tokens: int) -> Request:
        if len(prompt) + max_new_tokens > self.max_model_len:
            raise ValueError(f"{request_id} may become longer than the cache: {self.max_model_len} tokens")
        request = Request(request_id, prompt, block_hasher=self.hasher)
        self.stop_at[request_id] = len(prompt) + max_new_tokens
        self.waiting.append(request)
        return request

    def step(self) -> None:
        budget, scheduled, room = TOKENS_PER_STEP, [], True
        for request in list(self.running):  # oldest first: a chunk of a prompt, or one token
            num_new = min(request.num_tokens - request.num_computed_tokens, budget)
            while num_new and request in self.running and self.manager.allocate_slots(request, num_new) is None:
                self.preempt(self.running.pop())
                room = False
            if num_new and request in self.running:
                scheduled.append((request, num_new))
                budget -= num_new
        while self.waiting and budget and room:
            request = self.waiting[0]
            cached, hit = self.manager.get_computed_blocks(request)
            num_new = min(request.num_tokens - hit, budget)
            room = self.manager.allocate_slots(request, num_new, hit, cached, full_sequence_must_fit=True) is not None
            if room:
                request.num_computed_tokens = hit
                self.num_hit_tokens += hit
                self.running.append(self.waiting.popleft())
                scheduled.append((request, num_new))
                budget -= num_new
        for request, num_new in scheduled:
            (block_table,) = self.manager.get_block_ids(request.request_id)
            start, stop = request.num_computed_tokens, request.num_computed_tokens + num_new
            token = self.model.run(request.all_token_ids, start, stop, block_table)
            request.num_computed_tokens = stop
            if stop == request.num_tokens:  # all known tokens are computed, so this is the next one
                request.append_output_token_ids(token)
                if request.num_tokens == self.stop_at[request.request_id]:
                    self.manager.free(request)
                    self.running.remove(request)

    def preempt(self, request: Request) -> None:
        self.manager.free(request)
        request.num_computed_tokens = 0  # it comes back through a lookup, and hits what is left of its blocks
        self.waiting.appendleft(request)
        self.num_preemptions += 1


def main() -> None:
    answers = []
    for num_blocks in (200, 14):
        loop = Loop(num_blocks)
        requests = [loop.add(f"r{i}", [*range(1000, 1021), i, i, i], max_new_tokens=12) for i in range(4)]
        while loop.waiting or loop.running:
            loop.step()
        answers.append([request.output_token_ids for request in requests])
        print(f"{num_blocks:3} blocks: {loop.num_hit_tokens} tokens hit, {loop.num_preemptions} preemptions")
    print(f"the answers are {'the same' if answers[0] == answers[1] else 'DIFFERENT'}; the first one: {answers[0][0]}")


if __name__ == "__main__":
    main()
