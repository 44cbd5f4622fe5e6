"""What an engine says about itself at start: its model, its cache, and what fits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvcore.planning import CapacityReport, capacity_report
from kvcore.planning_text import size

if TYPE_CHECKING:
    from runner.engine import Engine


def engine_capacity(engine: Engine) -> CapacityReport:
    """What the engine's pool holds; ``lengths[0]`` is about requests of ``max_model_len`` tokens."""
    return capacity_report(
        engine.kv_cache_config,
        max_model_len=engine.max_model_len,
        max_in_flight_tokens=engine.config.max_num_batched_tokens,
    )


def hit_granularity(engine: Engine) -> int | None:
    """Prefix hits are multiples of this many tokens: whole blocks in every group. None where caching is off."""
    if not engine.config.enable_caching:
        return None
    return math.lcm(*(group.kv_cache_spec.block_size for group in engine.kv_cache_config.kv_cache_groups))


def start_report(engine: Engine) -> str:
    """A few lines about model and settings, then the tables of :class:`~kvcore.planning.CapacityReport`."""
    runner, config = engine.model_runner, engine.config
    model, backend = runner.model, runner.backend
    parameters = list(model.parameters())
    weights = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    granularity = hit_granularity(engine)
    note = f" ({backend.page_note})" if backend.page_note else ""
    rows = [
        ("model", f"{type(model).__name__}, {sum(p.numel() for p in parameters):,} parameters in {size(weights)}"),
        ("runs on", f"{model.device}, {str(model.dtype).removeprefix('torch.')}, attention: {backend.describe()}"),
        ("requests", f"up to {config.max_num_seqs:,} at once, {config.max_num_batched_tokens:,} tokens a step"),
        ("prefix hits", "off" if granularity is None else f"multiples of {granularity:,} tokens{note}"),
    ]
    if runner.graphs is not None:
        sizes = runner.graphs.sizes
        rows.insert(2, ("CUDA graphs", f"decode steps of up to {sizes[-1]:,} requests, in {len(sizes)} sizes"))
    elif model.device.type == "cuda":
        rows.insert(2, ("CUDA graphs", f"none: {runner.no_graphs_because}"))
    if engine.packing.num_bytes:
        packing = engine.packing
        rows.insert(
            1, ("packed weights", f"{size(packing.num_bytes)} besides, for {packing.product} products of linear layers")
        )
    elif model.device.type == "cpu":
        rows.insert(1, ("packed weights", f"none: {engine.packing.because}"))
    return "\n".join((*(f"{name:<14} {value}" for name, value in rows), str(engine_capacity(engine))))
