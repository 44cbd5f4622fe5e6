"""The tensors behind the books: one buffer of pages per KV cache tensor, seen by each layer in its own shape."""

from __future__ import annotations

import torch

from kvcore.spec import KVCacheConfig
from runner.errors import EngineConfigError


def torch_dtype(name: str) -> torch.dtype:
    """The torch element type of that name, ``"bfloat16"`` for example.

    Raises:
        EngineConfigError: torch has none of that name.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineConfigError(f"{name!r} is not the name of a torch element type such as 'float32' or 'bfloat16'")
    return dtype


def allocate_kv_cache(config: KVCacheConfig, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """Make the buffers of a cache.

    Page ``b`` of every buffer belongs to block ``b``, and a block to one group at a time, so that the layers which
    share a buffer never meet in a page.

    Args:
        config: With ``kv_cache_tensors`` filled in, as :func:`kvcore.planning.plan_kv_cache` does.
        device: Where they go.

    Returns:
        For each layer ``[num_blocks, 2, block_size, num_kv_heads, head_size]``, contiguous: keys, then values. Memory
        in bytes: the sum of ``config.kv_cache_tensors`` sizes, of which a CPU takes only what is written to.

    Raises:
        EngineConfigError: A layer without a tensor, or pages that do not fill their tensor exactly.
    """
    specs = {name: group.kv_cache_spec for group in config.kv_cache_groups for name in group.layer_names}
    caches: dict[str, torch.Tensor] = {}
    for tensor in config.kv_cache_tensors:
        buffer = torch.zeros(tensor.size, dtype=torch.uint8, device=device)
        for name in tensor.shared_by:
            spec = specs[name]
            if config.num_blocks * spec.page_size_bytes != tensor.size:
                raise EngineConfigError(
                    f"layer {name!r} needs {config.num_blocks} blocks x {spec.page_size_bytes:,} bytes, its tensor has "
                    f"{tensor.size:,}: plan the cache without pad_pages"
                )
            shape = (config.num_blocks, 2, spec.block_size, spec.num_kv_heads, spec.head_size)
            caches[name] = buffer.view(torch_dtype(spec.dtype)).view(shape)
    if missing := specs.keys() - caches.keys():
        raise EngineConfigError(f"no tensor for {', '.join(sorted(missing))}: fill KVCacheConfig.kv_cache_tensors")
    return caches
