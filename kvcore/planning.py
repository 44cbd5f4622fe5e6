"""Layers and memory in, :class:`~kvcore.spec.KVCacheConfig` out.

All groups draw their blocks from one pool, so a block must take the same bytes whichever group holds it. Two things
make it so: every layer's page is made equally large (by a longer block for layers that store fewer bytes per token),
and every group gets the same number of layers. Block ``b`` of the pool is then page ``b`` of each tensor, and tensor
``i`` belongs to the ``i``-th layer of every group: a block is in one group at a time, so these layers never meet in a
page.

:func:`capacity_report` is the way back, from a config to the tokens and requests it holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kvcore.errors import ConfigError
from kvcore.planning_capacity import CapacityReport, GroupCapacity, LengthCapacity, capacity_report
from kvcore.spec import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, KVCacheTensor, cdiv

__all__ = ["CapacityReport", "GroupCapacity", "LengthCapacity", "capacity_report", "plan_kv_cache"]

MIN_BLOCKS = 2
"""The null block and one to use."""


def plan_kv_cache(
    specs: Mapping[str, KVCacheSpec] | Iterable[tuple[str, KVCacheSpec]],
    *,
    memory_bytes: int | None = None,
    num_blocks: int | None = None,
    group_size: int | None = None,
    pad_pages: bool = False,
) -> KVCacheConfig:
    """Lay out a cache for these layers. O(layers).

    Layers with equal specs are of one kind. A model of one kind gets one group; otherwise each kind is split into
    groups of at most ``group_size`` layers. A group with fewer layers than the largest one wastes the tensors it has
    no layer for. Groups stand in the order in which their kinds first appear.

    Args:
        specs: Layer names with the spec of each, in the order of the model.
        memory_bytes: Bytes to fill with blocks; the rest, less than one block, stays unused.
        num_blocks: Blocks in the pool, the null block included, instead of ``memory_bytes``.
        group_size: Most layers in a group. By default the layer count of the rarest kind, so that a model that repeats
            five window layers and one full layer gets five groups for the windows and one for the rest; or that of the
            commonest kind when this is less than 1.5 times as large, because 12 and 13 layers are better padded to 13
            and 13 than split into 12, 7 and 6 (vLLM's rule).
        pad_pages: Where page sizes cannot be made equal by longer blocks, let the smaller ones leave the end of each
            page unused. A tensor's pages are then ``tensor.size // num_blocks`` bytes apart, which may exceed the
            layer's ``page_size_bytes``: the attention backend must read them with that stride.

    Returns:
        The config, with ``kv_cache_tensors`` filled. A group's spec may have a larger block size than its layers came
        with.

    Raises:
        ConfigError: No layers, a name used twice, something that is no spec; both or neither of ``memory_bytes`` and
            ``num_blocks``; memory for fewer than two blocks; page sizes that cannot be made equal while ``pad_pages``
            is off.
    """
    layers = _checked_layers(specs)
    _check_whole("group_size", group_size)
    _check_whole("memory_bytes", memory_bytes)
    _check_whole("num_blocks", num_blocks, at_least=MIN_BLOCKS)
    if (memory_bytes is None) == (num_blocks is None):
        given = "neither" if memory_bytes is None else "both"
        raise ConfigError(f"pass either memory_bytes or num_blocks to size the pool, got {given}")

    layers = _with_equal_pages(layers, pad_pages=pad_pages)
    groups = _split_into_groups(layers, group_size)
    page_bytes = max(spec.page_size_bytes for spec in layers.values())
    num_tensors = max(len(group.layer_names) for group in groups)
    if num_blocks is None:
        assert memory_bytes is not None
        num_blocks = _blocks_in(memory_bytes, num_tensors=num_tensors, page_bytes=page_bytes)
    tensors = tuple(
        KVCacheTensor(
            size=num_blocks * page_bytes,
            shared_by=tuple(group.layer_names[i] for group in groups if i < len(group.layer_names)),
        )
        for i in range(num_tensors)
    )
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=groups, kv_cache_tensors=tensors)


def _checked_layers(specs: Mapping[str, KVCacheSpec] | Iterable[tuple[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    layers: dict[str, KVCacheSpec] = {}
    try:
        pairs = [(name, spec) for name, spec in (specs.items() if isinstance(specs, Mapping) else specs)]
    except (TypeError, ValueError):
        raise ConfigError(
            f"specs must be a mapping from layer name to KVCacheSpec, or such pairs, got {type(specs).__name__}"
        ) from None
    for name, spec in pairs:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a layer name must be a string that is not empty, got {name!r}")
        if not isinstance(spec, KVCacheSpec):
            raise ConfigError(
                f"layer {name!r} needs a KVCacheSpec (FullAttentionSpec, SlidingWindowSpec, ...), got {spec!r}; "
                "leave out layers that cache nothing"
            )
        if name in layers:
            raise ConfigError(f"layer name {name!r} is used twice; every layer needs a name of its own")
        layers[name] = spec
    if not layers:
        raise ConfigError("no layers to plan for: pass the spec of one layer at least")
    return layers


def _check_whole(name: str, value: object, at_least: int = 1) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < at_least):
        raise ConfigError(f"{name} must be a whole number of at least {at_least}, got {value!r}")


def _with_equal_pages(layers: Mapping[str, KVCacheSpec], *, pad_pages: bool) -> dict[str, KVCacheSpec]:
    """The same layers, those with small pages given blocks as many times longer as fit into the largest page."""
    largest = max(layers.values(), key=lambda spec: spec.page_size_bytes)
    even: dict[str, KVCacheSpec] = {}
    for name, spec in layers.items():
        times, left_over = divmod(largest.page_size_bytes, spec.page_size_bytes)
        if left_over and not pad_pages:
            raise ConfigError(_uneven_pages_message(name, spec, largest))
        even[name] = replace(spec, block_size=spec.block_size * times) if times > 1 else spec
    return even


def _uneven_pages_message(name: str, spec: KVCacheSpec, largest: KVCacheSpec) -> str:
    page, largest_page = spec.page_size_bytes, largest.page_size_bytes
    common = math.lcm(page, largest_page)
    block_size, largest_block_size = (kind.block_size * (common // kind.page_size_bytes) for kind in (spec, largest))
    left_over = largest_page % page
    return (
        f"pages cannot be made equal: layer {name!r} stores {spec.block_size} x {spec.bytes_per_token:,} = {page:,} "
        f"bytes a page, the largest page is {largest.block_size} x {largest.bytes_per_token:,} = {largest_page:,}, and "
        f"{largest_page:,} / {page:,} = {largest_page / page:.4g} is not whole. Give the two kinds block sizes "
        f"{block_size} and {largest_block_size} (both then have pages of {common:,} bytes), or pass pad_pages=True, "
        f"which leaves {left_over:,} of {largest_page:,} bytes ({left_over / largest_page:.1%}) unused in every page "
        "of such a layer"
    )


def _split_into_groups(layers: Mapping[str, KVCacheSpec], group_size: int | None) -> tuple[KVCacheGroupSpec, ...]:
    kinds: dict[KVCacheSpec, list[str]] = {}
    for name, spec in layers.items():
        kinds.setdefault(spec, []).append(name)
    if group_size is None:
        group_size = _default_group_size([len(names) for names in kinds.values()])
    groups = []
    for spec, names in kinds.items():
        num_groups = cdiv(len(names), group_size)
        # Every num_groups-th layer rather than runs of neighbours: the groups come out equally large to within one
        # layer, and a pipeline stage (a run of neighbouring layers) finds its layers spread evenly over them.
        groups += [KVCacheGroupSpec(tuple(names[i::num_groups]), spec) for i in range(num_groups)]
    return tuple(groups)


def _default_group_size(layers_per_kind: Sequence[int]) -> int:
    fewest, most = min(layers_per_kind), max(layers_per_kind)
    return most if 2 * most < 3 * fewest else fewest


def _blocks_in(memory_bytes: int, *, num_tensors: int, page_bytes: int) -> int:
    block_bytes = num_tensors * page_bytes
    num_blocks = memory_bytes // block_bytes
    if num_blocks < MIN_BLOCKS:
        raise ConfigError(
            f"{memory_bytes:,} bytes are too few: a block takes {num_tensors} layers x {page_bytes:,} bytes = "
            f"{block_bytes:,} bytes and the pool needs {MIN_BLOCKS} (block 0 is the null block), so give it at least "
            f"{MIN_BLOCKS * block_bytes:,} bytes, or use a smaller block size"
        )
    return num_blocks
