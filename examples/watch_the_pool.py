"""Watch the books at work: three requests in a pool of ten blocks, step by step, as a web page.

    python examples/watch_the_pool.py [pool.html]

Two requests share a prompt, one of them finishes, and a third one overwrites what is left of it. The page it writes is
the walk-through of docs/inspect.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvcore import BlockHasher, FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheManager, Request
from kvcore.snapshot import Snapshot
from kvcore.snapshot_html import snapshots_to_html

TITLE = "Three requests in a pool of ten blocks"
BLOCK_SIZE = 4
SYSTEM_PROMPT = list(range(100, 108))  # two blocks


class Watched:
    """A manager, and a snapshot after each thing that was done with it."""

    def __init__(self, num_blocks: int) -> None:
        spec = FullAttentionSpec(BLOCK_SIZE, num_kv_heads=8, head_size=64, dtype="bfloat16")
        self.manager = KVCacheManager(KVCacheConfig(num_blocks, [KVCacheGroupSpec(["layers.0"], spec)]), 64)
        self.hasher = BlockHasher(BLOCK_SIZE, "sha256_raw")
        self.steps: list[Snapshot] = []
        self.look("A new pool: nothing is held, nothing is cached")

    def look(self, label: str) -> None:
        self.steps.append(self.manager.snapshot(label, previous=self.steps[-1] if self.steps else None))

    def prefill(self, name: str, tokens: list[int]) -> Request:
        request = Request(name, tokens, block_hasher=self.hasher)
        cached, hit = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, len(tokens) - hit, hit, cached) is None:
            raise RuntimeError(f"{name} does not fit")
        request.num_computed_tokens = len(tokens)
        self.look(f"{name} arrives with {len(tokens)} tokens and finds {hit} of them")
        return request

    def decode(self, request: Request, token: int) -> None:
        request.append_output_token_ids(token)
        if self.manager.allocate_slots(request, 1) is None:
            raise RuntimeError(f"{request.request_id} cannot grow")
        request.num_computed_tokens += 1
        self.look(f"{request.request_id} computes one more token, its number {request.num_tokens}")

    def finish(self, request: Request) -> None:
        self.manager.free(request)
        self.look(f"{request.request_id} is finished: what was full stays cached until it is overwritten")


def watch() -> list[Snapshot]:
    """The steps of the demo."""
    watched = Watched(num_blocks=11)  # ten, and the null block
    first = watched.prefill("first", [*SYSTEM_PROMPT, 1, 2, 3, 4, 5])
    second = watched.prefill("second", [*SYSTEM_PROMPT, 6, 7, 8])
    for token in (9, 10):  # the first of them fills a block, the second needs a new one
        watched.decode(second, token)
    watched.finish(first)
    watched.prefill("third", list(range(200, 223)))  # takes all that is free, the cached block of the first one last
    watched.finish(second)
    watched.prefill("first", first.all_token_ids)  # once more: what it shared is still there, its own block is not
    return watched.steps


def page() -> str:
    """The demo as a web page."""
    return snapshots_to_html(watch(), title=TITLE)


def main(path: str = "pool.html") -> None:
    steps = watch()
    Path(path).write_text(page(), "utf-8")
    for number, step in enumerate(steps, 1):
        print(f"{number:2}  {step.usage:4.0%} in use, {step.counts['cached']} cached and free: {step.label}")
    print(f"written to {path}: open it in a browser")


if __name__ == "__main__":
    main(*sys.argv[1:2])
