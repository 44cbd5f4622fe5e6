"""Cuts what a step reads into spans of tokens, each with the queries that read from it: the native kernel's work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from runner.attention.base import visible_from
from runner.attention.cohorts import shared_beginnings
from runner.batch import GroupBatch
from runner.native.kernels import SPAN, AttentionWork


def plan_spans(batch: GroupBatch, sequences: Sequence[int]) -> AttentionWork:
    """The work of some sequences (indices into the batch), one at least. O(blocks they read).

    A span is the same for all sequences that have the same blocks at the same positions: what they share of a prefix is
    read once.
    """
    spec, block_size = batch.spec, batch.spec.block_size
    spans: dict[tuple[int, ...], list[tuple[int, int, int]]] = {}  # first position, blocks: (query, from, until)
    query_token: list[int] = []
    shared_by = {i: shared for members, shared in shared_beginnings(batch, sequences) for i in members}
    for i in sequences:
        ids, query_len, context_len = batch.block_ids[i], batch.query_lens[i], batch.context_lens[i]
        positions = range(context_len - query_len, context_len)
        reads = [(len(query_token) + n, visible_from(spec, p), p + 1) for n, p in enumerate(positions)]
        query_token += range(batch.query_starts[i], batch.query_starts[i] + query_len)
        for start, stop in _cut(reads[0][1], shared_by[i], context_len):
            parts = spans.setdefault((start, *ids[start // block_size : -(-stop // block_size)]), [])
            for query, seen_from, seen_until in reads:
                if seen_from < stop and seen_until > start:
                    parts.append((query, max(seen_from, start) - start, min(seen_until, stop) - start))
    parts = [part for some in spans.values() for part in some]
    parts_of: list[list[int]] = [[] for _ in query_token]
    for index, (query, _, _) in enumerate(parts):
        parts_of[query].append(index)
    return AttentionWork(
        span_start=[start for start, *_ in spans],
        span_blocks=[0, *accumulate(len(key) - 1 for key in spans)],
        span_parts=[0, *accumulate(map(len, spans.values()))],
        blocks=[block for _, *ids in spans for block in ids],
        part_token=[query_token[query] for query, _, _ in parts],
        part_from=[seen_from for _, seen_from, _ in parts],
        part_until=[seen_until for _, _, seen_until in parts],
        query_token=query_token,
        query_parts=[0, *accumulate(map(len, parts_of))],
        parts_of_queries=[part for some in parts_of for part in some],
    )


def _cut(first: int, shared: int, stop: int) -> Iterator[tuple[int, int]]:
    """Spans that cover positions ``first`` to ``stop``, cut where what is shared ends, elsewhere at multiples."""
    for begin, end in ((first // SPAN * SPAN, shared), (max(first // SPAN * SPAN, shared), stop)):
        for start in range(begin, end, SPAN):
            yield start, min(start + SPAN, end)
