"""The loops that are written in C, where kvcore is compiled, beside what they stand for."""

from __future__ import annotations

import random
import sys
from array import array
from typing import Any

import pytest
import xxhash

import kvcore
from kvcore import BlockHasher
from kvcore.hashing import MAX_TOKEN_ID, packed_blocks

if not kvcore.COMPILED:
    pytest.skip("kvcore is not compiled (make test-compiled)", allow_module_level=True)

PARENT = bytes(range(16))


class TestHashChain:
    @pytest.mark.parametrize("lengths", [range(1, 300), range(300, 3000, 7), [65_536, 100_001]], ids=str)
    def test_blocks_of_every_length_hash_as_xxhash_says(self, lengths: range) -> None:
        data = random.Random(0).randbytes(3 * max(lengths))
        for length in lengths:
            expected, parent = [], PARENT
            for block in range(3):
                parent = xxhash.xxh3_128_digest(parent + data[block * length : (block + 1) * length])
                expected.append(parent)
            assert packed_blocks.hash_chain(PARENT, data, length, 0, 3) == expected, f"of {length} bytes"
            assert packed_blocks.hash_chain(expected[0], data, length, 1, 3) == expected[1:]

    def test_no_blocks_have_no_hashes(self) -> None:
        assert packed_blocks.hash_chain(PARENT, array("I", [1, 2, 3]), 8, 1, 1) == []
        assert packed_blocks.hash_chain(PARENT, b"", 8, 0, 0) == []

    @pytest.mark.parametrize(
        ("parent", "length", "start", "stop", "error"),
        [
            (PARENT[1:], 8, 0, 1, "a parent hash has 16 bytes, got 15"),
            (PARENT, 8, 0, 3, "no blocks 0 to 3 of 8 bytes in 20"),
            (PARENT, 8, 2, 1, "no blocks 2 to 1"),
            (PARENT, 8, -1, 1, "no blocks -1 to 1"),
            (PARENT, 0, 0, 0, "of 0 bytes"),
            (PARENT, sys.maxsize, 0, 1, "no blocks 0 to 1"),
            (PARENT, 8, sys.maxsize, sys.maxsize, "no blocks"),
        ],
    )
    def test_blocks_that_are_not_there_are_refused_and_the_tokens_let_go(
        self, parent: bytes, length: int, start: int, stop: int, error: str
    ) -> None:
        tokens = array("I", [1, 2, 3, 4, 5])
        with pytest.raises(ValueError, match=error):
            packed_blocks.hash_chain(parent, tokens, length, start, stop)
        tokens.append(6)  # BufferError while somebody reads it

    def test_the_tokens_are_let_go(self) -> None:
        tokens = array("I", [1, 2, 3, 4])
        references = sys.getrefcount(tokens)
        packed_blocks.hash_chain(PARENT, tokens, 8, 0, 2)
        tokens.append(5)
        assert sys.getrefcount(tokens) == references


class NoPlainInt(int):
    pass


class TestPack:
    @pytest.mark.parametrize("tokens", [[], [0], [1, 255, 256, 2**15 - 1, 2**15, 2**16, 2**29, 2**30 - 1] * 100])
    def test_tokens_are_packed_as_an_array_has_them(self, tokens: list[int]) -> None:
        packed = array("I", [7]) * len(tokens)
        assert packed_blocks.pack_into(packed, tokens)
        assert packed == array("I", tokens)
        packed.append(1)  # BufferError while somebody writes to it

    @pytest.mark.parametrize("odd", [-1, 2**30, MAX_TOKEN_ID, 2**64, -(2**64), True, NoPlainInt(5), 1.0, "a", None])
    @pytest.mark.parametrize("place", [0, 1, 2])
    def test_what_is_no_small_int_is_left_to_others(self, odd: Any, place: int) -> None:
        tokens = [7, 8]
        tokens.insert(place, odd)
        packed = array("I", [0, 0, 0])
        assert not packed_blocks.pack_into(packed, tokens)
        packed.append(1)

    @pytest.mark.parametrize("tokens", [(1, 2), array("I", [1]), range(3), None])
    def test_what_is_no_list_is_refused(self, tokens: Any) -> None:
        with pytest.raises(TypeError):
            packed_blocks.pack_into(array("I", [0, 0, 0]), tokens)

    @pytest.mark.parametrize("length", [0, 1, 3])
    def test_a_list_that_has_changed_meanwhile_is_left_to_others(self, length: int) -> None:
        packed = array("I", [7]) * length
        assert not packed_blocks.pack_into(packed, [1, 2])
        assert packed == array("I", [7]) * length

    def test_what_cannot_be_written_to_is_refused(self) -> None:
        with pytest.raises(TypeError):
            packed_blocks.pack_into(b"01234567", [1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["xxh3", "sha256_raw"])
@pytest.mark.parametrize("largest", [1000, 2**30, MAX_TOKEN_ID])
def test_a_hasher_says_the_same_with_them_and_without(
    algorithm: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(largest)
    tokens = [rng.randint(0, largest) for _ in range(1000)]
    keys = {index: (("cache_salt", str(index)),) for index in (0, 3, 4, 40)}
    hasher = BlockHasher(16, algorithm, seed="0")
    with_c = hasher.hash_tokens(tokens), hasher.hash_tokens(tokens, keys)
    monkeypatch.setattr("kvcore.hashing.packed_blocks", None)
    assert (hasher.hash_tokens(tokens), hasher.hash_tokens(tokens, keys)) == with_c
