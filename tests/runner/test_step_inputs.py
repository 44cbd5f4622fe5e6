"""What a step's tensors hold, and how it gets to the device: one copy, and only the rows that changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import CountError
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from runner import step_inputs
from runner.batch import Batch, SequenceSlice
from runner.staging import ALIGNMENT, StagingBuffer, section_bytes
from runner.step_inputs import StepInputs
from tests.runner.paged_reference import blocks_of
from tests.runner.recorded_ops import RecordingMode

CONFIG = KVCacheConfig(
    1000,
    [
        KVCacheGroupSpec(["a"], FullAttentionSpec(4, 2, 8, "float32")),
        KVCacheGroupSpec(["b"], SlidingWindowSpec(8, 1, 8, "float32", 16)),
    ],
)


def inputs_for(*, max_num_seqs: int = 4, max_model_len: int = 64, separate: bool = True) -> StepInputs:
    return StepInputs(
        CONFIG, max_num_batched_tokens=64, max_num_seqs=max_num_seqs, max_model_len=max_model_len, separate=separate
    )


def slice_of(
    name: str, computed: int, tokens: list[int], new: KVCacheBlocks | None, *, samples: bool = True
) -> SequenceSlice:
    return SequenceSlice(name, tokens, computed, new, samples)


def addresses(batch: Batch) -> list[int]:
    tensors = [batch.input_ids, batch.position_ids, batch.logits_indices]
    for group in batch.groups:
        tensors += [group.slot_mapping, group.query_start_loc, group.seq_lens, group.row_index]
    return [tensor.data_ptr() for tensor in tensors]


class Book:
    """Requests that grow at random, and what a step of some of them has to hold."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tables: dict[str, list[list[int]]] = {}
        self.lengths: dict[str, int] = {}
        self.next_block = 1

    def step(self, name: str, num_tokens: int) -> SequenceSlice:
        computed = self.lengths.get(name, 0)
        tables = self.tables.setdefault(name, [[], []])
        new: list[list[int]] = []
        for table, group in zip(tables, CONFIG.kv_cache_groups, strict=True):
            missing = -(-(computed + num_tokens) // group.kv_cache_spec.block_size) - len(table)
            new.append(list(range(self.next_block, self.next_block + missing)))
            self.next_block += missing
            table += new[-1]
        self.lengths[name] = computed + num_tokens
        tokens = [self.rng.randrange(100) for _ in range(num_tokens)]
        return SequenceSlice(name, tokens, computed, blocks_of(*new) if any(new) else None, samples=True)

    def check(self, batch: Batch, sequences: list[SequenceSlice]) -> None:
        for i, (group, spec) in enumerate(
            zip(batch.groups, (g.kv_cache_spec for g in CONFIG.kv_cache_groups), strict=True)
        ):
            tables = [self.tables[sequence.request_id][i] for sequence in sequences]
            rows = group.block_table.tolist()[: len(sequences)]
            for row, table in zip(rows, tables, strict=True):
                assert row[: len(table)] == table
            assert group.block_ids[: len(sequences)] == tables
            slots = [
                table[position // spec.block_size] * spec.block_size + position % spec.block_size
                for table, s in zip(tables, sequences, strict=True)
                for position in range(s.num_computed_tokens, s.num_computed_tokens + len(s.token_ids))
            ]
            assert group.slot_mapping.tolist()[: len(slots)] == slots
            assert group.seq_lens.tolist()[: len(sequences)] == [
                s.num_computed_tokens + len(s.token_ids) for s in sequences
            ]


@given(st.data())
def test_device_tables_follow_requests_that_come_grow_and_go(data: st.DataObject) -> None:
    inputs, book = inputs_for(separate=data.draw(st.booleans())), Book(1)
    for _ in range(data.draw(st.integers(1, 8))):
        names = data.draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True))
        gone = [name for name in book.tables if name not in names]
        inputs.forget(gone)
        for name in gone:
            del book.tables[name], book.lengths[name]
        sequences = []
        for name in names:
            room = 64 - book.lengths.get(name, 0)
            if room:
                sequences.append(book.step(name, data.draw(st.integers(1, min(room, 16)))))
        if sequences:
            book.check(inputs.lay_out(sequences), sequences)


def num_copies(work: Callable[[], Batch]) -> tuple[int, Batch]:
    """How often something is copied as a whole while a step is laid out, and the step."""
    with RecordingMode() as mode:
        batch = work()
    return sum(func is torch.ops.aten.copy_.default for func, *_ in mode.operations), batch


@pytest.mark.parametrize("num_rows", [2, 15])
def test_more_changed_rows_than_there_is_room_for_take_further_copies(
    monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    monkeypatch.setattr(step_inputs, "UPDATE_BYTES", 100)
    inputs, book = inputs_for(max_num_seqs=15, max_model_len=1024), Book(2)
    names = [f"long-{i}" for i in range(num_rows)]
    book.lengths = dict.fromkeys(names, 990)  # 248 blocks of 4 tokens
    sequences = [book.step(name, 3) for name in names]
    copies, batch = num_copies(lambda: inputs.lay_out(sequences))
    book.check(batch, sequences)
    assert copies > (2 if num_rows == 2 else 6)


@pytest.mark.parametrize("padded", [False, True])
def test_a_step_is_sent_in_one_copy_whatever_it_holds(padded: bool) -> None:
    inputs, book = inputs_for(), Book(3)
    for num_tokens in (5, 1, 1, 1, 1):
        sequences = [book.step(name, num_tokens) for name in "abcd"]
        lay_out = partial(inputs.lay_out_padded, size=4) if padded and num_tokens == 1 else inputs.lay_out
        copies, batch = num_copies(partial(lay_out, sequences))
        book.check(batch, sequences)
        assert copies == 1


def test_rows_that_did_not_change_are_not_sent() -> None:
    inputs, book = inputs_for(), Book(4)
    inputs.lay_out([book.step(name, 9) for name in "ab"])
    for table in inputs.tables:
        table._device[1] = -7  # what the device has of "b"
    a, b = book.step("a", 8), book.step("b", 1)
    assert b.new_blocks is None
    full, window = inputs.lay_out([a, b]).groups
    assert full.block_table[0, :5].tolist() == book.tables["a"][0]
    assert set(full.block_table[1].tolist()) == set(window.block_table[1].tolist()) == {-7}


def test_what_changed_before_a_step_that_was_refused_is_still_sent() -> None:
    inputs, book = inputs_for(), Book(7)
    good, bad = book.step("a", 9), SequenceSlice("b", [1, 2], 3, blocks_of([900], [901]), samples=True)
    with pytest.raises(CountError, match="no block for position 4"):
        inputs.lay_out([good, bad])
    inputs.forget(["b"])
    again = [book.step("a", 1)]
    assert again[0].new_blocks is None
    book.check(inputs.lay_out(again), again)


def test_a_padded_step_lies_where_the_first_of_its_size_lay_and_its_padding_is_nothing() -> None:
    inputs, book = inputs_for(), Book(5)
    empty = inputs.lay_out_padded([], 4)
    where = addresses(empty)
    assert [group.slot_mapping.tolist() for group in empty.groups] == [[-1] * 4] * 2
    inputs.lay_out([book.step(name, 7) for name in "abc"])
    for _ in range(2):
        sequences = [book.step(name, 1) for name in "abc"]
        batch = inputs.lay_out_padded(sequences, 4)
    assert all(sequence.new_blocks is not None for sequence in sequences), "a block that the device has to be told of"
    book.check(batch, sequences)
    assert addresses(batch) == where
    assert batch.logits_indices.tolist() == [0, 1, 2, 3]
    assert batch.position_ids.tolist() == [[8, 8, 8, 0]]
    for group in batch.groups:
        assert group.seq_lens.tolist() == [9, 9, 9, 0]
        assert group.slot_mapping[3] == -1
        assert min(group.slot_mapping[:3].tolist()) > 0
        assert group.query_start_loc.tolist() == [0, 1, 2, 3, 4]
        assert not group.block_table[3].any()
        assert list(group.context_lens) == [64] * 4, "bounds for whatever is replayed"
        assert group.width == 64 // group.spec.block_size


def test_a_request_without_room_is_refused() -> None:
    inputs, book = inputs_for(max_num_seqs=1), Book(6)
    inputs.lay_out([book.step("a", 3)])
    with pytest.raises(CountError, match="rows are taken"):
        inputs.lay_out([book.step("b", 3)])
    with pytest.raises(CountError, match="all 1 rows are taken"):
        inputs.lay_out_padded([book.step("d", 1)], 1)
    inputs.forget(["a", "never seen"])
    again = [book.step("c", 3)]
    book.check(inputs.lay_out(again), again)


def test_sections_of_a_buffer_lie_apart_aligned_and_arrive_together() -> None:
    staging = StagingBuffer(200, "cpu", separate=True)
    for _ in range(2):
        staging.begin()
        first, second = staging.section((3,), torch.int32), staging.section((2, 4), torch.int64)
        first.host[:] = [1, 2, 3]
        second.host[:] = 7
        staging.send()
        assert first.device.tolist() == [1, 2, 3]
        assert second.device.tolist() == [[7] * 4] * 2
        assert second.device.data_ptr() - first.device.data_ptr() == section_bytes((3,), torch.int32) == ALIGNMENT
        first.host[:] = 9
        assert first.device.tolist() == [1, 2, 3], "changed before it was sent"
    with pytest.raises(ValueError, match="a section of 128 bytes does not fit: 120 of 200 are left"):
        staging.section((16,), torch.int64)


@pytest.mark.gpu
def test_what_is_on_its_way_is_not_overwritten_on_the_host() -> None:
    staging = StagingBuffer(64, "cuda")
    seen = []
    for step in range(5):
        staging.begin()
        section = staging.section((4,), torch.int64)
        section.host[:] = step
        torch.cuda._sleep(20_000_000)  # the copy waits behind it
        staging.send()
        seen.append(section.device.clone())
    assert [numbers.tolist() for numbers in seen] == [[step] * 4 for step in range(5)]
