"""Cuts what a step reads into spans of tokens, each with the queries that read from it: the native kernel's work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from runner.attention.base import visible_from
from runner.attention.cohorts import shared_beginnings
from runner.batch import GroupBatch
from runner.native.build import SPAN
from runner.native.structs import AttentionWork

MOST_PARTS = 1 << 13
"""Of one call: pairs of a query and a span, each of which takes Hq * (D + 2) floats. They bound the memory of a step.

A sequence is not divided: with 32 queries it has half as many pairs as tokens, whatever this says.
"""


def plan_spans(batch: GroupBatch, sequences: Sequence[int]) -> list[AttentionWork]:
    """The work of some sequences (indices into the batch), in one call or more.

    A span is the same for all sequences that have the same blocks at the same positions: what they share of a prefix is
    read once in a call. O(blocks they read, and queries times spans).
    """
    calls: list[list[int]] = []
    room = 0
    for i in sorted(sequences, key=lambda i: batch.block_ids[i][0]):
        query_len, context_len = batch.query_lens[i], batch.context_lens[i]
        num_parts = query_len * (2 + (context_len - visible_from(batch.spec, context_len - query_len)) // SPAN)
        if num_parts > room:
            calls.append([])
            room = MOST_PARTS
        calls[-1].append(i)
        room -= num_parts
    return [_work(batch, some) for some in calls]


def _work(batch: GroupBatch, sequences: Sequence[int]) -> AttentionWork:
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
        span_blocks=[0, *accumulate(len(key) - 1 for key in spans)][:-1],
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
    """Spans of up to SPAN tokens over positions ``first`` to ``stop``, none of which goes beyond what is shared."""
    for begin, end in ((first // SPAN * SPAN, shared), (max(first // SPAN * SPAN, shared), stop)):
        for start in range(begin, end, SPAN):
            yield start, min(start + SPAN, end)
