"""kvcore: the KV cache manager of an LLM serving engine, as a library.

It keeps the books of a paged KV cache: which physical block holds which tokens of which request, which blocks can be
shared, and which one to overwrite next. It never touches a tensor.
"""

from kvcore.block_pool import BlockPool
from kvcore.blocks import KVCacheBlock
from kvcore.contents import PrefixContents
from kvcore.coordinator import KVCacheCoordinator
from kvcore.coordinators import HybridKVCacheCoordinator, KVCacheCoordinatorNoPrefixCache, UnitaryKVCacheCoordinator
from kvcore.errors import (
    ComputedTokensError,
    ConfigError,
    CountError,
    DoubleFreeError,
    DuplicateBlockError,
    DuplicateRequestError,
    ExtraKeyError,
    FileFormatError,
    ForeignBlockError,
    HitHandoverError,
    InvariantError,
    KVCacheError,
    OutOfBlocksError,
    PinError,
    QueueError,
    RequestProtocolError,
    StaleHitError,
    TokenRangeError,
    UnknownRequestError,
)
from kvcore.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, KVEventBatch
from kvcore.extra_keys import ExtraKeys, LoRAAdapter, MultiModalItem
from kvcore.free_block_queue import FreeKVCacheBlockQueue
from kvcore.growth import Growth
from kvcore.hashing import BlockHasher
from kvcore.kv_cache_blocks import KVCacheBlocks
from kvcore.manager import KVCacheManager
from kvcore.request import EventRequest, Request, RequestLike
from kvcore.residency import Pin
from kvcore.single_type import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from kvcore.spec import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from kvcore.stats import PrefixCacheStats

__version__ = "0.1.0"

COMPILED = not hasattr(KVCacheBlock.__init__, "__code__")
"""Whether the hot path of this installation was compiled (``make compiled``): what is compiled has no bytecode."""

__all__ = [
    "COMPILED",
    "AllBlocksCleared",
    "BlockHasher",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "ChunkedLocalAttentionManager",
    "ChunkedLocalAttentionSpec",
    "ComputedTokensError",
    "ConfigError",
    "CountError",
    "DoubleFreeError",
    "DuplicateBlockError",
    "DuplicateRequestError",
    "EventRequest",
    "ExtraKeyError",
    "ExtraKeys",
    "FileFormatError",
    "ForeignBlockError",
    "FreeKVCacheBlockQueue",
    "FullAttentionManager",
    "FullAttentionSpec",
    "Growth",
    "HitHandoverError",
    "HybridKVCacheCoordinator",
    "InvariantError",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheConfig",
    "KVCacheCoordinator",
    "KVCacheCoordinatorNoPrefixCache",
    "KVCacheError",
    "KVCacheEvent",
    "KVCacheGroupSpec",
    "KVCacheManager",
    "KVCacheSpec",
    "KVCacheTensor",
    "KVEventBatch",
    "LoRAAdapter",
    "MultiModalItem",
    "OutOfBlocksError",
    "Pin",
    "PinError",
    "PrefixCacheStats",
    "PrefixContents",
    "QueueError",
    "Request",
    "RequestLike",
    "RequestProtocolError",
    "SingleTypeKVCacheManager",
    "SlidingWindowManager",
    "SlidingWindowSpec",
    "StaleHitError",
    "TokenRangeError",
    "UnitaryKVCacheCoordinator",
    "UnknownRequestError",
]
