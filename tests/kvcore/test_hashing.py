"""Block hashes: a hash names the whole prefix, for every algorithm, in every process that has the seed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise

import cbor2
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvcore import BlockHasher, MultiModalItem, Request
from kvcore.hashing import ALGORITHMS, DEFAULT_SEED, MAX_TOKEN_ID

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
COLLISION_RESISTANT = ["sha256_raw", "sha256", "sha256_cbor"]
WEAK = ["xxh3", "xxhash", "xxhash_cbor"]
TOKENS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, MAX_TOKEN_ID)), max_size=40)


def little_endian(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


class TestWhatAHashIs:
    def test_xxh3_is_the_128_bit_digest_of_the_parent_and_the_packed_tokens(self) -> None:
        hasher = BlockHasher(2, "xxh3", seed="s")
        first = xxhash.xxh3_128_digest(hasher.root + little_endian([1, 2**32 - 1]))
        second = xxhash.xxh3_128_digest(first + little_endian([0, 7]))
        assert hasher.root == xxhash.xxh3_128_digest(b"s")
        assert hasher.hash_tokens([1, 2**32 - 1, 0, 7, 5]) == [first, second]

    def test_sha256_raw_is_the_digest_of_the_parent_the_packed_tokens_and_the_extra_keys(self) -> None:
        hasher = BlockHasher(2, "sha256_raw", seed="s")
        keys = (("cache_salt", "tenant"),)
        extra = cbor2.dumps(keys, canonical=True)
        first = hashlib.sha256(hasher.root + little_endian([1, 2]) + extra).digest()
        second = hashlib.sha256(first + little_endian([3, 4])).digest()
        assert hasher.root == hashlib.sha256(b"s").digest()
        assert hasher.hash_tokens([1, 2, 3, 4], {0: keys}) == [first, second]

    @pytest.mark.parametrize(
        ("algorithm", "digest"),
        [("xxh3", xxhash.xxh3_128_digest), ("sha256_raw", lambda data: hashlib.sha256(data).digest())],
    )
    @given(
        tokens=TOKENS,
        block_size=st.integers(1, 4),
        salted=st.sets(st.integers(-1, 42)),
        known=st.integers(0, 40),
    )
    def test_extra_keys_count_for_the_blocks_that_have_them(
        self,
        algorithm: str,
        digest: Callable[[bytes], bytes],
        tokens: list[int],
        block_size: int,
        salted: set[int],
        known: int,
    ) -> None:
        hasher = BlockHasher(block_size, algorithm, seed=0)
        keys = {index: (("cache_salt", str(index)),) for index in sorted(salted, reverse=True)}
        parent, expected = hasher.root, []
        for index in range(len(tokens) // block_size):
            extra = cbor2.dumps(keys[index], canonical=True) if index in keys else b""
            parent = digest(parent + little_endian(tokens[index * block_size : (index + 1) * block_size]) + extra)
            expected.append(parent)
        assert hasher.hash_tokens(tokens, keys) == expected
        hashes = expected[:known]
        hasher.extend(hashes, array("I", tokens), keys)
        assert hashes == expected

    @every_algorithm
    @pytest.mark.parametrize("block_size", [2**38, 2**80])
    def test_a_block_size_that_no_sequence_fills_costs_nothing(self, algorithm: str, block_size: int) -> None:
        assert BlockHasher(block_size, algorithm).hash_tokens([1, 2]) == []

    @pytest.mark.parametrize("root", [b"", b"of another length than all others"])
    def test_a_root_of_any_length_will_do(self, root: bytes) -> None:
        hasher = BlockHasher(2, "xxh3")
        hasher.root = root
        first = xxhash.xxh3_128_digest(root + little_endian([1, 2]))
        second = xxhash.xxh3_128_digest(first + little_endian([3, 4]))
        assert hasher.hash_tokens([1, 2, 3, 4, 5]) == [first, second]

    def test_a_machine_of_the_other_byte_order_packs_tokens_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hasher = BlockHasher(2, "sha256_raw", seed=0)
        expected = hasher.hash_tokens([1, 2, 3, 2**32 - 2])
        tokens = array("I", [1, 2, 3, 2**32 - 2])
        tokens.byteswap()  # what such a machine has in its memory
        monkeypatch.setattr(sys, "byteorder", {"little": "big", "big": "little"}[sys.byteorder])
        assert hasher.hash_tokens(tokens) == expected

    @every_algorithm
    def test_only_full_blocks_have_one(self, algorithm: str) -> None:
        hasher = BlockHasher(4, algorithm)
        assert [len(hasher.hash_tokens(range(n))) for n in (0, 1, 3, 4, 7, 8)] == [0, 0, 0, 1, 1, 2]

    @every_algorithm
    def test_it_is_16_bytes_of_a_fast_algorithm_and_32_of_a_strong_one(self, algorithm: str) -> None:
        (block_hash,) = BlockHasher(4, algorithm).hash_tokens(range(4))
        assert len(block_hash) == (16 if algorithm in WEAK else 32)

    @pytest.mark.parametrize("num_blocks", [1, 31, 32, 33, 64, 65, 100])
    @every_algorithm
    def test_long_prompts_are_hashed_like_short_ones(self, algorithm: str, num_blocks: int) -> None:
        hasher = BlockHasher(2, algorithm, seed=0)
        hashes = hasher.hash_tokens(range(2 * num_blocks))
        parent = BlockHasher(2, algorithm, seed=0)
        one_by_one = []
        for block in range(num_blocks):
            (parent.root,) = parent.hash_tokens([2 * block, 2 * block + 1])
            one_by_one.append(parent.root)
        assert hashes == one_by_one


class TestAHashNamesTheWholePrefix:
    @every_algorithm
    @given(left=TOKENS, right=TOKENS, block_size=st.integers(1, 5))
    def test_two_hashes_are_equal_exactly_if_all_tokens_up_to_there_are(
        self, algorithm: str, left: list[int], right: list[int], block_size: int
    ) -> None:
        hasher = BlockHasher(block_size, algorithm, seed=0)
        of_left, of_right = hasher.hash_tokens(left), hasher.hash_tokens(right)
        for i, left_hash in enumerate(of_left):
            for j, right_hash in enumerate(of_right):
                same = i == j and left[: (i + 1) * block_size] == right[: (j + 1) * block_size]
                assert (left_hash == right_hash) == same

    @every_algorithm
    @given(tokens=TOKENS)
    def test_a_longer_sequence_begins_with_the_hashes_of_a_shorter_one(self, algorithm: str, tokens: list[int]) -> None:
        hasher = BlockHasher(3, algorithm)
        hashes = hasher.hash_tokens(tokens)
        for stop in range(len(tokens)):
            assert hasher.hash_tokens(tokens[:stop]) == hashes[: stop // 3]

    @every_algorithm
    def test_equal_blocks_in_one_sequence_have_different_hashes(self, algorithm: str) -> None:
        hashes = BlockHasher(4, algorithm).hash_tokens([0] * 400)
        assert len(set(hashes)) == 100


class TestGrowing:
    @every_algorithm
    @given(
        tokens=st.lists(st.integers(0, MAX_TOKEN_ID), min_size=1, max_size=40),
        block_size=st.integers(1, 5),
        cuts=st.sets(st.integers(1, 39)),
    )
    def test_tokens_appended_in_any_portions_hash_like_all_at_once(
        self, algorithm: str, tokens: list[int], block_size: int, cuts: set[int]
    ) -> None:
        hasher = BlockHasher(block_size, algorithm)
        images = [MultiModalItem("image", 2, 7)]
        at_once = Request("r", tokens, block_hasher=hasher, mm_items=images, cache_salt="salt")
        ends = [*sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]
        request = Request("r", tokens[: ends[0]], block_hasher=hasher, mm_items=images, cache_salt="salt")
        for start, end in pairwise(ends):
            request.append_output_token_ids(tokens[start] if end == start + 1 else tokens[start:end])
        assert request.block_hashes == at_once.block_hashes
        assert len(request.block_hashes) == len(tokens) // block_size


class TestInputs:
    @pytest.mark.parametrize("typecode", ["B", "H", "I", "L", "Q", "b", "h", "i", "l", "q"])
    def test_arrays_of_any_integer_type(self, typecode: str) -> None:
        hasher = BlockHasher(4, seed=0)
        tokens = array(typecode, range(100, 109))
        assert hasher.hash_tokens(tokens) == hasher.hash_tokens(list(range(100, 109)))
        assert (
            Request("r", tokens, block_hasher=hasher).block_hashes
            == Request("r", range(100, 109), block_hasher=hasher).block_hashes
        )

    @pytest.mark.parametrize("dtype", ["int64", "int32", "uint32", "uint16", "uint64"])
    @every_algorithm
    def test_numpy_arrays_and_numpy_integers(self, algorithm: str, dtype: str) -> None:
        numpy = pytest.importorskip("numpy")
        hasher = BlockHasher(4, algorithm, seed=0)
        tokens = numpy.arange(100, 109, dtype=dtype)
        expected = Request("r", range(100, 109), block_hasher=hasher)
        for given_as in (tokens, list(tokens), tuple(tokens)):
            request = Request("r", given_as, block_hasher=hasher)
            assert request.block_hashes == expected.block_hashes
            assert request.all_token_ids == expected.all_token_ids
            assert {type(token) for token in request.all_token_ids} == {int}

    def test_generators_ranges_and_tuples(self) -> None:
        hasher = BlockHasher(4, seed=0)
        expected = hasher.hash_tokens(list(range(9)))
        for tokens in (range(9), tuple(range(9)), (token for token in range(9))):
            assert Request("r", tokens, block_hasher=hasher).block_hashes == expected

    @every_algorithm
    def test_the_smallest_and_the_largest_token(self, algorithm: str) -> None:
        hasher = BlockHasher(1, algorithm)
        smallest, largest = hasher.hash_tokens([0])[0], hasher.hash_tokens([MAX_TOKEN_ID])[0]
        assert smallest != largest

    def test_the_caller_may_change_its_array_afterwards(self) -> None:
        hasher = BlockHasher(4, seed=0)
        tokens = array("I", range(6))
        request = Request("r", tokens, block_hasher=hasher)
        tokens[0] = 99
        tokens[5] = 99
        request.append_output_token_ids([6, 7])
        assert request.block_hashes == hasher.hash_tokens(range(8))


class TestSeeds:
    @every_algorithm
    def test_equal_seeds_agree_and_others_differ(self, algorithm: str) -> None:
        assert BlockHasher(4, algorithm, seed="a").root == BlockHasher(4, algorithm, seed="a").root
        assert BlockHasher(4, algorithm, seed="a").root != BlockHasher(4, algorithm, seed="b").root
        assert BlockHasher(4, algorithm, seed=7).root == BlockHasher(4, algorithm, seed="7").root
        assert BlockHasher(4, algorithm, seed=0).root != BlockHasher(4, algorithm, seed="").root

    @every_algorithm
    def test_the_seed_changes_every_hash(self, algorithm: str) -> None:
        a, b = (BlockHasher(4, algorithm, seed=seed).hash_tokens(range(40)) for seed in ("a", "b"))
        assert not {*a} & {*b}

    @every_algorithm
    def test_the_environment_gives_it_where_the_caller_does_not(
        self, algorithm: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTHONHASHSEED", "42")
        assert BlockHasher(4, algorithm).root == BlockHasher(4, algorithm, seed=42).root
        assert BlockHasher(4, algorithm, seed="own").root != BlockHasher(4, algorithm).root

    @pytest.mark.parametrize("algorithm", COLLISION_RESISTANT)
    def test_without_any_strong_algorithms_use_a_fixed_one(
        self, algorithm: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        assert DEFAULT_SEED == "vllm-none-hash"
        assert BlockHasher(4, algorithm).root == BlockHasher(4, algorithm, seed=DEFAULT_SEED).root

    @pytest.mark.parametrize("algorithm", WEAK)
    def test_without_any_fast_algorithms_draw_one_that_nobody_can_know(
        self, algorithm: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        assert len({BlockHasher(4, algorithm).root for _ in range(10)}) == 10

    def test_two_processes_agree_on_strong_hashes_and_not_on_fast_ones(self) -> None:
        code = (
            "from kvcore import BlockHasher\n"
            "for algorithm in ('sha256_raw', 'sha256', 'sha256_cbor', 'xxh3', 'xxhash', 'xxhash_cbor'):\n"
            "    print(BlockHasher(4, algorithm).hash_tokens(range(4))[0].hex())"
        )
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        first, second = (
            subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
            for _ in range(2)
        )
        pairs = list(zip(first.stdout.split(), second.stdout.split(), strict=True))
        assert [one == other for one, other in pairs] == [True, True, True, False, False, False]


class TestVerification:
    @every_algorithm
    def test_hits_of_fast_hashes_are_verified_unless_told_otherwise(self, algorithm: str) -> None:
        assert BlockHasher(4, algorithm).verify_hits == (algorithm in WEAK)
        assert BlockHasher(4, algorithm, verify_hits=True).verify_hits is True
        assert BlockHasher(4, algorithm, verify_hits=False).verify_hits is False

    @every_algorithm
    def test_it_changes_no_hash(self, algorithm: str) -> None:
        verified, trusted = (
            Request("r", range(20), block_hasher=BlockHasher(4, algorithm, seed=0, verify_hits=verify), cache_salt="s")
            for verify in (True, False)
        )
        assert verified.block_hashes == trusted.block_hashes
        assert verified.block_contents is not None
        assert trusted.block_contents is None


def test_a_hasher_says_what_it_does() -> None:
    assert repr(BlockHasher(4)) == "BlockHasher(block_size=4, algorithm='xxh3', verify_hits=True)"
    assert BlockHasher(4, "sha256_raw").algorithm == "sha256_raw"
