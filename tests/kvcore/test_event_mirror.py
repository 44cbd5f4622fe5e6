"""A mirror fed by events answers as the worker's own manager does."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import AllBlocksCleared, BlockHasher, BlockRemoved, BlockStored, ConfigError, KVEventBatch, Request
from kvcore.event_mirror import IndexMirror
from tests.kvcore.random_worker import RandomWorker

LAYOUTS: dict[str, dict[str, Any]] = {
    "full/4": {},
    "sliding:6/4": {},
    "sliding:1/4": {},
    "chunked:10/4": {"chunk_sizes": {0: 10}},
    "full/4 sliding:6/4": {},
    "sliding:9/2 full/4": {},
    "sliding:3/2 sliding:11/4 full/8": {},
    "full/4 chunked:8/4 sliding:5/4": {"chunk_sizes": {1: 8}},
}


def feed(mirror: IndexMirror, worker: RandomWorker) -> None:
    mirror.apply(KVEventBatch(0.0, worker.manager.take_events()))


@pytest.mark.parametrize(("layout", "options"), LAYOUTS.items(), ids=LAYOUTS)
def test_the_answers_are_the_managers_own_through_ten_thousand_random_operations(
    layout: str, options: dict[str, Any]
) -> None:
    groups = layout.split()
    worker = RandomWorker(groups, num_blocks=40 * len(groups))
    mirror = IndexMirror(**options)
    hits = []
    for _ in range(1_000):
        worker.run(10)
        feed(mirror, worker)
        prompts = [worker.prompt() for _ in range(4)]
        answers = [worker.longest_prefix(prompt) for prompt in prompts]
        assert [mirror.longest_prefix(prompt) for prompt in prompts] == answers
        hits += answers
    assert sum(map(bool, hits)) > 100  # else nothing was compared
    assert len(set(hits)) > 5


def test_a_group_whose_chunks_are_not_known_is_promised_too_little_and_never_too_much() -> None:
    worker = RandomWorker(["full/4", "chunked:8/4"], num_blocks=80)
    mirror = IndexMirror()
    for _ in range(200):
        worker.run(10)
        feed(mirror, worker)
        prompt = worker.prompt()
        assert mirror.longest_prefix(prompt) <= worker.longest_prefix(prompt)


def test_a_cleared_mirror_promises_nothing_that_is_gone_and_is_right_again_after_a_reset() -> None:
    worker = RandomWorker()
    mirror = IndexMirror()
    for _ in range(300):
        worker.run(10)
        if worker.rng.random() < 0.1:
            worker.manager.take_events()  # lost
            mirror.clear()
        feed(mirror, worker)
        prompt = worker.prompt()
        assert mirror.longest_prefix(prompt) <= worker.longest_prefix(prompt)
    for request in list(worker.running):
        worker.free(request)
    worker.manager.reset_prefix_cache()
    worker.run(100)
    feed(mirror, worker)
    for _ in range(50):
        prompt = worker.prompt()
        assert mirror.longest_prefix(prompt) == worker.longest_prefix(prompt)


def prompt_of(tokens: int) -> Request:
    return Request("r", range(tokens), block_hasher=BlockHasher(4, "sha256_raw", seed="0"))


def stored(prompt: Request, **fields: Any) -> BlockStored:
    return BlockStored([*prompt.block_hashes], None, [*prompt.token_ids], 4, **fields)


def mirror_after(*events: Any, **options: Any) -> IndexMirror:
    mirror = IndexMirror(**options)
    mirror.apply(KVEventBatch(0.0, events))
    return mirror


def test_an_empty_mirror_holds_nothing() -> None:
    assert IndexMirror().longest_prefix(prompt_of(9)) == 0
    assert len(IndexMirror()) == 0


def test_the_last_token_of_a_prompt_is_never_held() -> None:
    mirror = mirror_after(stored(prompt_of(8)))
    assert [mirror.longest_prefix(prompt_of(n)) for n in (7, 8, 9)] == [4, 4, 8]


def test_a_prefix_registered_twice_is_held_until_both_blocks_are_gone() -> None:
    prompt = prompt_of(9)
    last = BlockRemoved([prompt.block_hashes[1]])
    assert mirror_after(stored(prompt), stored(prompt), last).longest_prefix(prompt) == 8
    assert mirror_after(stored(prompt), stored(prompt), last, last).longest_prefix(prompt) == 4


def test_blocks_on_other_media_are_passed_over() -> None:
    prompt = prompt_of(9)
    assert mirror_after(stored(prompt, medium="CPU")).longest_prefix(prompt) == 0
    assert mirror_after(stored(prompt, medium="CPU"), medium="CPU").longest_prefix(prompt) == 8
    gone = BlockRemoved([*prompt.block_hashes], medium="CPU")
    assert mirror_after(stored(prompt), gone).longest_prefix(prompt) == 8


def test_hashes_sent_as_numbers_are_found_too() -> None:
    prompt = prompt_of(9)
    event = stored(prompt)
    event.block_hashes = [int.from_bytes(block_hash[-8:], "big") for block_hash in prompt.block_hashes]
    assert mirror_after(event).longest_prefix(prompt) == 8


def test_after_a_reset_nothing_is_held() -> None:
    prompt = prompt_of(9)
    mirror = mirror_after(stored(prompt), AllBlocksCleared())
    assert (mirror.longest_prefix(prompt), len(mirror)) == (0, 0)


def test_a_removal_of_what_was_never_stored_is_passed_over() -> None:
    prompt = prompt_of(9)
    gone = BlockRemoved([*prompt.block_hashes], group_idx=3)
    assert mirror_after(gone, BlockRemoved([b"x"]), stored(prompt), BlockRemoved([b"x"])).longest_prefix(prompt) == 8


def test_a_hash_block_size_that_does_not_fit_the_worker_is_named() -> None:
    mirror = mirror_after(stored(prompt_of(8)), hash_block_size=3)
    with pytest.raises(ConfigError, match="hash_block_size 3 does not divide"):
        mirror.longest_prefix(prompt_of(8))


@pytest.mark.parametrize("options", [{"hash_block_size": 0}, {"chunk_sizes": {1: 0}}])
def test_sizes_below_one_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        IndexMirror(**options)
