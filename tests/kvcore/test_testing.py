"""The helpers for people who test against the manager."""

from __future__ import annotations

import subprocess
import sys
from types import EllipsisType

import pytest

import kvcore.testing
from kvcore import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    ExtraKeys,
    FullAttentionSpec,
    KVCacheBlocks,
    LoRAAdapter,
    MultiModalItem,
    SlidingWindowSpec,
)
from kvcore.testing import (
    ShadowMemory,
    admit,
    assert_eviction_order,
    cache_prompt,
    first_position_read,
    free_block_ids,
    make_manager,
    make_request,
    make_spec,
    prefix_identities,
    table,
)


def test_specs_have_short_names() -> None:
    assert make_spec("full") == FullAttentionSpec(4, 1, 1, "float32")
    assert make_spec("sliding:8", 16) == SlidingWindowSpec(16, 1, 1, "float32", 8)
    assert make_spec("chunked:12") == ChunkedLocalAttentionSpec(4, 1, 1, "float32", 12)


@pytest.mark.parametrize("name", ["", "fully", "full:4", "sliding", "sliding:", "sliding:-1", "chunked:x"])
def test_an_unknown_name_of_a_spec_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=r'"full", "sliding:W" or "chunked:C"'):
        make_spec(name)


def test_a_manager_takes_names_and_specs_of_groups_and_the_options_of_the_real_one() -> None:
    manager = make_manager(10, block_size=2, groups=["sliding:6", make_spec("full", 4)], log_stats=True)
    specs = [group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups]
    assert specs == [SlidingWindowSpec(2, 1, 1, "float32", 6), FullAttentionSpec(4, 1, 1, "float32")]
    assert manager.kv_cache_config.num_blocks == 10
    assert manager.make_prefix_cache_stats() is not None


def test_requests_of_one_manager_hit_each_other_without_a_hasher_given() -> None:
    manager = make_manager(10)
    assert admit(manager, make_request("first", range(9), manager)) == 0
    assert admit(manager, make_request("second", range(9), manager)) == 8
    assert admit(manager, make_request("third", range(9), manager, cache_salt="other")) == 0


def test_admitting_computes_all_tokens_and_the_table_can_be_read() -> None:
    manager = make_manager(10, groups=["full", "sliding:5"])
    request = make_request("first", range(9), manager)
    admit(manager, request)
    assert request.num_computed_tokens == 9
    assert (table(manager, request), table(manager, request, 1)) == ([1, 2, 3], [4, 5, 6])
    assert free_block_ids(manager) == [7, 8, 9]


def test_admitting_what_does_not_fit_fails_with_the_request_and_the_pool_named() -> None:
    manager = make_manager(3)
    request = make_request("large", range(9), manager)
    with pytest.raises(AssertionError, match=r"'large'.* does not fit into BlockPool"):
        admit(manager, request)
    assert request.num_computed_tokens == 0


def test_the_example_in_the_module_holds() -> None:
    code = kvcore.testing.__doc__.split("::\n", 1)[1].split("\n:class:", 1)[0]
    lines = [line.removeprefix("    ") for line in code.splitlines()]
    assert "assert_eviction_order" in code
    exec("\n".join(["from kvcore.testing import *", *lines]), {})


def test_the_eviction_order_is_compared_in_whole_or_up_to_an_ellipsis() -> None:
    manager = make_manager(6)
    admit(manager, make_request("first", range(4), manager))
    assert_eviction_order(manager, [2, 3, 4, 5])
    assert_eviction_order(manager, [2, 3, ...])
    assert_eviction_order(manager, [...])
    wrong_orders: list[list[int | EllipsisType]] = [[2, 3, 4], [2, 3, 4, 5, 6], [3, ...], [2, 3, 4, 5, 6, ...], []]
    for wrong in wrong_orders:
        with pytest.raises(AssertionError, match="eviction order differs"):
            assert_eviction_order(manager, wrong)


def test_a_wrong_eviction_order_is_shown_side_by_side() -> None:
    manager = make_manager(5)
    request = make_request("first", range(5), manager)
    admit(manager, request)
    manager.free(request)
    with pytest.raises(AssertionError) as error:
        assert_eviction_order(manager, [2, 4, 3])
    assert str(error.value).splitlines() == [
        "eviction order differs (next victim first):",
        "     expected  actual",
        "   0        2       2",
        ">  1        4       3",
        ">  2        3       4",
        ">  3        -       1  (cached)",
    ]


def test_an_ellipsis_before_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match="once, at the end"):
        assert_eviction_order(make_manager(5), [..., 4])


def test_the_first_position_read_depends_on_the_kind_of_attention() -> None:
    assert [first_position_read(make_spec("full"), position) for position in (0, 7, 8)] == [0, 0, 0]
    assert [first_position_read(make_spec("sliding:3"), position) for position in (0, 2, 3, 8)] == [0, 0, 1, 6]
    assert [first_position_read(make_spec("chunked:4"), position) for position in (0, 3, 4, 11)] == [0, 0, 4, 8]


def test_identities_are_equal_exactly_where_all_that_decides_keys_and_values_is() -> None:
    manager = make_manager(10)

    def identities(tokens: list[int], **options: object) -> list[bytes]:
        return prefix_identities(make_request("r", tokens, manager, **options))

    plain = identities([1, 2, 3, 4])
    assert len(set(plain)) == 4
    assert identities([1, 2, 9, 4])[:2] == plain[:2]
    assert not set(identities([1, 2, 9, 4])[2:]) & set(plain)
    assert identities([1, 2, 3, 4], cache_salt="") == plain
    for options in ({"cache_salt": "s"}, {"lora": LoRAAdapter("a", "b")}):
        assert not set(identities([1, 2, 3, 4], **options)) & set(plain)
    image = identities([1, 2, 3, 4], mm_items=[MultiModalItem("cat", 1, 2)])
    assert image[:1] == plain[:1]
    assert not set(image[1:]) & set(plain[1:])
    moved = identities([1, 2, 3, 4], mm_items=[MultiModalItem("cat", 0, 2)])
    assert not set(moved) & set(image)
    request = make_request("r", [1, 2], manager)
    assert prefix_identities(request, [3, 4]) == plain


def test_shadow_memory_accepts_a_true_hit_and_true_reads() -> None:
    manager = make_manager(20, groups=["full", "sliding:6"])
    shadow = ShadowMemory(manager)
    first, second = (make_request(name, range(13), manager) for name in ("first", "second"))
    admit(manager, first)
    shadow.write(first, 0, 13)
    shadow.check_reads(first, 0, 13)
    blocks, num_hit = manager.get_computed_blocks(second)
    assert num_hit == 12
    shadow.check_hit(second, blocks, num_hit)


def test_shadow_memory_takes_requests_of_ones_own_class() -> None:
    class Own:
        num_computed_tokens = 0
        block_contents = None
        num_tokens = 13

        def __init__(self, request_id: str, first: int) -> None:
            self.request_id = request_id
            self.token_ids = tuple(range(first, first + 13))
            self.extra_keys = ExtraKeys(None, (), "salt")
            self.block_hashes = BlockHasher(4, "sha256_raw").hash_tokens(self.token_ids)

    manager = make_manager(20)
    shadow = ShadowMemory(manager)
    mine, same, other = Own("mine", 0), Own("same", 0), Own("other", 1)
    for request in (mine, other):
        assert manager.allocate_slots(request, 13) is not None
        shadow.write(request, 0, 13)
        shadow.check_reads(request, 0, 13)
    blocks, num_hit_tokens = manager.get_computed_blocks(same)
    shadow.check_hit(same, blocks, num_hit_tokens)
    with pytest.raises(AssertionError, match="another prefix"):
        shadow.check_hit(other, blocks, num_hit_tokens)


def test_shadow_memory_says_which_slot_holds_what_it_should_not() -> None:
    manager = make_manager(20)
    shadow = ShadowMemory(manager)
    request = make_request("request", range(8), manager)
    admit(manager, request)
    shadow.write(request, 0, 6)
    shadow.check_reads(request, 4, 6)
    with pytest.raises(AssertionError, match=r"position 6 .* in block 2, slot 2: never written"):
        shadow.check_reads(request, 6, 8)
    stranger = make_request("request", [9] * 8, manager)
    with pytest.raises(AssertionError, match=r"position 0 .* in block 1, slot 0: another prefix"):
        shadow.check_reads(stranger, 4, 6)


def test_shadow_memory_sees_a_rejected_draft_until_it_is_written_over() -> None:
    manager = make_manager(20)
    shadow = ShadowMemory(manager)
    request = make_request("request", range(3), manager)
    manager.allocate_slots(request, 3, num_lookahead_tokens=2)
    shadow.write(request, 0, 5, draft_token_ids=[3, 9])
    shadow.check_reads(request, 4, 5, draft_token_ids=[3, 9])
    request.append_output_token_ids([3, 4])
    shadow.check_reads(request, 3, 4)
    with pytest.raises(AssertionError, match=r"position 4 .* another prefix"):
        shadow.check_reads(request, 3, 5)
    shadow.write(request, 4, 5)
    shadow.check_reads(request, 3, 5)


def test_shadow_memory_takes_a_block_as_lost_when_another_group_has_written_to_it() -> None:
    manager = make_manager(6, groups=["full", "sliding:4"])
    shadow = ShadowMemory(manager)
    first = make_request("first", range(8), manager)
    admit(manager, first)
    shadow.write(first, 0, 8)
    blocks = manager.get_blocks("first")
    shadow.check_hit(
        first,
        blocks=KVCacheBlocks((blocks.blocks[0], [manager.block_pool.null_block, blocks.blocks[1][1]])),
        num_hit_tokens=8,
    )
    swapped = KVCacheBlocks((blocks.blocks[1], blocks.blocks[0]))
    with pytest.raises(AssertionError, match="not written for this group"):
        shadow.check_hit(first, swapped, 8)


def test_shadow_memory_refuses_hits_of_the_wrong_length_or_with_blocks_nobody_reads() -> None:
    manager = make_manager(20, groups=["sliding:4"])
    shadow = ShadowMemory(manager)
    request = make_request("request", range(8), manager)
    admit(manager, request)
    shadow.write(request, 0, 8)
    blocks = manager.get_blocks("request")
    with pytest.raises(AssertionError, match="2 blocks of 4 tokens in group 0 are no hit of 4"):
        shadow.check_hit(request, blocks, 4)
    with pytest.raises(AssertionError, match="nothing before position 5 is read"):
        shadow.check_hit(request, blocks, 8)
    all_null = KVCacheBlocks(([manager.block_pool.null_block] * 2,))
    with pytest.raises(AssertionError, match=r"position 5 .*: null"):
        shadow.check_hit(request, all_null, 8)


def test_shadow_memory_refuses_positions_without_a_slot_or_a_token() -> None:
    manager = make_manager(20)
    shadow = ShadowMemory(manager)
    request = make_request("request", range(8), manager)
    manager.allocate_slots(request, 4)
    with pytest.raises(AssertionError, match="has no slot for position 4"):
        shadow.write(request, 0, 5)
    with pytest.raises(AssertionError, match="has no position 8, with 0 draft tokens"):
        shadow.write(request, 0, 9)


def test_shadow_memory_keeps_nothing_of_requests_that_are_gone() -> None:
    manager = make_manager(20)
    shadow = ShadowMemory(manager)
    hasher = BlockHasher(4)
    for number in range(100):
        request = make_request(str(number), range(8), manager, block_hasher=hasher)
        admit(manager, request)
        shadow.write(request, 0, 8)
        manager.free(request)
    del request
    assert len(shadow._identities) <= 1


def test_the_helpers_need_no_test_framework() -> None:
    code = "import sys, kvcore.testing; sys.exit(any(m in sys.modules for m in ('pytest', 'hypothesis', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_prompt_is_cached_by_running_it_to_its_end() -> None:
    manager = make_manager(8)
    first = cache_prompt(manager, "first", range(10))
    cache_prompt(manager, "second", range(100, 104))
    assert_eviction_order(manager, [4, 5, 6, 7, 2, 1, 3])
    assert manager.usage == 0
    assert admit(manager, make_request("again", first.all_token_ids, manager)) == 8
