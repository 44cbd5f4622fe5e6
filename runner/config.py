"""Everything about an engine that can be chosen, and what is taken where nothing was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvcore.eviction import POLICIES, PolicyChoice
from kvcore.planning_hf import max_model_len_from_hf_config
from kvcore.planning_text import size
from runner.errors import EngineConfigError
from runner.machine import machine_memory

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""Element types of weights and cache, by the names that torch has for them."""

WINDOW_RETENTIONS = ("ends", "all")
"""What may become of blocks that a window has left, see :class:`EngineConfig`."""

DEFAULT_CPU_KV_CACHE_BYTES = 1 << 30
GPU_KV_CACHE_SHARE = 0.8
"""Of the memory that is free once the weights are loaded; the rest is for activations."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an :class:`~runner.engine.Engine`.

    Args:
        dtype: Element type of weights and cache: "float32", "bfloat16", "float16" or "float64". None: float32 on a
            CPU, which is exact and often faster there; elsewhere what the model was saved in.
        device: Where the model runs, "cpu" or "cuda" for example. None: a CUDA device if there is one.
        attention_backend: A name in :data:`runner.attention.BACKENDS`. None: "native" on a CPU if there is a C
            compiler, "triton" on a CUDA device if Triton is installed, each if it takes the model; else "torch".
        cuda_graphs: Capture decode steps in CUDA graphs and replay them. None: where model, backend and device let it;
            True: or refuse.
        packed_weights: On a CPU, keep the weights of linear layers a second time, in the order in which products read
            them. Steps get faster; it takes as much memory as the weights. None: where there is a product that reads
            them, and that is at most a quarter of the machine's memory; True: or refuse.
        block_size: Tokens per block. None: what suits the backend, 4 for "torch" and "native", 16 for most others.
            Layers that store fewer bytes per token than others get longer blocks.
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
        eviction_policy: Which cached block is overwritten next: a name of :data:`kvcore.eviction.POLICIES`, or as
            for :class:`kvcore.KVCacheManager`.
        window_retention: What becomes of blocks that a window has left: "ends" keeps those at which a later prompt is
            likely to join in, "all" treats them like the others.

    Raises:
        EngineConfigError: A number out of its range, an unknown dtype, policy or retention, fewer tokens a step than
            requests, or both sizes of the cache given.
    """

    dtype: str | None = None
    device: str | None = None
    attention_backend: str | None = None
    cuda_graphs: bool | None = None
    packed_weights: bool | None = None
    block_size: int | None = None
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
    eviction_policy: PolicyChoice = "lru"
    window_retention: str = "ends"

    def __post_init__(self) -> None:
        self._check_whole(1, "block_size kv_cache_memory num_blocks max_model_len max_num_batched_tokens max_num_seqs")
        self._check_whole(0, "growth_tokens max_overtakes")
        if self.attention_backend is not None and not isinstance(self.attention_backend, str):
            raise EngineConfigError(f"attention_backend must be a name or None, got {self.attention_backend!r}")
        if not isinstance(self.watermark, (int, float)) or not 0 <= self.watermark < 1:
            raise EngineConfigError(f"watermark must be a share from 0 to below 1, got {self.watermark!r}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise EngineConfigError(f"dtype must be one of {', '.join(DTYPES)}, or None; got {self.dtype!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise EngineConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than max_num_seqs={self.max_num_seqs}: "
                "each running request computes one token a step at least"
            )
        if self.window_retention not in WINDOW_RETENTIONS:
            raise EngineConfigError(
                f"window_retention must be one of {', '.join(WINDOW_RETENTIONS)}; got {self.window_retention!r}"
            )
        if isinstance(self.eviction_policy, str) and self.eviction_policy not in POLICIES:
            raise EngineConfigError(
                f"eviction_policy must be one of {', '.join(sorted(POLICIES))}, a policy, or a class of policies; got "
                f"{self.eviction_policy!r}"
            )
        for name in ("cuda_graphs", "packed_weights"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, bool):
                raise EngineConfigError(f"{name} must be True, False or None, got {value!r}")
        if self.kv_cache_memory is not None and self.num_blocks is not None:
            raise EngineConfigError("pass either kv_cache_memory or num_blocks, not both")

    def _check_whole(self, at_least: int, names: str) -> None:
        for name in names.split():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < at_least):
                raise EngineConfigError(f"{name} must be a whole number of at least {at_least}, got {value!r}")

    def torch_device(self) -> torch.device:
        """The device, chosen if none was named.

        Raises:
            EngineConfigError: It does not exist here.
        """
        if self.device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
            torch.zeros(1, device=device).item()
        except Exception as error:  # torch has no class for it: AssertionError where it was built without CUDA
            raise EngineConfigError(f"device {self.device!r} cannot be used: {error}") from error
        return device

    def longest_sequence(self, model_config: Any) -> int:
        """``max_model_len``, or what a model was made for.

        Args:
            model_config: The model's config.

        Raises:
            EngineConfigError: It is more than that, or neither says how long.
        """
        longest = max_model_len_from_hf_config(model_config)
        if self.max_model_len is None and longest is None:
            raise EngineConfigError("the model does not say how long its sequences may be: pass max_model_len")
        if self.max_model_len is not None and longest is not None and self.max_model_len > longest:
            raise EngineConfigError(
                f"max_model_len={self.max_model_len:,} is more than the {longest:,} tokens the model was made for "
                "(max_position_embeddings)"
            )
        return self.max_model_len or longest or 0

    def cache_bytes(self, device: torch.device) -> int | None:
        """Bytes for the cache on that device; None where ``num_blocks`` says how large it is.

        Asks a GPU how much is free now.
        """
        if self.num_blocks is not None or self.kv_cache_memory is not None:
            return self.kv_cache_memory
        if device.type != "cuda":
            return DEFAULT_CPU_KV_CACHE_BYTES
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * GPU_KV_CACHE_SHARE)


def check_memory(cache_bytes: int, device: torch.device) -> None:
    """Refuse a cache that is larger than the machine's memory: a CPU's would be noticed only when it is full.

    Raises:
        EngineConfigError: With both sizes.
    """
    memory = machine_memory()
    if device.type == "cpu" and memory is not None and cache_bytes > memory:
        raise EngineConfigError(
            f"the cache takes {size(cache_bytes)} and this machine has {size(memory)} of memory: lower kv_cache_memory "
            "or num_blocks"
        )
