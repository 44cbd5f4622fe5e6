"""Block hashes: ``h_i = H(h_{i-1}, tokens_i, extra_i)``, so that a hash names the whole prefix (rule 5).

| algorithm | H(parent, tokens, extra) | bytes | a hit is |
|---|---|---|---|
| ``xxh3`` | XXH3-128 of parent + tokens + extra, packed | 16 | verified |
| ``sha256_raw`` | SHA-256 of parent + tokens + extra, packed | 32 | trusted |
| ``sha256`` | SHA-256 of the pickled tuple, as in vLLM | 32 | trusted |
| ``sha256_cbor`` | SHA-256 of the tuple in canonical CBOR, as in vLLM | 32 | trusted |
| ``xxhash`` | XXH3-128 of the pickled tuple, as in vLLM | 16 | verified |
| ``xxhash_cbor`` | XXH3-128 of the tuple in canonical CBOR, as in vLLM | 16 | verified |

Packed: each token as an unsigned 32-bit integer, little-endian; then, for a block that has any, its extra keys in
canonical CBOR. Parent and tokens have a fixed length, so that no two inputs share an encoding.
"""

from __future__ import annotations

import hashlib
import operator
import os
import pickle
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import chain, repeat
from typing import Any, NamedTuple, cast

import cbor2
import xxhash

from kvcore.errors import ConfigError, TokenRangeError
from kvcore.extra_keys import BlockExtraKeys

try:
    from kvcore import packed_blocks
except ImportError:  # not compiled
    packed_blocks = None  # type: ignore[assignment]

DEFAULT_SEED = "vllm-none-hash"
"""Seed of the collision-resistant algorithms when none is given: processes then agree on every hash."""

MAX_TOKEN_ID = 2**32 - 1
"""Largest token id: hashes pack tokens into unsigned 32-bit integers."""


_new_sha256 = hashlib.sha256().copy
"""A tenth faster than ``hashlib.sha256``, which looks the algorithm up each time."""


def _sha256(data: bytes) -> bytes:
    sha256 = _new_sha256()
    sha256.update(data)
    return sha256.digest()


def _sha256_chain(parent: bytes, blocks: Iterable[bytes]) -> list[bytes]:
    """The hash of each block, of its parent's hash and itself. 6% sooner than by calls of :func:`_sha256`."""
    hashes = []
    for block in blocks:
        sha256 = _new_sha256()
        sha256.update(parent + block)
        hashes.append(parent := sha256.digest())
    return hashes


_pickle = partial(pickle.dumps, protocol=5)
_cbor = partial(cbor2.dumps, canonical=True)


class _Algorithm(NamedTuple):
    digest: Callable[[bytes], bytes]
    serialize: Callable[[Any], bytes] | None  # None: packed
    collision_resistant: bool


ALGORITHMS: Mapping[str, _Algorithm] = {
    "xxh3": _Algorithm(xxhash.xxh3_128_digest, None, False),
    "sha256_raw": _Algorithm(_sha256, None, True),
    "sha256": _Algorithm(_sha256, _pickle, True),
    "sha256_cbor": _Algorithm(_sha256, _cbor, True),
    "xxhash": _Algorithm(xxhash.xxh3_128_digest, _pickle, False),
    "xxhash_cbor": _Algorithm(xxhash.xxh3_128_digest, _cbor, False),
}


class BlockHasher:
    """Hashes the full blocks of token sequences.

    One hasher serves any number of requests. Hashers agree on every hash when algorithm, block size and seed are equal.

    Args:
        block_size: Tokens per hash block.
        algorithm: A name of the table above.
        seed: Decides the root, the parent of every first block. None: the environment's ``PYTHONHASHSEED`` if set, else
            a fixed string for SHA-256, and random bytes for the others, since whoever knows the seed of a weak hash can
            make collisions.
        verify_hits: Compare tokens, extra keys and the whole prefix on every hit, so that a collision costs a
            recomputation and never a wrong answer. None: for the algorithms that are not collision-resistant.

    Attributes:
        root: The parent hash of a first block.

    Raises:
        ConfigError: Unknown algorithm, or a block size below 1.
    """

    def __init__(
        self,
        block_size: int,
        algorithm: str = "xxh3",
        seed: str | int | None = None,
        *,
        verify_hits: bool | None = None,
    ) -> None:
        if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
            raise ConfigError(f"block_size must be a whole number of at least 1, got {block_size!r}")
        if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
            raise ConfigError(f"algorithm must be one of {', '.join(ALGORITHMS)}; got {algorithm!r}")
        self.block_size = block_size
        self.algorithm = algorithm
        self._digest, self._serialize, collision_resistant = ALGORITHMS[algorithm]
        self.verify_hits = not collision_resistant if verify_hits is None else verify_hits
        if seed is None:
            seed = os.environ.get("PYTHONHASHSEED")
        if seed is None:
            seed = DEFAULT_SEED if collision_resistant else os.urandom(32).hex()
        seed = str(seed)
        self.root = self._digest(seed.encode() if self._serialize is None else self._serialize(seed))

    def __repr__(self) -> str:
        return (
            f"BlockHasher(block_size={self.block_size}, algorithm={self.algorithm!r}, verify_hits={self.verify_hits})"
        )

    def hash_tokens(
        self, token_ids: Sequence[int], extra_keys: Mapping[int, BlockExtraKeys] | None = None
    ) -> list[bytes]:
        """The hashes of all full blocks of a sequence, for requests of a class of the caller's own.

        Args:
            token_ids: Tokens.
            extra_keys: Extra keys by block index, for the blocks that have any.

        Raises:
            TokenRangeError: A token id is not a whole number from 0 to :data:`MAX_TOKEN_ID`.
        """
        hashes: list[bytes] = []
        self.extend(hashes, pack_tokens(token_ids), extra_keys or {})
        return hashes

    def extend(self, hashes: list[bytes], token_ids: array[int], extra_keys: Mapping[int, BlockExtraKeys]) -> None:
        """Appends the hashes of the full blocks of ``token_ids`` that ``hashes`` does not cover yet.

        About 80 ns a block of 16 tokens with ``xxh3``, 35 where kvcore is compiled.

        Args:
            hashes: The hashes of the first blocks.
            token_ids: All tokens, packed by :func:`pack_tokens`.
            extra_keys: Extra keys by block index, for those of the new blocks that have any.
        """
        start, stop = len(hashes), len(token_ids) // self.block_size
        parent = hashes[-1] if hashes else self.root
        if self._serialize is not None:
            hashes += self._serialized_hashes(parent, token_ids, start, stop, extra_keys)
        elif extra_keys or sys.byteorder == "big":
            hashes += self._packed_hashes(parent, token_ids, start, stop, extra_keys)
        else:
            hashes += self._token_hashes(parent, token_ids, start, stop)

    def _packed_hashes(
        self, parent: bytes, token_ids: array[int], start: int, stop: int, extra_keys: Mapping[int, BlockExtraKeys]
    ) -> list[bytes]:
        if sys.byteorder == "big":
            token_ids = token_ids[:]
            token_ids.byteswap()
        hashes: list[bytes] = []
        for index in sorted(index for index in extra_keys if start <= index < stop):
            hashes += self._token_hashes(parent, token_ids, start, index)
            parent = hashes[-1] if hashes else parent
            tokens = token_ids[index * self.block_size : (index + 1) * self.block_size].tobytes()
            parent = self._digest(parent + tokens + _cbor(extra_keys[index]))
            hashes.append(parent)
            start = index + 1
        return hashes + self._token_hashes(parent, token_ids, start, stop)

    def _token_hashes(self, parent: bytes, token_ids: array[int], start: int, stop: int) -> list[bytes]:
        """Of blocks without extra keys."""
        if start == stop:
            return []
        length = 4 * self.block_size
        digest = self._digest
        if packed_blocks is not None and digest is xxhash.xxh3_128_digest and len(parent) == 16:
            return packed_blocks.hash_chain(parent, token_ids, length, start, stop)
        if stop - start == 1:
            # One more block in decoding: the machinery for many would cost four times as much.
            return [digest(parent + token_ids[start * self.block_size : stop * self.block_size].tobytes())]
        blocks = _pieces(token_ids, length, start, stop)
        if digest is _sha256:
            return _sha256_chain(parent, blocks)
        # One concatenation and one digest call a block: anything more shows.
        return [parent := digest(parent + block) for block in blocks]

    def _serialized_hashes(
        self, parent: bytes, token_ids: array[int], start: int, stop: int, extra_keys: Mapping[int, BlockExtraKeys]
    ) -> list[bytes]:
        assert self._serialize is not None
        size = self.block_size
        hashes = []
        for index in range(start, stop):
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            parent = self._digest(self._serialize((parent, tokens, _apart(extra_keys.get(index)))))
            hashes.append(parent)
        return hashes


def _apart(extra_keys: BlockExtraKeys | None) -> BlockExtraKeys | None:
    """The keys, with no string in them twice: pickle writes a string that it has written already as a reference, if it
    is the same object and not only equal to it, and the hash would depend on how the caller came by it."""
    if extra_keys is None:
        return None
    apart = [
        (tag, *(part[:1] + part[1:] if isinstance(part, str) else part for part in parts)) for tag, *parts in extra_keys
    ]
    return cast(BlockExtraKeys, tuple(apart))


def pack_tokens(token_ids: int | Iterable[int]) -> array[int]:
    """Tokens as unsigned 32-bit integers in the machine's byte order.

    4 ns a token for a list, 3 where kvcore is compiled.

    Raises:
        TokenRangeError: A token id is not a whole number from 0 to :data:`MAX_TOKEN_ID`.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        return token_ids[:]
    plain = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids  # numpy, torch, other arrays
    tokens = plain if isinstance(plain, list) else list(plain) if isinstance(plain, Iterable) else [plain]
    if packed_blocks is not None:
        packed = array("I", (0,)) * len(tokens)
        if packed_blocks.pack_into(packed, tokens):
            return packed
    packed = array("I")
    try:
        packed.fromlist(tokens)  # a quarter less than array("I", tokens)
    except (OverflowError, TypeError):
        raise _first_bad_token(tokens) from None
    return packed


def _pieces(data: array[int], size: int, start: int, stop: int) -> Iterator[bytes]:
    """Pieces ``start`` to ``stop`` of ``data``, each of ``size`` bytes.

    15 ns a piece, against 60 for a slice: ``struct`` cuts 32 at a time, which are still in the processor's cache when
    they are hashed.
    """
    full = range(start, stop - _BATCH + 1, _BATCH)
    rest = start + len(full) * _BATCH
    cut_full, cut_rest = _cutter(size, _BATCH), _cutter(size, stop - rest)
    batches = map(cut_full, repeat(data), range(start * size, rest * size, _BATCH * size))
    return chain(chain.from_iterable(batches), cut_rest(data, rest * size))


_BATCH = 32


@lru_cache(maxsize=256)
def _cutter(size: int, count: int) -> Callable[[array[int], int], tuple[bytes, ...]]:
    return struct.Struct(f"{size}s" * count).unpack_from


def _first_bad_token(token_ids: Sequence[int]) -> TokenRangeError:
    token: object = None
    for token in token_ids:
        if not hasattr(token, "__index__") or not 0 <= operator.index(token) <= MAX_TOKEN_ID:
            break
    return TokenRangeError(f"token ids must be whole numbers from 0 to {MAX_TOKEN_ID}, got {token!r}")
