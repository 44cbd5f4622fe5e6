"""Requests: tokens, counts, and what of them is hashed."""

from __future__ import annotations

import copy
import pickle
from array import array
from collections.abc import Callable

import pytest

from kvcore import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    LoRAAdapter,
    MultiModalItem,
    Request,
)

HASHER = BlockHasher(4)


def test_a_new_request_knows_its_prompt_and_has_computed_nothing() -> None:
    request = Request("r", [5, 6, 7, 8, 9], block_hasher=HASHER, priority=3)
    assert request.request_id == "r"
    assert (request.num_tokens, request.num_prompt_tokens, request.num_computed_tokens) == (5, 5, 0)
    assert request.num_preemptions == 0
    assert request.priority == 3
    assert request.all_token_ids == request.prompt_token_ids == [5, 6, 7, 8, 9]
    assert request.output_token_ids == []
    assert (request.cache_salt, request.lora, request.mm_items) == (None, None, ())
    assert len(request.block_hashes) == 1
    assert request.hash_block_size == 4


def test_tokens_are_appended_one_by_one_or_several_at_once() -> None:
    request = Request("r", [5, 6, 7], block_hasher=HASHER)
    request.append_output_token_ids(8)
    request.append_output_token_ids([9, 10])
    request.append_output_token_ids([])
    request.append_output_token_ids(token for token in (11, 12))
    request.append_output_token_ids(array("q", [13]))
    assert request.prompt_token_ids == [5, 6, 7]
    assert request.output_token_ids == [8, 9, 10, 11, 12, 13]
    assert request.all_token_ids == [5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert (request.num_tokens, request.num_prompt_tokens) == (9, 3)
    assert request.block_hashes == Request("s", range(5, 14), block_hasher=HASHER).block_hashes


def test_scalars_of_numpy_are_appended_as_tokens() -> None:
    numpy = pytest.importorskip("numpy")
    request = Request("r", numpy.array([5, 6, 7]), block_hasher=HASHER)
    request.append_output_token_ids(numpy.int64(8))
    request.append_output_token_ids(numpy.array(9))
    request.append_output_token_ids(numpy.array([10, 11]))
    assert request.all_token_ids == [5, 6, 7, 8, 9, 10, 11]
    assert len(request.block_hashes) == 1


def test_a_block_is_hashed_by_the_token_that_fills_it() -> None:
    request = Request("r", [5, 6, 7], block_hasher=HASHER)
    assert request.block_hashes == []
    request.append_output_token_ids(8)
    assert len(request.block_hashes) == 1
    request.append_output_token_ids([1, 2, 3])
    assert len(request.block_hashes) == 1
    request.append_output_token_ids([4, 5, 6, 7, 8])
    assert len(request.block_hashes) == 3


def test_without_a_hasher_nothing_is_hashed() -> None:
    request = Request("r", range(100))
    request.append_output_token_ids(range(100))
    assert request.block_hashes == []
    assert request.block_contents is None
    assert request.hash_block_size is None
    assert request.num_tokens == 200


def test_the_prompt_given_is_not_the_requests_own() -> None:
    prompt = [5, 6, 7, 8]
    request = Request("r", prompt, block_hasher=HASHER)
    prompt.append(9)
    request.append_output_token_ids(10)
    assert prompt == [5, 6, 7, 8, 9]
    assert request.all_token_ids == [5, 6, 7, 8, 10]


def test_lists_of_tokens_that_it_hands_out_are_the_callers_own() -> None:
    request = Request("r", [5, 6, 7, 8], block_hasher=HASHER)
    request.append_output_token_ids(9)
    request.prompt_token_ids.clear()
    request.output_token_ids.clear()
    assert request.prompt_token_ids == [5, 6, 7, 8]
    assert request.output_token_ids == [9]


def test_extra_keys_can_be_read_back() -> None:
    adapter = LoRAAdapter("french", "/adapters/french")
    items = [MultiModalItem("b", 4, 2), MultiModalItem("a", 0, 3)]
    request = Request("r", range(8), cache_salt="tenant", lora=adapter, mm_items=iter(items))
    assert request.cache_salt == "tenant"
    assert request.lora is adapter
    assert request.mm_items == (items[1], items[0])


def test_it_says_how_far_it_is() -> None:
    request = Request("r", range(5))
    request.append_output_token_ids(1)
    request.num_computed_tokens = 5
    assert repr(request) == "Request('r', num_prompt_tokens=5, num_tokens=6, num_computed_tokens=5)"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda request: pickle.loads(pickle.dumps(request))])
def test_a_copy_hits_what_the_request_left_and_grows_by_itself(copied: Callable[[Request], Request]) -> None:
    manager = KVCacheManager(
        KVCacheConfig(20, [KVCacheGroupSpec(["layer"], FullAttentionSpec(4, 1, 1, "float32"))]), 100
    )
    request = Request("r", range(13), block_hasher=HASHER, cache_salt="salt")
    assert request.block_contents is not None  # hits are verified
    manager.allocate_slots(request, 13)
    twin = copied(request)
    assert manager.get_computed_blocks(twin)[1] == 12
    twin.append_output_token_ids([13, 14, 15])
    assert (twin.num_tokens, len(twin.block_hashes)) == (16, 4)
    assert (request.num_tokens, len(request.block_hashes)) == (13, 3)
    request.append_output_token_ids([13, 14, 15])
    assert twin.block_hashes == request.block_hashes
    manager.free(request)
    assert manager.get_computed_blocks(copied(twin))[1] == 12
