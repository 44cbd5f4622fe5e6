"""Speed of prefill attention, beside torch's own attention over keys and values that are not paged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from runner.attention import make_backend
from tests.gpu.paged_layers import PagedLayers, attention_spec
from tests.gpu.refusing import refusing
from tests.gpu.timing import median_seconds
from tests.gpu.work import Measurement, Record, Settings


@dataclass(frozen=True)
class Shape:
    """One sequence's prefill.

    Args:
        past: Tokens in the cache.
        new: Tokens of the step.
        window: Of the layers; None: full attention.
        num_query_heads: Hq.
        num_kv_heads: Hkv.
        head_size: D.
    """

    past: int
    new: int
    window: int | None = None
    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128

    def __str__(self) -> str:
        past = f"{self.new:,} tokens" + (f" after {self.past:,}" if self.past else "")
        return past + ("" if self.window is None else f", window {self.window:,}")


SHAPES = (Shape(0, 8192), Shape(6144, 2048), Shape(0, 8192, 1024))
SMALL_SHAPES = (Shape(0, 24, None, 2, 1, 32), Shape(20, 9, None, 2, 1, 32), Shape(0, 24, 8, 2, 1, 32))

SDPA = "torch, not paged"

NUM_LAYERS = 4


def measurements(settings: Settings) -> list[Measurement]:
    """For each shape every backend; for the first also what torch has."""
    shapes = SMALL_SHAPES if settings.tiny else SHAPES
    found = [Measurement(f"{SDPA}: {shapes[0]}", partial(_measure_sdpa, settings, shapes[0]))]
    for shape in shapes:
        found += [
            Measurement(f"{name}: {shape}", partial(_measure, settings, name, shape)) for name in settings.backends
        ]
    return found


@refusing
def _measure(settings: Settings, name: str, shape: Shape) -> Record:
    backend = make_backend(name, settings.device)
    spec = attention_spec(
        page=backend.default_block_size,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        window=shape.window,
        dtype="bfloat16" if settings.is_timed else "float32",
    )
    layers = PagedLayers(
        backend,
        spec,
        [(shape.past, shape.new)],
        num_query_heads=shape.num_query_heads,
        num_layers=NUM_LAYERS,
        device=settings.device,
    )
    record = _record(name, shape, layers.flops) | {"page": spec.block_size}
    if not layers.run().isfinite().all():
        return record | {"status": "failed", "note": "the output is not finite"}
    if not settings.is_timed:
        return record | {"note": "it runs; times on a CPU mean nothing"}
    return record | _speed(median_seconds(layers.run) / NUM_LAYERS, layers.flops)


def _measure_sdpa(settings: Settings, shape: Shape) -> Record:
    """Queries, keys and values of several layers in turn, as the paged ones have them."""
    dtype = torch.bfloat16 if settings.is_timed else torch.float32

    def noise(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, shape.new, shape.head_size, dtype=dtype, device=settings.device)

    layers = [
        (noise(shape.num_query_heads), noise(shape.num_kv_heads), noise(shape.num_kv_heads)) for _ in range(NUM_LAYERS)
    ]

    def run() -> None:
        for query, key, value in layers:
            F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    flops = 4 * shape.new * (shape.new + 1) // 2 * shape.num_query_heads * shape.head_size
    record = _record(SDPA, shape, flops)
    run()
    if not settings.is_timed:
        return record | {"note": "it runs; times on a CPU mean nothing"}
    return record | _speed(median_seconds(run) / NUM_LAYERS, flops)


def _record(backend: str, shape: Shape, flops: int) -> Record:
    return {
        "backend": backend,
        "past": shape.past,
        "new": shape.new,
        "window": shape.window,
        "heads": [shape.num_query_heads, shape.num_kv_heads, shape.head_size],
        "flops": flops,
    }


def _speed(seconds: float, flops: int) -> Record:
    speed = flops / seconds
    return {
        "seconds": seconds,
        "flops_per_second": speed,
        "note": f"{seconds * 1e3:.2f} ms, {speed / 1e12:.0f} TFLOP/s",
    }
