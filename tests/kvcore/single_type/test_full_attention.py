"""Full attention: the first miss ends a hit."""

from __future__ import annotations

import pytest

from kvcore.testing import admit, make_manager, make_request


@pytest.mark.parametrize("num_tokens", range(1, 18))
def test_a_hit_is_all_full_blocks_before_the_last_token(num_tokens: int) -> None:
    manager = make_manager(20)
    admit(manager, make_request("a", range(16), manager))
    blocks, num_hit_tokens = manager.get_computed_blocks(make_request("b", range(num_tokens), manager))
    num_blocks = (num_tokens - 1) // 4
    assert num_hit_tokens == 4 * num_blocks
    assert blocks.get_block_ids() == ([1, 2, 3, 4][:num_blocks],)


@pytest.mark.parametrize("missing", [1, 2, 3, 4])
def test_a_miss_ends_it(missing: int) -> None:
    manager = make_manager(20)
    admit(manager, make_request("a", range(16), manager))
    manager.evict_blocks([missing])
    blocks, num_hit_tokens = manager.get_computed_blocks(make_request("b", range(17), manager))
    assert blocks.get_block_ids() == ([*range(1, missing)],)
    assert num_hit_tokens == 4 * (missing - 1)


def test_nothing_is_freed_while_a_request_runs() -> None:
    manager = make_manager(20)
    request = make_request("a", range(4), manager)
    admit(manager, request)
    for token in range(4, 40):
        request.append_output_token_ids(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    assert manager.get_block_ids("a") == ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10],)


class TestCommonPrefix:
    def test_it_is_what_all_running_requests_hold(self) -> None:
        manager = make_manager(20)
        admit(manager, make_request("a", [*range(8), 51, 52, 53, 54], manager))
        assert manager.get_num_common_prefix_blocks("a") == [3]  # it runs alone
        admit(manager, make_request("b", [*range(8), 61, 62], manager))
        assert manager.get_num_common_prefix_blocks("a") == [2]
        assert manager.get_num_common_prefix_blocks("b") == [2]
        admit(manager, make_request("c", range(4), manager))
        assert manager.get_num_common_prefix_blocks("a") == [0]  # c filled a block of its own

    def test_blocks_shared_by_some_are_not_common(self) -> None:
        manager = make_manager(20)
        for name, tokens in (("a", range(13)), ("b", range(13)), ("c", [*range(4), *range(50, 60)])):
            admit(manager, make_request(name, tokens, manager))
        assert manager.get_num_common_prefix_blocks("b") == [1]
        assert manager.get_num_common_prefix_blocks("c") == [1]
