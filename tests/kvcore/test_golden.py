"""Exactness: what vLLM's manager did, ours does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcore import BlockHasher, LoRAAdapter, MultiModalItem, Request
from tests.kvcore.recordings import GOLDEN, load, replay

TRACES = sorted((GOLDEN / "traces").glob("*.json.gz"))
VECTORS = json.loads((GOLDEN / "hash_vectors.json").read_text())


def test_all_recordings_are_here() -> None:
    assert len(TRACES) == 60
    assert len(VECTORS) == 32


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name.removesuffix(".json.gz"))
def test_a_recording_replays_with_equal_results_tables_queue_usage_and_events(path: Path) -> None:
    assert list(replay(load(path))) == []


@pytest.mark.parametrize("path", TRACES[::6], ids=lambda path: path.name.removesuffix(".json.gz"))
@pytest.mark.parametrize("algorithm", ["xxh3", "sha256_raw", "sha256", "xxhash", "xxhash_cbor"])
def test_the_books_do_not_depend_on_the_hash_algorithm(path: Path, algorithm: str) -> None:
    assert list(replay(load(path), algorithm)) == []


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"{vector['algorithm']}-{vector['block_size']}")
def test_a_recorded_hash_vector_is_equal_byte_for_byte(vector: dict[str, Any]) -> None:
    hasher = BlockHasher(vector["block_size"], vector["algorithm"], seed=vector["seed"])
    request = Request(
        "r",
        vector["tokens"],
        block_hasher=hasher,
        cache_salt=vector["cache_salt"],
        lora=LoRAAdapter(*vector["lora"]) if vector["lora"] else None,
        mm_items=[MultiModalItem(*item) for item in vector["mm"]],
    )
    assert hasher.root.hex() == vector["none_hash"]
    assert [block_hash.hex() for block_hash in request.block_hashes] == vector["hashes"]
