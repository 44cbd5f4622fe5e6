"""Of what windows leave behind, only the blocks at which a later prompt can join in are worth keeping."""

from __future__ import annotations

import gc
import random
import weakref

import pytest

from kvcore import ConfigError, KVCacheManager
from kvcore.spec import KVCacheSpec
from kvcore.testing import admit, assert_eviction_order, make_manager, make_request, make_spec, table

SESSIONS = 6
FIRST_PROMPT = 600
"""Tokens; many windows."""
TURN = 40
"""Tokens that each turn of a conversation adds, half of them generated."""


def answer(manager: KVCacheManager, name: str, prompt: list[int], *, chunk: int = 32) -> tuple[list[int], int]:
    """Runs a request to its end, some output tokens included; all its tokens, and those found in the cache."""
    request = make_request(name, prompt, manager)
    hits, num_hit_tokens = manager.get_computed_blocks(request)
    computed = num_hit_tokens
    while computed < request.num_tokens:
        step = min(chunk, request.num_tokens - computed)
        handed_over = (num_hit_tokens, hits) if computed == num_hit_tokens else ()
        assert manager.allocate_slots(request, step, *handed_over) is not None
        request.num_computed_tokens = computed = computed + step
    for token in range(TURN // 2):
        request.append_output_token_ids(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    manager.free(request)
    manager.check_invariants()
    return request.all_token_ids, num_hit_tokens


def take_turns(
    groups: list[str | KVCacheSpec], window_retention: str, *, occupancy: float, rounds: int = 5
) -> list[list[int]]:
    """Sessions that take turns: for each round after the first, the tokens of each prompt that were not found, beyond
    those that are new in the turn.

    The pool is so large that what all sessions can hit at their ends takes ``occupancy`` of it.
    """
    rng = random.Random(0)
    prompts = [[rng.randrange(1000) for _ in range(FIRST_PROMPT)] for _ in range(SESSIONS)]
    last = FIRST_PROMPT + TURN * rounds
    config = make_manager(10, groups=groups).kv_cache_config
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    at_end = sum(min(last, getattr(spec, "sliding_window", last)) // spec.block_size + 1 for spec in specs)
    manager = make_manager(
        round(SESSIONS * at_end / occupancy), groups=groups, max_model_len=1000, window_retention=window_retention
    )
    missed: list[list[int]] = []
    for turn in range(rounds):
        missed.append([])
        for session, prompt in enumerate(prompts):
            tokens, num_hit_tokens = answer(manager, f"{session}-{turn}", prompt)
            missed[-1].append(len(prompt) - TURN // 2 - num_hit_tokens)
            prompts[session] = tokens + [rng.randrange(1000) for _ in range(TURN // 2)]
    return missed[1:]


HYBRIDS: list[list[str | KVCacheSpec]] = [
    ["full", "sliding:24", "sliding:24", "sliding:24"],
    [make_spec("full", 16), "sliding:24", "sliding:24", "sliding:24"],
    ["full", "chunked:24", "chunked:24", "chunked:24"],
]


@pytest.mark.parametrize("groups", HYBRIDS, ids=["one block size", "two block sizes", "chunks"])
@pytest.mark.parametrize("occupancy", [0.25, 0.5])
def test_sessions_that_take_turns_find_all_of_their_latest_turn_in_every_group(
    groups: list[str | KVCacheSpec], occupancy: float
) -> None:
    for missed in take_turns(groups, "ends", occupancy=occupancy):
        # Only what does not fill a block, of the largest block size, is computed again.
        assert all(0 <= tokens < 16 for tokens in missed)


def test_kept_like_all_else_what_windows_leave_behind_pushes_out_what_is_asked_for() -> None:
    # Why there is a choice at all: the same sessions, in a pool four times as large as what they can hit.
    for missed in take_turns(HYBRIDS[1], "all", occupancy=0.25):
        assert min(missed) >= FIRST_PROMPT


def test_a_question_asked_again_is_found_although_its_answer_has_left_the_window_behind() -> None:
    manager = make_manager(60, groups=["full", "sliding:8"], window_retention="ends")
    question = list(range(33))
    answer(manager, "first", question)
    assert answer(manager, "again", question)[1] == 32


@pytest.mark.parametrize("groups", [["full", "sliding:8"], ["sliding:8", make_spec("full", 8)]])
def test_a_beginning_that_prompts_share_is_found_from_the_third_on(groups: list[str | KVCacheSpec]) -> None:
    manager = make_manager(100, groups=groups, window_retention="ends")
    shared = list(range(40))
    found = []
    for number in range(4):
        # What another request leaves behind takes the place of what was left behind before.
        answer(manager, f"other {number}", [1000 + number] * 60)
        found.append(answer(manager, str(number), [*shared, *[100 + number] * 40])[1])
    assert found[0] == 0
    assert found[2:] == [40, 40]


def test_what_a_window_leaves_behind_goes_before_all_else_and_can_be_hit_until_then() -> None:
    manager = make_manager(12, groups=["sliding:5"], window_retention="ends")
    request = make_request("a", range(20), manager)
    admit(manager, request)
    assert table(manager, request) == [1, 2, 3, 4, 5]
    request.append_output_token_ids(20)
    manager.allocate_slots(request, 1)
    request.num_computed_tokens += 1
    # The next token reads from token 17 on; the same prompt again would end its hit at 16, and need block 4 for that.
    assert table(manager, request) == [0, 0, 0, 0, 5, 3]
    assert_eviction_order(manager, [2, 1, 6, 7, 8, 9, 10, 11, 4])
    assert manager.get_computed_blocks(make_request("b", range(9), manager))[1] == 8
    manager.free(request)
    assert_eviction_order(manager, [3, 2, 1, 6, 7, 8, 9, 10, 11, 4, 5])


@pytest.mark.parametrize("window_retention", ["all", "ends"])
def test_a_request_is_forgotten_when_it_is_free(window_retention: str) -> None:
    manager = make_manager(30, groups=["full", "sliding:5"], window_retention=window_retention)
    request = make_request("a", range(20), manager)
    admit(manager, request)
    manager.free(request)
    alive = weakref.ref(request)
    del request
    gc.collect()
    assert alive() is None


def test_full_attention_keeps_its_order() -> None:
    for window_retention in ("all", "ends"):
        manager = make_manager(8, window_retention=window_retention)
        request = make_request("a", range(12), manager)
        admit(manager, request)
        manager.free(request)
        assert_eviction_order(manager, [4, 5, 6, 7, 3, 2, 1])


def test_an_unknown_retention_is_refused() -> None:
    with pytest.raises(ConfigError, match='window_retention must be "all" or "ends", got \'tails\''):
        make_manager(8, window_retention="tails")
