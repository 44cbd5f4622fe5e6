"""Everything about an engine that can be chosen, and what is taken where nothing was."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runner.errors import EngineConfigError

DEFAULT_CPU_KV_CACHE_BYTES = 1 << 30
GPU_KV_CACHE_SHARE = 0.8
"""Of the memory that is free once the weights are loaded; the rest is for activations."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an :class:`~runner.engine.Engine`.

    Args:
        dtype: Element type of weights and cache, "float32" or "bfloat16" for example. None: float32 on a CPU, which is
            exact and often faster there; elsewhere what the model was saved in.
        device: Where the model runs, "cpu" or "cuda" for example. None: a CUDA device if there is one.
        attention_backend: A name in :data:`runner.attention.BACKENDS`.
        block_size: Tokens per block. Layers that store fewer bytes per token than others get longer blocks.
        kv_cache_memory: Bytes for the cache. None: 1 GiB on a CPU, 80% of what the weights leave free on a GPU.
        num_blocks: Blocks of the cache, the null block included, instead of ``kv_cache_memory``.
        max_model_len: Longest sequence in tokens, prompt and output. None: what the model was made for.
        max_num_batched_tokens: Most tokens computed in a step; longer prompts are computed in chunks.
        max_num_seqs: Most requests that run at once.
        watermark: Share of the blocks, from 0 to below 1, to leave free when a request is admitted next to others, so
            that those have room to grow.
        growth_tokens: Tokens that each request that runs must then still have room for, besides. None: a block.
        max_overtakes: How often a request that does not fit yet may be overtaken by later ones that do; 0: never. See
            :class:`~runner.scheduler.Scheduler`.
        enable_caching: Let requests share the blocks of equal prefixes.
        hash_algorithm: A name in :data:`kvcore.hashing.ALGORITHMS`.

    Raises:
        EngineConfigError: A number out of its range, fewer tokens a step than requests, or both sizes of the cache
            given.
    """

    dtype: str | None = None
    device: str | None = None
    attention_backend: str = "torch"
    block_size: int = 16
    kv_cache_memory: int | None = None
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    watermark: float = 0.01
    growth_tokens: int | None = None
    max_overtakes: int = 16
    enable_caching: bool = True
    hash_algorithm: str = "xxh3"

    def __post_init__(self) -> None:
        for name in (
            "block_size", "kv_cache_memory", "num_blocks", "max_model_len", "max_num_batched_tokens", "max_num_seqs"
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise EngineConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("growth_tokens", "max_overtakes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise EngineConfigError(f"{name} must be a whole number of at least 0, got {value!r}")
        if not isinstance(self.watermark, (int, float)) or not 0 <= self.watermark < 1:
            raise EngineConfigError(f"watermark must be a share from 0 to below 1, got {self.watermark!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                "each running request computes one token a step at least"
            )
        if self.kv_cache_memory is not None and self.num_blocks is not None:
            raise EngineConfigError("pass either kv_cache_memory or num_blocks, not both")

    def torch_device(self) -> torch.device:
        """The device, chosen if none was named."""
        return torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def cache_bytes(self) -> int | None:
        """Bytes for the cache; None where ``num_blocks`` says how large it is. Asks a GPU how much is free now."""
        if self.num_blocks is not None or self.kv_cache_memory is not None:
            return self.kv_cache_memory
        device = self.torch_device()
        if device.type != "cuda":
            return DEFAULT_CPU_KV_CACHE_BYTES
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_KV_CACHE_SHARE)
