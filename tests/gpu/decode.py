"""Bandwidth of decode attention: how fast keys and values are read, beside a copy on the same card."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from runner.attention import make_backend
from tests.gpu.paged_layers import PagedLayers, attention_spec
from tests.gpu.refusing import refusing
from tests.gpu.timing import captured, copy_bandwidth, median_seconds
from tests.gpu.work import Measurement, Record, Settings

READ_AT_LEAST = 1 << 30
"""Bytes that a step reads in all its layers together: many times the L2 cache."""


@dataclass(frozen=True)
class Shape:
    """A decode step.

    Args:
        batch: Sequences.
        context: Tokens of each, the new one included.
        window: Of the layers; None: full attention.
        num_query_heads: Hq.
        num_kv_heads: Hkv.
        head_size: D.
    """

    batch: int
    context: int
    window: int | None = None
    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128

    def __str__(self) -> str:
        window = "" if self.window is None else f", window {self.window:,}"
        return f"{self.batch} x {self.context:,}{window}"


WINDOW = 1024
WINDOWED_AT = (64, 8192)
"""Sequences and tokens where windows are compared with full attention."""

SHAPES = (Shape(64, 8192), Shape(64, 8192, WINDOW), Shape(1, 32768), Shape(16, 8192), Shape(256, 2048))
SMALL_SHAPES = (Shape(2, 40, None, 2, 1, 32), Shape(2, 40, 8, 2, 1, 32), Shape(1, 96, None, 2, 1, 32))

PAGES = (None, 16)
"""None: what the backend takes by default."""


def measurements(settings: Settings) -> list[Measurement]:
    """For each shape, backend and page size; the shapes that matter most come first."""
    found = {}
    for shape in SMALL_SHAPES if settings.tiny else SHAPES:
        for name in settings.backends:
            for page in PAGES:
                page = page or make_backend(name, settings.device).default_block_size
                title = f"{name}, pages of {page}: {shape}"
                found[title] = Measurement(title, partial(_measure, settings, name, page, shape))
    return list(found.values())


@refusing
def _measure(settings: Settings, name: str, page: int, shape: Shape) -> Record:
    spec = attention_spec(
        page=page,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        window=shape.window,
        dtype="bfloat16" if settings.is_timed else "float32",
    )
    backend = make_backend(name, settings.device)
    seen = min(shape.context, shape.window or shape.context)
    layer_bytes = shape.batch * seen * 2 * shape.num_kv_heads * shape.head_size * 2
    num_layers = max(2, min(8, -(-READ_AT_LEAST // layer_bytes))) if settings.is_timed else 2
    layers = PagedLayers(
        backend,
        spec,
        [(shape.context - 1, 1)] * shape.batch,
        num_query_heads=shape.num_query_heads,
        num_layers=num_layers,
        device=settings.device,
    )
    record: Record = {
        "backend": name,
        "page": page,
        "batch": shape.batch,
        "context": shape.context,
        "window": shape.window,
        "heads": [shape.num_query_heads, shape.num_kv_heads, shape.head_size],
        "bytes": layers.bytes_to_read,
        "layers": num_layers,
    }
    if not layers.run().isfinite().all():
        return record | {"status": "failed", "note": "the output is not finite"}
    if backend.supports_graphs:
        layers.prepare_captured()
        if not layers.run_captured().isfinite().all():
            return record | {"status": "failed", "note": "the output of a padded step is not finite"}
    if not settings.is_timed:
        return record | {"note": "it runs; times on a CPU mean nothing"}
    copy = copy_bandwidth()
    times = {"eager": median_seconds(layers.run) / num_layers}
    if backend.supports_graphs:
        times["graph"] = median_seconds(captured(layers.run_captured, layers.run_captured)) / num_layers
    best = times.get("graph", times["eager"])
    bandwidth = layers.bytes_to_read / best
    return record | {
        "seconds": times,
        "bandwidth": bandwidth,
        "copy_bandwidth": copy,
        "share": bandwidth / copy,
        "note": f"{best * 1e6:.0f} µs, {bandwidth / 1e9:,.0f} GB/s, {bandwidth / copy:.0%} of a copy",
    }
