"""Batched growth does what one call for each request would, and stops cleanly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import (
    BlockHasher,
    ComputedTokensError,
    CountError,
    DuplicateRequestError,
    FullAttentionSpec,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheError,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCacheSpec,
    Request,
    RequestProtocolError,
    SlidingWindowSpec,
    TokenRangeError,
    UnknownRequestError,
)
from kvcore.growth import Holder

FULL = FullAttentionSpec(4, 1, 1, "float32")
WINDOW = SlidingWindowSpec(4, 1, 1, "float32", 6)
HASHER = BlockHasher(4, seed="0")


def make_manager(num_blocks: int, specs: Sequence[KVCacheSpec] = (FULL,), *, events: bool = False) -> KVCacheManager:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheManager(KVCacheConfig(num_blocks, groups), 1000, enable_kv_cache_events=events)


def start(manager: KVCacheManager, lengths: Sequence[int]) -> list[Request]:
    """Requests of those lengths, all computed but for one output token that waits."""
    requests = []
    for number, length in enumerate(lengths):
        request = Request(f"r{number}", [number] * length, block_hasher=HASHER)
        assert manager.allocate_slots(request, length) is not None
        request.num_computed_tokens = length
        request.append_output_token_ids(7)
        requests.append(request)
    return requests


def books(manager: KVCacheManager, requests: Sequence[Request]) -> object:
    tables = {request.request_id: manager.get_block_ids(request.request_id) for request in requests}
    queue = [(block.block_id, block.block_hash) for block in manager.block_pool.free_block_queue]
    return tables, queue, [(block.ref_cnt, block.block_hash) for block in manager.block_pool.blocks]


@given(
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=6),
    specs=st.sampled_from([(FULL,), (WINDOW,), (FULL, WINDOW)]),
    spare=st.integers(0, 6),
    new=st.integers(1, 3),
    lookahead=st.integers(0, 3),
    events=st.booleans(),
)
def test_every_step_equals_one_call_for_each_request(
    lengths: list[int], specs: tuple[KVCacheSpec, ...], spare: int, new: int, lookahead: int, events: bool
) -> None:
    num_blocks = 1 + spare + len(specs) * sum(-(-length // 4) for length in lengths)
    batched, single = (make_manager(num_blocks, specs, events=events) for _ in range(2))
    ours, theirs = start(batched, lengths), start(single, lengths)
    for _ in range(9):
        growth = batched.grow(ours, new, num_lookahead_tokens=lookahead)
        expected = {}
        num_grown = len(theirs)
        for index, request in enumerate(theirs):
            blocks = single.allocate_slots(request, new, num_lookahead_tokens=lookahead)
            if blocks is None:
                num_grown = index
                break
            if any(blocks.blocks):
                expected[index] = blocks.get_block_ids()
        assert growth.num_grown == num_grown
        assert {index: blocks.get_block_ids() for index, blocks in growth.new_blocks.items()} == expected
        assert books(batched, ours) == books(single, theirs)
        assert batched.take_events() == single.take_events()
        batched.check_invariants()
        for request in (*ours[:num_grown], *theirs[:num_grown]):
            request.num_computed_tokens += 1
            request.append_output_token_ids(7)


def test_it_stops_at_the_first_that_does_not_fit_and_leaves_the_rest_as_they_were() -> None:
    manager = make_manager(1 + 4)  # three requests of one full block each, one block to spare
    requests = start(manager, [4, 4, 4])
    growth = manager.grow(requests)
    assert growth.num_grown == 1
    assert growth.new_blocks[0].get_block_ids() == ([4],)
    assert manager.get_block_ids("r1") == ([2],)
    assert manager.get_block_ids("r2") == ([3],)


def test_requests_inside_their_last_block_get_nothing_and_are_counted() -> None:
    manager = make_manager(10)
    requests = start(manager, [5, 6])
    growth = manager.grow(requests)
    assert (growth.num_grown, growth.new_blocks) == (2, {})


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)], ids=["full", "hybrid"])
def test_a_request_without_a_hasher_has_nothing_to_register(
    specs: tuple[KVCacheSpec, ...],
) -> None:
    coordinator = make_manager(50, specs).coordinator
    for hasher, quiet_tokens in ((HASHER, 8), (None, 9)):
        request = Request(hasher, range(6), block_hasher=hasher)
        coordinator.admit(request, ((),) * len(specs), 0, 0)
        coordinator.append_new_blocks(hasher, [2] * len(specs))
        coordinator.cache_blocks(request, 6)
        assert Holder(request, coordinator, 1000, KVCacheBlocks(((),))).quiet_tokens == quiet_tokens


class Hashing:
    """A request of one's own that hashes when it is asked, and then refuses a token."""

    block_contents = None
    num_computed_tokens = 0

    def __init__(self, request_id: str, tokens: list[int]) -> None:
        self.request_id = request_id
        self.tokens = tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def block_hashes(self) -> list[bytes]:
        return BlockHasher(4, "sha256_raw").hash_tokens(self.tokens)


@pytest.mark.parametrize("specs", [(FULL,), (WINDOW, FULL)], ids=["full", "hybrid"])
@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_token_that_cannot_be_hashed_is_found_before_anything_changes(
    specs: tuple[KVCacheSpec, ...], lookahead: int
) -> None:
    manager = make_manager(60, specs)
    good, bad = Hashing("good", [*range(20)]), Hashing("bad", [*range(100, 119)])
    for request in (good, bad):
        assert manager.allocate_slots(request, request.num_tokens) is not None
        request.num_computed_tokens = request.num_tokens
    good.tokens.append(5)
    bad.tokens.append(-1)
    before = books(manager, [good, bad])
    for call in (
        lambda: manager.grow([good, bad], num_lookahead_tokens=lookahead),
        lambda: manager.allocate_slots(bad, 1, num_lookahead_tokens=lookahead),
    ):
        with pytest.raises(TokenRangeError):
            call()
        assert books(manager, [good, bad]) == before
    bad.tokens[-1] = 1
    assert manager.grow([good, bad], num_lookahead_tokens=lookahead).num_grown == 2
    manager.check_invariants()


def test_a_token_that_cannot_be_hashed_is_found_before_its_request_is_admitted() -> None:
    manager = make_manager(60, (FULL, WINDOW))
    request = Hashing("late", [*range(20)])
    found = manager.get_computed_blocks(request)
    request.tokens[7] = -1
    with pytest.raises(TokenRangeError):
        manager.allocate_slots(request, 20, found[1], found[0])
    manager.check_invariants()
    assert manager.usage == 0


def test_no_requests_are_no_work() -> None:
    growth = make_manager(2).grow([])
    assert (growth.num_grown, growth.new_blocks) == (0, {})


def test_a_batch_may_be_any_sequence() -> None:
    manager = make_manager(10)
    growth = manager.grow(tuple(start(manager, [4, 5])))
    assert growth.num_grown == 2
    assert growth.new_blocks.keys() == {0}


def test_a_request_that_is_there_twice_grows_once() -> None:
    manager = make_manager(10)
    (request,) = start(manager, [4])
    growth = manager.grow([request, request])
    assert growth.num_grown == 2
    assert {index: blocks.get_block_ids() for index, blocks in growth.new_blocks.items()} == {0: ([2],)}
    assert manager.get_block_ids("r0") == ([1, 2],)


@pytest.mark.parametrize("length", [4, 5])
@pytest.mark.parametrize(
    ("attribute", "value", "error"),
    [
        ("num_computed_tokens", 4.0, ComputedTokensError),
        ("num_computed_tokens", None, ComputedTokensError),
        ("num_tokens", 6.0, RequestProtocolError),
    ],
)
def test_a_request_that_does_not_count_in_whole_numbers_is_found_before_any_grows(
    attribute: str, value: object, error: type[KVCacheError], length: int
) -> None:
    manager = make_manager(10)
    requests = start(manager, [4, length])
    before = books(manager, requests)
    setattr(requests[1], attribute, value)
    with pytest.raises(error, match="'r1'"):
        manager.grow(requests)
    assert books(manager, requests) == before


def test_a_bad_request_anywhere_in_the_batch_gives_nothing_to_any() -> None:
    manager = make_manager(10)
    requests = start(manager, [4, 4])
    before = books(manager, requests)
    too_far = requests[1]
    stranger = Request("stranger", [1])
    twin = Request("r0", [1])
    with pytest.raises(UnknownRequestError, match="'stranger'"):
        manager.grow([*requests, stranger])
    with pytest.raises(DuplicateRequestError, match="'r0'"):
        manager.grow([requests[1], twin])
    too_far.num_computed_tokens = 6
    with pytest.raises(ComputedTokensError, match="'r1'"):
        manager.grow(requests)
    too_far.num_computed_tokens = -1
    with pytest.raises(ComputedTokensError, match="'r1'"):
        manager.grow(requests)
    assert books(manager, requests) == before


@pytest.mark.parametrize(("new", "lookahead"), [(0, 0), (-1, 0), (1, -1), (1.5, 0)])
def test_a_bad_count_is_refused(new: int, lookahead: int) -> None:
    manager = make_manager(10)
    requests = start(manager, [4])
    with pytest.raises(CountError):
        manager.grow(requests, new, num_lookahead_tokens=lookahead)
    assert manager.get_block_ids("r0") == ([1],)
