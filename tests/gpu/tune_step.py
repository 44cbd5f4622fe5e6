"""Steps to time the Triton attention kernel on: sequences that are alike, in pages anywhere of one large cache."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    # The kernels ask for it when they are imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# ruff: noqa: E402
from kvcore.spec import FullAttentionSpec, SlidingWindowSpec, cdiv
from runner.attention import triton_ops
from runner.attention.triton_launch import Launch

DEVICE = "cuda" if ON_GPU else "cpu"


@dataclass(frozen=True)
class Sizes:
    """What is measured: (batch, context, window or 0) of decodes, and the length of a prefill."""

    decodes: tuple[tuple[int, int, int], ...]
    prefill: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    pages: tuple[int, ...]
    dtype: torch.dtype
    repeats: int


FULL = Sizes(
    decodes=((64, 8192, 0), (1, 32768, 0), (16, 8192, 0), (256, 2048, 0), (64, 8192, 1024)),
    prefill=8192,
    num_query_heads=32,
    num_kv_heads=8,
    head_size=128,
    pages=(16, 64, 256),
    dtype=torch.bfloat16,
    repeats=5,
)
TINY = Sizes(
    decodes=((2, 600, 0), (1, 90, 0), (2, 300, 40)),
    prefill=40,
    num_query_heads=4,
    num_kv_heads=2,
    head_size=32,
    pages=(16, 64),
    dtype=torch.bfloat16,
    repeats=1,
)


def seconds(run: Callable[[int], object], repeats: int) -> float:
    """Median time of ``run``, which is called with 0, 1, 2... so that it can take turns with its inputs.

    On a GPU a graph of some calls is replayed: the time between launches is not counted.
    """
    if not ON_GPU:
        begin = time.perf_counter()
        run(0)
        return time.perf_counter() - begin
    run(0)
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run(1)
    stop.record()
    torch.cuda.synchronize()
    calls = max(2, min(20, int(2.0 / max(start.elapsed_time(stop), 1e-3))))  # two milliseconds
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for turn in range(calls):
            run(turn)
    graph.replay()
    times = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3 / calls)
    return statistics.median(times)


class Step:
    """Sequences that are alike, in pages anywhere of one large cache; ``tables`` are disjoint, to take turns."""

    def __init__(self, sizes: Sizes, page: int, batch: int, context: int, window: int, num_queries: int) -> None:
        self.sizes, self.batch, self.context, self.window, self.num_queries = sizes, batch, context, window, num_queries
        self.spec = FullAttentionSpec(page, sizes.num_kv_heads, sizes.head_size, "bfloat16")
        if window:
            self.spec = SlidingWindowSpec(page, sizes.num_kv_heads, sizes.head_size, "bfloat16", window)
        self.cache = cache_of(sizes, page)
        width = cdiv(context, page)
        order = torch.randperm(self.cache.shape[0] - 1, generator=torch.Generator().manual_seed(0)) + 1
        turns = max(1, min(8, order.numel() // (batch * width)))
        self.tables = list(order[: turns * batch * width].view(turns, batch, width).int().to(DEVICE))
        self.query_start_loc = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * num_queries
        self.seq_lens = torch.full((batch,), context, dtype=torch.int32, device=DEVICE)
        shape = (batch * num_queries, sizes.num_query_heads, sizes.head_size)
        self.query = torch.randn(shape, device=DEVICE).to(sizes.dtype)
        self.out = torch.full_like(self.query, float("nan"))
        self.reference = self._reference()

    @property
    def group_size(self) -> int:
        return self.sizes.num_query_heads // self.sizes.num_kv_heads

    @property
    def bytes_read(self) -> int:
        """Keys and values that have to be read."""
        keys = min(self.context, self.window or self.context)
        return self.batch * keys * self.spec.bytes_per_token

    @property
    def operations(self) -> float:
        """Of the two products, as far as they are causal."""
        reach = self.window or self.context
        pairs = sum(min(self.context - i, reach) for i in range(self.num_queries))
        return 4.0 * self.batch * pairs * self.sizes.num_query_heads * self.sizes.head_size

    def run(self, launch: Launch, turn: int = 0) -> None:
        triton_ops.paged_attention(
            self.query,
            self.cache,
            self.out,
            block_table=self.tables[turn % len(self.tables)],
            query_start_loc=self.query_start_loc,
            seq_lens=self.seq_lens,
            launch=launch,
            scale=self.sizes.head_size**-0.5,
            window=self.window,
        )

    def keys_and_values(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``[Hkv, context, D]`` each."""
        rows = self.cache[self.tables[0][sequence].long()]  # [pages, 2, page, Hkv, D]
        keys, values = rows.transpose(0, 1).flatten(1, 2)[:, : self.context].transpose(1, 2)
        return keys, values

    def _reference(self) -> torch.Tensor:
        """Of the last query of the last sequence, ``[Hq, D]`` in float64."""
        keys, values = (t.double().repeat_interleave(self.group_size, 0) for t in self.keys_and_values(self.batch - 1))
        first = self.context - self.window if self.window else 0
        scores = (keys[:, first:] @ self.query[-1].double()[:, :, None])[..., 0] * self.sizes.head_size**-0.5
        return (scores.softmax(-1)[:, None] @ values[:, first:])[:, 0]

    def error(self) -> float:
        """Norm of the difference from the reference over the norm of the reference; NaN if anything is."""
        wrong = (self.out[-1].double() - self.reference).norm() / self.reference.norm()
        return float(wrong + 0 * self.out.double().sum())


_caches: dict[int, torch.Tensor] = {}


def cache_of(sizes: Sizes, page: int) -> torch.Tensor:
    """One cache of random numbers, seen as pages of any size."""
    tokens = cdiv(max(batch * context for batch, context, _ in sizes.decodes), 256) * 256 + 2 * 256
    if 0 not in _caches:
        _caches[0] = torch.empty(tokens * 2 * sizes.num_kv_heads * sizes.head_size, dtype=sizes.dtype, device=DEVICE)
        _caches[0].normal_()
    return _caches[0].view(-1, 2, page, sizes.num_kv_heads, sizes.head_size)
