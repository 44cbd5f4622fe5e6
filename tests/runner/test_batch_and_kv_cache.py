"""Steps as tensors, and the tensors the cache is made of."""

from __future__ import annotations

import pytest
import torch

from kvcore.planning import plan_kv_cache
from kvcore.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from runner.batch import SequenceSlice
from runner.errors import EngineConfigError
from runner.kv_cache import allocate_kv_cache, torch_dtype
from runner.step_inputs import make_batch
from tests.runner.paged_reference import blocks_of

FULL = FullAttentionSpec(4, 2, 8, "float32")
WINDOW = SlidingWindowSpec(8, 1, 8, "float32", 16)
GROUPS = [KVCacheGroupSpec(["a"], FULL), KVCacheGroupSpec(["b"], WINDOW)]
CONFIG = KVCacheConfig(12, GROUPS)


def test_a_step_lays_its_sequences_one_after_another() -> None:
    prefill = SequenceSlice("a", [10, 11, 12, 13, 14], 2, blocks_of([3, 9], [5]), samples=False)
    decode = SequenceSlice("b", [20], 16, blocks_of([1, 2, 4, 6, 7], [0, 0, 8]), samples=True)
    batch = make_batch([prefill, decode], CONFIG)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 14, 20]]
    assert batch.position_ids.tolist() == [[2, 3, 4, 5, 6, 16]]
    assert batch.logits_indices.tolist() == [5]
    full, window = batch.groups
    assert full.query_starts == [0, 5, 6]
    assert list(full.context_lens) == [7, 17]
    # Blocks 3 and 9 of 4 tokens; block 7 for position 16.
    assert full.slot_mapping.tolist() == [14, 15, 36, 37, 38, 28]
    assert full.block_table.tolist() == [[3, 9, 0, 0, 0], [1, 2, 4, 6, 7]]
    assert window.slot_mapping.tolist() == [42, 43, 44, 45, 46, 64]
    assert window.block_table.tolist() == [[5, 0, 0], [0, 0, 8]]


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([], "at least one sequence"),
        ([SequenceSlice("a", [], 3, blocks_of([1]), samples=True)], "at least one token"),
        (
            [SequenceSlice("a", [1, 2], 3, blocks_of([1]), samples=True)],
            "no block for position 4: it holds 1 ",
        ),
    ],
)
def test_a_step_that_cannot_be_laid_out_is_refused(sequences: list[SequenceSlice], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_batch(sequences, KVCacheConfig(12, GROUPS[:1]))


def test_layers_of_different_shapes_share_the_pages_of_a_buffer() -> None:
    config = plan_kv_cache({"a": FULL, "b": SlidingWindowSpec(4, 1, 8, "float32", 16)}, num_blocks=6)
    caches = allocate_kv_cache(config)
    assert {name: tuple(cache.shape) for name, cache in caches.items()} == {"a": (6, 2, 4, 2, 8), "b": (6, 2, 8, 1, 8)}
    assert all(cache.is_contiguous() for cache in caches.values())
    caches["a"][3] = 1.0
    assert [bool(page.any()) for page in caches["b"]] == [False, False, False, True, False, False]


def test_padded_pages_and_missing_tensors_are_refused() -> None:
    padded = plan_kv_cache({"a": FULL, "b": FullAttentionSpec(4, 3, 8, "float32")}, num_blocks=6, pad_pages=True)
    with pytest.raises(EngineConfigError, match=r"layer 'a' needs 6 blocks x 512 bytes, its tensor has 4,608"):
        allocate_kv_cache(padded)
    with pytest.raises(EngineConfigError, match="no tensor for a, b"):
        allocate_kv_cache(KVCacheConfig(6, GROUPS))


def test_element_types_go_by_their_torch_names() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(EngineConfigError, match="'bf16' is not the name"):
        torch_dtype("bf16")
    with pytest.raises(EngineConfigError, match="'nn' is not the name"):
        torch_dtype("nn")
