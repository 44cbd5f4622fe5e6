"""What a KV cache is made of: a spec for each kind of attention, groups of layers that share a block table, the config.

Specs are frozen and hashable. Sizes are in tokens unless the name says bytes. ``dtype`` is a string, so that no tensor
library is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvcore.errors import ConfigError, shown

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element of every dtype a cache can be kept in."""


def cdiv(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def require_positive(**sizes: int) -> None:
    """Raises ConfigError unless each size is a whole number of at least 1."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {shown(value)}")


@dataclass(frozen=True)
class KVCacheSpec:
    """The cache of one attention layer.

    Args:
        block_size: Tokens per block.
        num_kv_heads: Heads of keys (and as many of values) per token.
        head_size: Elements per head.
        dtype: Element type, a key of :data:`DTYPE_BYTES`.

    Raises:
        ConfigError: A size is not a positive whole number, or the dtype is unknown.
    """

    kind: ClassVar[str]
    """What KV events call it."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str

    def __post_init__(self) -> None:
        require_positive(block_size=self.block_size, num_kv_heads=self.num_kv_heads, head_size=self.head_size)
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")

    @property
    def bytes_per_token(self) -> int:
        """Bytes the keys and values of one token take in one layer."""
        return 2 * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    @property
    def page_size_bytes(self) -> int:
        """Bytes one block takes in one layer."""
        return self.block_size * self.bytes_per_token

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int | None = None) -> int:
        """Most blocks one request holds at once in this layer's group.

        Args:
            max_model_len: Longest sequence, in tokens.
            max_in_flight_tokens: Most tokens of one request in one step; None: the whole sequence may come in one.
        """
        return cdiv(max_model_len, self.block_size)


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Every token reads every token before it."""

    kind = "full_attention"


@dataclass(frozen=True)
class SlidingWindowSpec(KVCacheSpec):
    """A token reads itself and the ``sliding_window - 1`` tokens before it.

    Args:
        sliding_window: W, in tokens, the token itself included.
    """

    kind = "sliding_window"

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(sliding_window=self.sliding_window)

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int | None = None) -> int:
        """As the base; bounded by the window, the tokens in flight, and one block that the window only begins in."""
        if max_in_flight_tokens is None:
            max_in_flight_tokens = max_model_len
        held = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        return cdiv(held, self.block_size) + 1


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(KVCacheSpec):
    """A token reads back to the start of its own chunk, never before it (as in Llama 4).

    Args:
        attention_chunk_size: Tokens per chunk; chunks start at multiples of it.
    """

    kind = "chunked_local_attention"

    attention_chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(attention_chunk_size=self.attention_chunk_size)

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int | None = None) -> int:
        """As the base; bounded by one chunk and the tokens in flight."""
        if max_in_flight_tokens is None:
            max_in_flight_tokens = max_model_len
        held = min(self.attention_chunk_size + max_in_flight_tokens, max_model_len)
        # A chunk that begins inside a block keeps that whole block.
        begins_inside = self.attention_chunk_size % self.block_size != 0
        return cdiv(held, self.block_size) + begins_inside


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table.

    Args:
        layer_names: Names of the layers, one at least.
        kv_cache_spec: What each of them caches.

    Raises:
        ConfigError: No layers, or something that is no spec.
    """

    layer_names: Sequence[str]
    kv_cache_spec: KVCacheSpec

    def __post_init__(self) -> None:
        if not self.layer_names:
            raise ConfigError("a KV cache group needs the name of at least one layer")
        if not isinstance(self.kv_cache_spec, KVCacheSpec):
            raise ConfigError(f"kv_cache_spec must be a KVCacheSpec, got {type(self.kv_cache_spec).__name__}")


@dataclass(frozen=True)
class KVCacheTensor:
    """One buffer of the cache: ``num_blocks`` pages, shared by a layer of each group.

    Args:
        size: Bytes.
        shared_by: The layers that live in it, at most one of each group: a block belongs to one group at a time, so
            that they never meet.
    """

    size: int
    shared_by: Sequence[str]


@dataclass(frozen=True)
class KVCacheConfig:
    """How a cache is laid out.

    Args:
        num_blocks: Blocks in the pool, the null block (block 0) included; 2 at least.
        kv_cache_groups: One entry per block table; each with its own spec.
        kv_cache_tensors: Where the layers' pages live; the books do not need it.

    Raises:
        ConfigError: No groups, or too few blocks to hold one beside the null block.
    """

    num_blocks: int
    kv_cache_groups: Sequence[KVCacheGroupSpec]
    kv_cache_tensors: Sequence[KVCacheTensor] = field(default=())

    def __post_init__(self) -> None:
        if isinstance(self.num_blocks, bool) or not isinstance(self.num_blocks, int) or self.num_blocks < 2:
            raise ConfigError(
                f"num_blocks must be a whole number of at least 2 (block 0 is the null block), got {self.num_blocks!r}"
            )
        if not self.kv_cache_groups:
            raise ConfigError(
                "a KV cache needs at least one group: pass KVCacheGroupSpec(layer_names, kv_cache_spec) entries"
            )

    @classmethod
    def from_hf_config(cls, config: Any, **options: Any) -> KVCacheConfig:
        """The layout for a transformers model. See :func:`kvcore.planning_hf.plan_from_hf_config` for what it takes."""
        from kvcore.planning_hf import plan_from_hf_config

        return plan_from_hf_config(config, **options)
