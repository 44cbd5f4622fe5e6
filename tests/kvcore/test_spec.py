"""Specs and configurations: sizes, and how many blocks a request can hold at once."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from kvcore.spec import DTYPE_BYTES, cdiv
from kvcore.testing import make_manager, make_request

SPECS: list[KVCacheSpec] = [
    FullAttentionSpec(16, 8, 128, "bfloat16"),
    SlidingWindowSpec(16, 8, 128, "bfloat16", 1024),
    ChunkedLocalAttentionSpec(16, 8, 128, "bfloat16", 8192),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_a_page_holds_keys_and_values_of_a_block(spec: KVCacheSpec) -> None:
    assert spec.bytes_per_token == 2 * 8 * 128 * 2  # keys and values, heads, elements, bytes of each
    assert spec.page_size_bytes == 16 * 4096


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float64", 8), ("float32", 4), ("float16", 2), ("bfloat16", 2), ("float8_e4m3fn", 1), ("int8", 1)],
)
def test_its_size_follows_from_the_dtype(dtype: str, size: int) -> None:
    assert DTYPE_BYTES[dtype] == size
    assert FullAttentionSpec(1, 1, 1, dtype).page_size_bytes == 2 * size


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_specs_are_values(spec: KVCacheSpec) -> None:
    assert spec == dataclasses.replace(spec)
    assert hash(spec) == hash(dataclasses.replace(spec))
    assert spec != dataclasses.replace(spec, block_size=32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.block_size = 32  # type: ignore[misc]


def test_specs_of_different_kinds_are_never_equal() -> None:
    assert SlidingWindowSpec(4, 1, 1, "int8", 8) != ChunkedLocalAttentionSpec(4, 1, 1, "int8", 8)


def test_a_config_says_where_layers_live() -> None:
    groups = [KVCacheGroupSpec(["a", "b"], SPECS[0]), KVCacheGroupSpec(["c", "d"], SPECS[1])]
    tensors = [KVCacheTensor(4096, ["a", "c"]), KVCacheTensor(4096, ["b", "d"])]
    config = KVCacheConfig(2, groups, tensors)
    assert config.kv_cache_tensors == tensors
    assert KVCacheConfig(2, groups).kv_cache_tensors == ()


@given(st.integers(0, 1000), st.integers(1, 50))
def test_cdiv_rounds_up(a: int, b: int) -> None:
    assert (cdiv(a, b) - 1) * b < a <= cdiv(a, b) * b


class TestBlocksHeldAtOnce:
    def test_full_attention_holds_the_whole_sequence(self) -> None:
        assert FullAttentionSpec(4, 1, 1, "int8").max_blocks_per_request(17) == 5
        assert FullAttentionSpec(4, 1, 1, "int8").max_blocks_per_request(17, 2) == 5

    def test_a_window_holds_itself_and_the_tokens_in_flight(self) -> None:
        spec = SlidingWindowSpec(4, 1, 1, "int8", 6)
        # 5 tokens of the window and 8 new ones are 13 tokens, which begin inside a block: at most 5 blocks.
        assert spec.max_blocks_per_request(1000, 8) == 5
        assert spec.max_blocks_per_request(1000) == 251
        assert spec.max_blocks_per_request(4, 8) == 2

    def test_a_chunk_holds_itself_and_the_tokens_in_flight(self) -> None:
        assert ChunkedLocalAttentionSpec(4, 1, 1, "int8", 8).max_blocks_per_request(1000, 8) == 4
        assert (
            ChunkedLocalAttentionSpec(4, 1, 1, "int8", 6).max_blocks_per_request(1000, 8) == 5
        )  # begins inside a block
        assert ChunkedLocalAttentionSpec(4, 1, 1, "int8", 8).max_blocks_per_request(1000) == 250
        assert ChunkedLocalAttentionSpec(4, 1, 1, "int8", 8).max_blocks_per_request(6, 8) == 2

    @given(
        kind=st.sampled_from(["full", "sliding:{}", "chunked:{}"]),
        span=st.integers(1, 20),
        block_size=st.integers(1, 6),
        in_flight=st.integers(1, 12),
        max_model_len=st.integers(1, 60),
        data=st.data(),
    )
    def test_no_request_ever_holds_more(
        self, kind: str, span: int, block_size: int, in_flight: int, max_model_len: int, data: st.DataObject
    ) -> None:
        manager = make_manager(200, block_size, [kind.format(span)], max_model_len=max_model_len)
        most = manager.kv_cache_config.kv_cache_groups[0].kv_cache_spec.max_blocks_per_request(max_model_len, in_flight)
        request = make_request("r", range(max_model_len), manager)
        while request.num_computed_tokens < max_model_len:
            step = min(data.draw(st.integers(1, in_flight)), max_model_len - request.num_computed_tokens)
            assert manager.allocate_slots(request, step) is not None
            assert sum(map(bool, manager.get_block_ids("r")[0])) <= most
            request.num_computed_tokens += step
