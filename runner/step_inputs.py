"""From what the scheduler decided to the tensors of a step: laid out on the host, sent in one copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import torch

from kvcore.block_table import BlockTables
from kvcore.errors import CountError, UnknownRequestError
from kvcore.spec import KVCacheConfig
from runner.batch import Batch, GroupBatch, SequenceSlice
from runner.device_tables import DeviceBlockTable
from runner.staging import StagingBuffer, section_bytes

UPDATE_BYTES = 1 << 20
"""Room for rows of block tables that changed, beside the other inputs of a step. A step with more takes more copies."""


class StepInputs:
    """Lays out steps, and keeps the block tables of the requests that run.

    Every request has a row, which is appended to when it gets blocks: what a step costs here grows with its tokens and
    its new blocks, not with the length of contexts. The numbers of a step, and the rows that changed, go to the device
    in one copy from pinned memory.

    Args:
        kv_cache_config: The groups, in the order of the block tables.
        max_num_batched_tokens: Most tokens of a step.
        max_num_seqs: Most sequences of a step, and most requests that have a row.
        max_model_len: Longest sequence, in tokens.
        device: Where the tensors go.
        separate: Whether that is memory of its own; None: unless it is the CPU's.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device | str = "cpu",
        separate: bool | None = None,
    ) -> None:
        self.device = torch.device(device)
        separate = self.device.type != "cpu" if separate is None else separate
        self.max_model_len = max_model_len
        self._specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._max_num_seqs = max_num_seqs
        self._rows = BlockTables(kv_cache_config, max_num_seqs + 1, max_model_len)
        # Rows are given out from the first, so that the last, which stays empty, is never.
        self._padding = max_num_seqs
        self.tables = [DeviceBlockTable(table, self.device, separate=separate) for table in self._rows.tables]
        self._update_bytes = max(UPDATE_BYTES, *(table.row_bytes for table in self.tables))
        step_bytes = (
            (2 + len(self._specs)) * section_bytes((max_num_batched_tokens,), torch.int64)
            + 2 * section_bytes((max_num_seqs,), torch.int64)
            + 2 * section_bytes((max_num_seqs + 1,), torch.int32)
        )
        self._staging = StagingBuffer(step_bytes + self._update_bytes, self.device, separate=separate)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Give back the rows of requests that run no more, as far as they have one. O(requests)."""
        for request_id in request_ids:
            with suppress(UnknownRequestError):  # it never came to a step
                self._rows.remove(request_id)

    def forget_all(self) -> None:
        """Give back all rows. O(requests)."""
        self.forget(list(self._rows))

    def lay_out(self, sequences: Sequence[SequenceSlice]) -> Batch:
        """A step of these sequences. O(tokens + new blocks).

        Raises:
            ValueError: No sequences, or no tokens in one of them.
            CountError: A token that no block is there for; a request more than there are rows; a row too long.
        """
        if not sequences:
            raise ValueError("a step needs at least one sequence")
        if not all(sequence.token_ids for sequence in sequences):
            raise ValueError("every sequence of a step needs at least one token to compute")
        rows = [self._row(sequence) for sequence in sequences]
        tokens = [token for sequence in sequences for token in sequence.token_ids]
        query_lens = [len(sequence.token_ids) for sequence in sequences]
        context_lens = [s.num_computed_tokens + n for s, n in zip(sequences, query_lens, strict=True)]
        samples = [sequence.samples for sequence in sequences]
        width = [max(int(table.host.num_blocks[rows].max()), 1) for table in self.tables]
        return self._send(rows, tokens, query_lens, context_lens, samples, width)

    def lay_out_padded(self, sequences: Sequence[SequenceSlice], size: int) -> Batch:
        """A step of sequences with one token each that all sample, for a captured graph: the rest is padding.

        For a size, the tensors lie at the same addresses each time. What the batch says on the host's side, which no
        graph reads again, is true of every step of up to so many sequences.

        Args:
            sequences: At most ``size``; none: all is padding.
            size: Sequences, and tokens, of the step.

        Raises:
            CountError: As :meth:`lay_out` says.
        """
        missing = size - len(sequences)
        rows = [*(self._row(sequence) for sequence in sequences), *[self._padding] * missing]
        tokens = [*(sequence.token_ids[0] for sequence in sequences), *[0] * missing]
        context_lens = [*(sequence.num_computed_tokens + 1 for sequence in sequences), *[0] * missing]
        width = [table.max_num_blocks for table in self.tables]
        return self._send(rows, tokens, [1] * size, context_lens, [True] * size, width, captured=True)

    def _row(self, sequence: SequenceSlice) -> int:
        """The row of a sequence's request, with its new blocks."""
        try:
            row = self._rows.row(sequence.request_id)
        except UnknownRequestError:
            assert sequence.new_blocks is not None, "a request without blocks in a step"
            if len(self._rows) >= self._max_num_seqs:
                raise CountError(
                    f"all {self._max_num_seqs} rows are taken: forget requests that run no more, or make StepInputs "
                    "with a larger max_num_seqs"
                ) from None
            return self._rows.add(sequence.request_id, sequence.new_blocks)
        if sequence.new_blocks is not None:
            self._rows.append(sequence.request_id, sequence.new_blocks)
        return row

    def _send(
        self,
        rows: list[int],
        tokens: list[int],
        query_lens: list[int],
        context_lens: list[int],
        samples: list[bool],
        width: list[int],
        *,
        captured: bool = False,
    ) -> Batch:
        staging, num_tokens, num_rows = self._staging, len(tokens), len(rows)
        lengths = np.array(query_lens)  # [B]
        starts = np.concatenate(([0], lengths.cumsum()))  # [B + 1]
        first_positions = np.array(context_lens) - lengths  # [B]
        positions = np.arange(num_tokens) + np.repeat(first_positions - starts[:-1], lengths)  # [T]
        is_token = positions >= 0  # padding has a length of 0, and with its one token begins before it
        row_of_token = np.repeat(rows, lengths)[is_token]
        # What can be refused is refused here, before the rows that changed are taken note of.
        slots = [table.host.slot_mapping(row_of_token, positions[is_token]) for table in self.tables]

        changed = [(table, some) for table in self.tables if (some := table.take_changed_rows())]
        if sum(table.update_bytes(some) for table, some in changed) > self._update_bytes:
            self._send_ahead(changed)
            changed = []
        staging.begin()
        int32, int64 = torch.int32, torch.int64
        # What has the same size in every step of so many tokens and sequences comes first.
        input_ids = staging.section((1, num_tokens), int64)
        position_ids = staging.section((1, num_tokens), int64)
        row_index = staging.section((num_rows,), int64)
        query_start_loc = staging.section((num_rows + 1,), int32)
        seq_lens = staging.section((num_rows,), int32)
        slot_mappings = [staging.section((num_tokens,), int64) for _ in self.tables]
        logits_indices = staging.section((sum(samples),), int64)
        input_ids.host[0] = tokens
        position_ids.host[0] = np.maximum(positions, 0)
        row_index.host[:] = rows
        query_start_loc.host[:] = starts
        seq_lens.host[:] = context_lens
        logits_indices.host[:] = starts[1:][samples] - 1
        for slot_mapping, known in zip(slot_mappings, slots, strict=True):
            slot_mapping.host[:] = -1
            slot_mapping.host[is_token] = known
        updates = [table.stage(some, staging) for table, some in changed]
        staging.send()
        for update in updates:
            update.apply()

        if captured:
            context_lens = [self.max_model_len] * num_rows
        groups = [
            GroupBatch(
                spec=spec,
                query_lens=query_lens,
                context_lens=context_lens,
                slot_mapping=slot_mapping.device,
                query_start_loc=query_start_loc.device,
                seq_lens=seq_lens.device,
                table=table,
                rows=rows,
                row_index=row_index.device,
                width=columns,
                device=self.device,
            )
            for spec, slot_mapping, table, columns in zip(self._specs, slot_mappings, self.tables, width, strict=True)
        ]
        return Batch(input_ids.device, position_ids.device, logits_indices.device, tuple(groups))

    def _send_ahead(self, changed: Iterable[tuple[DeviceBlockTable, list[int]]]) -> None:
        """Bring rows to the device that there is no room for beside a step."""
        for table, rows in changed:
            while rows:
                self._staging.begin()
                update = table.stage(rows, self._staging)
                self._staging.send()
                update.apply()
                rows = rows[len(update) :]


def make_batch(
    sequences: Sequence[SequenceSlice], kv_cache_config: KVCacheConfig, device: torch.device | str = "cpu"
) -> Batch:
    """One step by itself, of requests with all their blocks in ``new_blocks``.

    Args:
        sequences: What to compute, one sequence at least.
        kv_cache_config: The groups, in the order of the block tables.
        device: Where the tensors go.

    Raises:
        ValueError: As :meth:`StepInputs.lay_out` says.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    tables = [s.new_blocks.blocks for s in sequences if s.new_blocks is not None]
    lengths = [len(blocks) * spec.block_size for table in tables for blocks, spec in zip(table, specs, strict=True)]
    inputs = StepInputs(
        kv_cache_config,
        max_num_batched_tokens=max(1, sum(len(s.token_ids) for s in sequences)),
        max_num_seqs=max(1, len(sequences)),
        max_model_len=max([1, *lengths]),
        device=device,
    )
    return inputs.lay_out(sequences)
